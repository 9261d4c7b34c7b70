"""How far two acceptance lengths are apart, and how sure that is.

An acceptance length is a ratio of sums, tokens over steps. The difference of two is linearised, so that each
conversation adds one number to it, and Student's t is taken over those numbers: over the pairs where both lengths come
from the same conversations, else over each side by itself with the degrees of freedom of Welch.

Which form holds was found by simulation, as in the tests. A long conversation pulls the length its way on both sides of
its pair, so a pair's number is taken with the length of all the others; without that 8 of 100 tests at 5% find a
difference that is none. Between independent sides that would be too careful, 2 of 100. A bootstrap has the fault of
the plain form, and costs more. Sources: Cochran 1977, chapter 6; MacKinnon and White 1985, HC3; Welch 1947.

numpy is imported where it is used, so that other commands need none. Axis letters: ... worlds of a simulation, N
conversations, 2 tokens and steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.acceptance.intervals.student import student_quantile, student_tail

if TYPE_CHECKING:
    from numpy.typing import NDArray


MIN_COMPARED = 12
"""With fewer conversations a kind of prompt that is one in four is missing too often, and nothing drawn shows it."""
TokenCounts = Sequence[tuple[float, int]]
"""For each conversation: tokens that its steps gave, and how many steps there were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceDifference:
    """By how much one acceptance length is above another, with its standard error and degrees of freedom."""

    value: float
    error: float
    freedom: int
    confidence: float

    @property
    def interval(self) -> Interval:
        width = student_quantile(1 - (1 - self.confidence) / 2, self.freedom) * self.error
        return Interval(self.value - width, self.value + width, self.confidence)

    @property
    def p_value(self) -> float:
        """Probability of a difference as large, either way, if there were none."""
        return min(1.0, 2 * student_tail(abs(_ratio(self.value, self.error)), self.freedom))

    def equivalence_p_value(self, tolerance: float) -> float:
        """Probability of a difference as small if the true one were `tolerance` or more: two one-sided tests.

        Source: Schuirmann 1987.
        """
        return student_tail(_ratio(tolerance - abs(self.value), self.error), self.freedom)

    @property
    def lower_bound(self) -> float:
        """The end of a one-sided interval of the same confidence."""
        return self.value - student_quantile(self.confidence, self.freedom) * self.error


def tokens_per_step(counts: TokenCounts) -> float | None:
    """The acceptance length over these conversations; None without steps."""
    num_steps = sum(steps for _, steps in counts)
    return sum(tokens for tokens, _ in counts) / num_steps if num_steps else None


def paired_difference(base: TokenCounts, other: TokenCounts, confidence: float) -> AcceptanceDifference | None:
    """How far `other` is above `base`, on the same conversations; None for too few of them.

    Conversations without steps on either side say nothing, and are left out.
    """
    pairs = [pair for pair in zip(base, other, strict=True) if pair[0][1] or pair[1][1]]
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    if len(pairs) < MIN_COMPARED or any(sum(steps > 0 for _, steps in side) < 2 for side in sides):
        return None
    import numpy as np

    value, error = paired_moments(*(np.array(side, dtype=float) for side in sides))
    return AcceptanceDifference(value=float(value), error=float(error), freedom=len(pairs) - 1, confidence=confidence)


def unpaired_difference(base: TokenCounts, other: TokenCounts, confidence: float) -> AcceptanceDifference | None:
    """How far `other` is above `base`, on conversations of its own; None for too few on either side."""
    sides = [[item for item in side if item[1]] for side in (base, other)]
    if min(len(side) for side in sides) < MIN_COMPARED:
        return None
    import numpy as np

    value, error, freedom = unpaired_moments(*(np.array(side, dtype=float) for side in sides))
    return AcceptanceDifference(value=float(value), error=float(error), freedom=int(freedom), confidence=confidence)


def paired_moments(base: "NDArray[Any]", other: "NDArray[Any]") -> "tuple[NDArray[Any], NDArray[Any]]":
    """[..., N, 2] twice -> the difference and its standard error, [...] each."""
    import numpy as np

    before, after = _ratio_of_sums(base), _ratio_of_sums(other)
    parts = _linearise(other, after) / (1 - _shares(other)) - _linearise(base, before) / (1 - _shares(base))
    return after - before, np.sqrt((parts**2).sum(axis=-1))


def unpaired_moments(base: "NDArray[Any]", other: "NDArray[Any]") -> "tuple[NDArray[Any], NDArray[Any], NDArray[Any]]":
    """[..., N, 2] twice -> the difference, its standard error and its degrees of freedom rounded down, [...] each."""
    import numpy as np

    ratios = [_ratio_of_sums(side) for side in (base, other)]
    freedoms = [side.shape[-2] - 1 for side in (base, other)]
    squares = [
        (_linearise(side, ratio) ** 2).sum(axis=-1) * (freedom + 1) / freedom
        for side, ratio, freedom in zip((base, other), ratios, freedoms, strict=True)
    ]
    total = squares[0] + squares[1]
    each = sum(square**2 / freedom for square, freedom in zip(squares, freedoms, strict=True))
    with np.errstate(invalid="ignore"):
        freedom = np.where(total > 0, np.floor(total**2 / each), sum(freedoms))
    return ratios[1] - ratios[0], np.sqrt(total), freedom


def _ratio_of_sums(counts: "NDArray[Any]") -> "NDArray[Any]":
    """Tokens over steps, [..., N, 2] -> [...]."""
    sums = counts.sum(axis=-2)
    ratio: NDArray[Any] = sums[..., 0] / sums[..., 1]
    return ratio


def _linearise(counts: "NDArray[Any]", ratio: "NDArray[Any]") -> "NDArray[Any]":
    """What each conversation adds to the error of the ratio, [..., N]."""
    tokens, steps = counts[..., 0], counts[..., 1]
    parts: NDArray[Any] = (tokens - ratio[..., None] * steps) / steps.sum(axis=-1, keepdims=True)
    return parts


def _shares(counts: "NDArray[Any]") -> "NDArray[Any]":
    """Each conversation's share of all steps, [..., N]."""
    shares: NDArray[Any] = counts[..., 1] / counts[..., 1].sum(axis=-1, keepdims=True)
    return shares


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for being several, so that one false finding among them all is as rare as said.

    Source: Holm 1979.
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda item: p_values[item])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def _ratio(value: float, error: float) -> float:
    """`value / error`, as large as can be where the error is nothing."""
    if error > 0:
        return value / error
    return math.copysign(math.inf, value) if value else 0.0
