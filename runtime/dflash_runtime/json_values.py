"""What kind of value a key of a JSON document holds; in Python a bool is an int as well, in a config it never is."""

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_object(value: object) -> Mapping[str, Any]:
    """A JSON object, or an empty one where the value is anything else."""
    return value if isinstance(value, dict) else {}
