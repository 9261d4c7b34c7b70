"""The difference between two results over some prompts or at one position, with its p-value and verdict."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Annotated, Literal, TypeVar

from dflash_cli.acceptance.intervals.acceptance_difference import AcceptanceDifference, holm
from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_runtime.documents import HIDDEN, computed_key

Verdict = Literal["higher", "lower", "equivalent", "same", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested(ABC):
    """The second value minus the first, with its test.

    `estimate` is None if there are too few prompts for a test. An interval needs more prompts than a test.
    """

    num_conversations: int
    estimate: Annotated[AcceptanceDifference | None, HIDDEN]
    reason: Annotated[str | None, "why there is no interval"] = None
    p_value: Annotated[float | None, "corrected for the number of results, categories or positions"] = None
    equivalence_p_value: Annotated[float | None, HIDDEN] = None

    @property
    @abstractmethod
    def sides(self) -> tuple[float | None, float | None]:
        """The values of both results."""

    @property
    @computed_key
    def difference(self) -> float | None:
        """The second value minus the first."""
        if self.estimate is not None:
            return self.estimate.value
        first, second = self.sides
        return None if first is None or second is None else second - first

    @property
    @computed_key
    def interval(self) -> Interval | None:
        """The interval of the difference; null if `reason` says why."""
        return self.estimate.interval if self.estimate is not None and self.reason is None else None

    @property
    @computed_key
    def verdict(self) -> Verdict | None:
        """Whether the second value is higher, lower or equivalent; null with too few prompts.

        "higher" and "lower" are about all prompts. Few prompts must differ by enough to outweigh a kind they may lack.
        """
        if self.estimate is None or self.p_value is None:
            return None
        if self.equivalence_p_value is not None and self.equivalence_p_value < 1 - self.estimate.confidence:
            return "equivalent"
        if not self.estimate.num_differing:
            return "same"
        return self.change if self.change is not None and self.estimate.outweighs_unseen else "undecided"

    @property
    def change(self) -> Literal["higher", "lower"] | None:
        """Whether the second value is higher or lower on these prompts by more than luck; None if it may be luck."""
        if self.estimate is None or self.p_value is None or self.p_value >= 1 - self.estimate.confidence:
            return None
        return "higher" if self.estimate.value > 0 else "lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast(Tested):
    """The difference of two acceptance lengths, over all distinct prompts or over the prompts of one category."""

    category: Annotated[str | None, HIDDEN]
    acceptance_lens: tuple[float | None, float | None]
    equivalence_p_value: float | None = None

    @property
    def sides(self) -> tuple[float | None, float | None]:
        return self.acceptance_lens


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionContrast(Tested):
    """The difference of the shares of verify steps that accept one draft position and all before it."""

    position: Annotated[int, "draft position, counted from 1"]
    acceptance_rates: tuple[float | None, float | None]

    @property
    def sides(self) -> tuple[float | None, float | None]:
        return self.acceptance_rates


AnyTested = TypeVar("AnyTested", bound=Tested)


def correct_p_values(lines: Sequence[AnyTested], tolerance: float | None = None) -> list[AnyTested]:
    """Return the lines with p-values, corrected for the number of lines with a test.

    With a tolerance, they also have a p-value of equivalence.
    """
    tested = [line.estimate for line in lines if line.estimate is not None]
    values = iter(holm([item.p_value for item in tested]))
    within: Iterator[float | None] = repeat(None)
    if tolerance is not None:
        within = iter(holm([item.equivalence_p_value(tolerance) for item in tested]))
    return [
        line if line.estimate is None else replace(line, p_value=next(values), equivalence_p_value=next(within))
        for line in lines
    ]
