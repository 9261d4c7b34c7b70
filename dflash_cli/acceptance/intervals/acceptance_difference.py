"""The difference of two acceptance lengths, with its standard error, interval and p-values.

An acceptance length is a ratio of sums: tokens over steps. The difference of two lengths is linearised, so each prompt
contributes one number. Student's t is computed over these numbers. If both lengths come from the same prompts, each
pair contributes one number. Otherwise each side is computed alone, with Welch's degrees of freedom.

Simulations (docs/measurements/coverage.md) decided the form. A long prompt pulls both lengths of its pair, so a
prompt's number uses the lengths of all other prompts. The degrees of freedom come from the fourth moment, because few
prompts may cause most of the spread. Sources: Cochran 1977, chapter 6; MacKinnon and White 1985, HC3; Welch 1947;
Satterthwaite 1946.

`rare_prompts.py` bounds prompts that the samples lack. Claims that a difference is small include these prompts.
`enough_prompts.py` says how many prompts an interval and a test need.

numpy is imported inside functions, so other commands do not load it. Axis letters: ... simulated data sets, N prompts,
2 tokens and steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_cli.acceptance.intervals.enough_prompts import (
    MIN_FOR_INTERVAL,
    MIN_FOR_TEST,
    why_no_interval,
    why_no_test,
)
from dflash_cli.acceptance.intervals.rare_prompts import ShareOfPrompts, fallen, risen, share_of_fall
from dflash_cli.acceptance.intervals.resampling import estimate, freedom_of, influence
from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.acceptance.intervals.student import student_quantile, student_tail
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[Any]

MIN_UNEVEN = 48
"""Fewest prompts of a side, for a test, if the other side has more than twice as many."""
MIN_DIFFERING = 6
"""With fewer prompts that differ, not even equal signs of all of them are significant at 5%."""
MIN_FOR_HARD_INTERVAL = 96
"""Fewest prompts with an interval if few of them differ, or without pairs. With fewer, it covers too often."""
TokenCounts = Sequence[tuple[float, int]]
"""Tokens that the verify steps of each distinct prompt committed, and the number of these steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceDifference:
    """The acceptance length `other` minus `base`, with its standard error and degrees of freedom.

    `num_differing` of `num_prompts` prompts have other counts on the two sides. If few differ, Student's t knows too
    little of them: bounds then contain all differences that so few differing prompts leave possible.
    """

    base: float
    other: float
    error: float
    freedom: float
    confidence: float
    num_prompts: int
    num_differing: int
    is_paired: bool = True

    @property
    def value(self) -> float:
        return self.other - self.base

    @property
    def half_width(self) -> float:
        """Half the width of Student's interval."""
        return student_quantile((1 + self.confidence) / 2, self.freedom) * self.error

    @property
    def no_interval(self) -> Notice | None:
        """Why the interval is missing, or None."""
        reason = why_no_interval(self.num_prompts, MIN_FOR_INTERVAL if self.is_paired else MIN_FOR_HARD_INTERVAL)
        few_differ = self.error and self.num_differing < MIN_DIFFERING and self.num_prompts < MIN_FOR_HARD_INTERVAL
        if reason is not None or not few_differ:
            return reason
        text = f"{self.num_differing} of {self.num_prompts} distinct prompts differ, and an interval needs "
        return Notice(f"{text}{MIN_DIFFERING} or more, or {MIN_FOR_HARD_INTERVAL} prompts", id="few-prompts-differ")

    @property
    def interval(self) -> Interval | None:
        """Student's interval. If nothing varies, all differences that the rule of three leaves possible."""
        if self.no_interval is not None:
            return None
        low, high = self.value - self.half_width, self.value + self.half_width
        if not self.error:
            share = self._sparse.upper((1 - self.confidence) / 2)
            low, high = self._fall(share), risen(self._start, share) - self.base
        return Interval(low, high, self.confidence)

    @property
    def p_value(self) -> float:
        """Two-sided p-value: probability of a difference this large if the true difference is zero.

        It is at least the p-value of equal signs of all prompts that differ.
        """
        tail = student_tail(abs(_ratio(self.value, self.error)), self.freedom)
        return min(1.0, 2 * max(tail, 0.5**self.num_differing))

    def equivalence_p_value(self, tolerance: float) -> float:
        """Return the probability of a difference this small if the true one is `tolerance`: two one-sided tests.

        Source: Schuirmann 1987.
        """
        return max(self._tail(-self.value, tolerance, -1), self._tail(self.value, tolerance, 1))

    @property
    def outweighs_unseen(self) -> bool:
        """Whether the sign stays if the sample lacks a kind of prompt that speaks against it.

        One more prompt of mean size stands for this kind. The better side rejects all its draft tokens. Samples large
        enough for an interval rarely lack a kind that matters.
        """
        if self.num_prompts >= MIN_FOR_INTERVAL:
            return True
        better = max(self.base, self.other)
        effect = better * (better - 1) / (self.num_prompts + 1)
        kept = abs(self.value) * self.num_prompts / (self.num_prompts + 1)
        return kept - effect > student_quantile(self.confidence, self.freedom) * math.hypot(self.error, effect)

    @property
    def lower_bound(self) -> float:
        """Lower end of the one-sided interval of the same confidence, with room for a kind that the prompts lack."""
        value, error = (self.value, self.error) if self._is_sparse else self._with_unseen(-1)
        bound = value - student_quantile(self.confidence, self.freedom) * error
        return min(bound, self._fall(self._sparse.upper(1 - self.confidence))) if self._is_sparse else bound

    @property
    def _is_sparse(self) -> bool:
        return self.num_differing < MIN_DIFFERING or self.error == 0

    @property
    def _sparse(self) -> ShareOfPrompts:
        """The prompts that differ, or that break a pattern without exception."""
        return ShareOfPrompts(self.num_differing if self.error else 0, self.num_prompts)

    @property
    def _start(self) -> float:
        """The length of all prompts that do not differ."""
        return self.base if self.error else self.other

    def _fall(self, share: float) -> float:
        return fallen(self._start, share) - self.base

    def _tail(self, value: float, tolerance: float, direction: int) -> float:
        """Return the probability of so small a value in one direction if the true one is `tolerance`."""
        tail = student_tail(_ratio(tolerance - value, self.error), self.freedom)
        if self._is_sparse:
            room = tolerance - direction * (self._start - self.base)
            return max(tail, self._sparse.tail_of(self._start, direction * room))
        moved, error = self._with_unseen(direction)
        return student_tail(_ratio(tolerance - direction * moved, error), self.freedom)

    def _with_unseen(self, direction: int) -> tuple[float, float]:
        """Return value and error with one more prompt of mean size: without accepted tokens, or with steps for free.

        This prompt moves the bounds about as far as exact bounds of a share do that no sampled prompt belongs to.
        """
        effect = -self.other * (self.other - 1) if direction < 0 else self.other
        effect /= self.num_prompts + 1
        kept = self.num_prompts / (self.num_prompts + 1)
        return self.value * kept + effect, math.hypot(self.error, effect)


def no_interval(difference: AcceptanceDifference | None, num_prompts: int, least: int = MIN_FOR_TEST) -> Notice | None:
    """Return why the interval of a difference is missing. A difference of fewer than `least` prompts is None."""
    if difference is not None:
        return difference.no_interval
    return why_no_test(num_prompts, least) or Notice("too few prompts have verify steps", id="no-steps")


def fewest_prompts(difference: AcceptanceDifference, tolerance: float) -> int:
    """Return the number of equal prompts from which on a drop by more than `tolerance` is ruled out."""
    share = share_of_fall(difference.base, tolerance)
    return 1 if share >= 1 else math.ceil(math.log(1 - difference.confidence) / math.log1p(-share))


def tokens_per_step(counts: TokenCounts) -> float | None:
    """Return the acceptance length over all conversations together, or None without any step."""
    num_steps = sum(steps for _, steps in counts)
    return sum(tokens for tokens, _ in counts) / num_steps if num_steps else None


def paired_difference(base: TokenCounts, other: TokenCounts, confidence: float) -> AcceptanceDifference | None:
    """Return `other` minus `base` over the same prompts, or None if there are too few.

    Prompts without steps on both sides are left out.
    """
    pairs = [pair for pair in zip(base, other, strict=True) if pair[0][1] or pair[1][1]]
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    if len(pairs) < MIN_FOR_TEST or any(sum(steps > 0 for _, steps in side) < 2 for side in sides):
        return None
    num_differing = sum(one[0] * two[1] != two[0] * one[1] for one, two in pairs)
    return _difference(paired_moments, sides, confidence, len(pairs), num_differing)


def unpaired_difference(base: TokenCounts, other: TokenCounts, confidence: float) -> AcceptanceDifference | None:
    """Return `other` minus `base` over different prompts, or None if there are too few on either side.

    A side with over twice as many prompts does not balance the skewness of a small side.
    """
    sides = [[item for item in side if item[1]] for side in (base, other)]
    num_prompts = min(map(len, sides))
    if num_prompts < fewest_of_sides(*map(len, sides)):
        return None
    found = _difference(unpaired_moments, sides, confidence, num_prompts, num_prompts)
    return replace(found, is_paired=False)


def fewest_of_sides(first: int, second: int, *, is_paired: bool = False) -> int:
    """Return how many distinct prompts a test needs of the smaller of two sides."""
    is_uneven = max(first, second) > 2 * min(first, second) and not is_paired
    return MIN_UNEVEN if is_uneven else MIN_FOR_TEST


def _difference(
    moments: "Callable[[Floats, Floats], tuple[Floats, Floats, Floats]]",
    sides: Sequence[TokenCounts],
    confidence: float,
    num_prompts: int,
    num_differing: int,
) -> AcceptanceDifference:
    import numpy as np

    _, error, freedom = moments(*(np.array(side, dtype=float) for side in sides))
    base, other = (sum(tokens for tokens, _ in side) / sum(steps for _, steps in side) for side in sides)
    return AcceptanceDifference(
        base=base,
        other=other,
        error=float(error),
        freedom=float(freedom),
        confidence=confidence,
        num_prompts=num_prompts,
        num_differing=num_differing,
    )


def paired_moments(base: "Floats", other: "Floats") -> "tuple[Floats, Floats, Floats]":
    """Return the difference, its standard error and its degrees of freedom, all [...], from two arrays [..., N, 2]."""
    import numpy as np

    units = np.stack([base, other], axis=-3)
    variance, freedom = _variance(influence(units, leaves_out=True))
    return estimate(units), np.sqrt(variance), freedom


def unpaired_moments(base: "Floats", other: "Floats") -> "tuple[Floats, Floats, Floats]":
    """Return the difference, its standard error and its degrees of freedom, all [...], from two arrays [..., N, 2]."""
    import numpy as np

    sides = [side[..., None, :, :] for side in (base, other)]
    (one, freedom), (two, other_freedom) = (_variance(influence(side, leaves_out=True)) for side in sides)
    total = one + two
    with np.errstate(invalid="ignore"):
        welch = total**2 / (one**2 / freedom + two**2 / other_freedom)
    return estimate(sides[1]) - estimate(sides[0]), np.sqrt(total), np.where(total > 0, welch, freedom)


def _variance(influences: "Floats") -> "tuple[Floats, Floats]":
    """Return the variance of a sum of contributions, and its degrees of freedom, `[..., N]` -> `[...]`."""
    import numpy as np

    return np.square(influences).sum(axis=-1), np.minimum(freedom_of(influences), influences.shape[-1] - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests: the chance of any false finding stays at the stated level.

    Source: Holm 1979.
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda item: p_values[item])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def _ratio(value: float, error: float) -> float:
    """Return `value / error`; for error 0, plus or minus infinity, or 0 if the value is 0."""
    if error > 0:
        return value / error
    return math.copysign(math.inf, value) if value else 0.0
