"""Marks of the keys of a document, which `documents.py` explains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


INLINE, OPTIONAL, NOT_REQUIRED, HIDDEN = object(), object(), object(), object()


@dataclass(frozen=True, slots=True)
class Limits:
    """Range of a number: at least `least`, or more than `above`; less than `below`."""

    least: float | None = None
    above: float | None = None
    below: float | None = None

    def admits(self, value: float) -> bool:
        """Whether a number is in the range."""
        is_low = (self.least is not None and value < self.least) or (self.above is not None and value <= self.above)
        return not is_low and (self.below is None or value < self.below)

    @property
    def words(self) -> str:
        """The range for an error message, such as `at least 0`."""
        parts = {"at least": self.least, "more than": self.above, "less than": self.below}
        return " and ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)

    @property
    def schema(self) -> dict[str, float]:
        """The range under JSON Schema's names."""
        named = {"minimum": self.least, "exclusiveMinimum": self.above, "exclusiveMaximum": self.below}
        return {name: value for name, value in named.items() if value is not None}


def computed_key(function: Function) -> Function:
    """Mark the getter of a property as a key of the document. Its docstring's first line describes the key."""
    function.__dict__["is_computed_key"] = True
    return function
