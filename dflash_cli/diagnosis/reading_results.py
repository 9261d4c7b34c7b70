"""The results of readings: how much a reading gains, and whether the gain explains a draft."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated

from dflash_cli.acceptance.intervals.acceptance_difference import no_interval, paired_difference
from dflash_cli.acceptance.intervals.statistics import (
    Interval,
    StepCounts,
    pooled_acceptance_len,
    value_text,
)
from dflash_cli.diagnosis.alternatives import ORDERED_TAPS, AlternativeReading
from dflash_cli.diagnosis.run_settings import ExpectedFigure, Score
from dflash_cli.diagnosis.weight_rewrites import Spot, together
from dflash_runtime.documents import HIDDEN, NOT_REQUIRED, computed_key

MIN_GAIN = 0.1
"""The gain in tokens per step from which a reading explains a draft."""

MIN_GAIN_SHARE = 0.1
"""The gain as a share of the tokens accepted per step under the config's own reading."""

MIN_SHARE = 0.07
"""Share of the drafted tokens below which a reading explains nothing: drafts that are read wrongly accept up to 6%."""

LEFT_OUT_SHARE = 0.5
"""The same for a draft without one of its parts. That the part is damaged is sure only if the rest does well."""

ENOUGH_OF_EXPECTED = 0.9
"""Share of the expected draft tokens below which acceptance is short of the expected figure."""

SIGNIFICANCE = 0.05


UNSCORED = Score(1.0, 1.0, 0.0)


def _is_large(gain: float, length: float) -> bool:
    """Whether a gain matters to a draft of this acceptance length."""
    return gain > MIN_GAIN and gain > MIN_GAIN_SHARE * (length - 1)


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """Acceptance under another reading, and its difference from the config's own reading on the same prompts.

    If the steps were not counted, the lengths are estimates of the screen and `num_prompts` is 0. Only the reading that
    was tested on new prompts has a p-value, and its lengths are from these prompts.
    """

    alternative: Annotated[AlternativeReading, HIDDEN]
    acceptance_len: float
    difference: float
    interval: Annotated[Interval | None, "of the difference, on new prompts"] = None
    no_interval: Annotated[str | None, NOT_REQUIRED, "why the interval is missing"] = None
    p_value: Annotated[float | None, NOT_REQUIRED, "of no difference, on new prompts"] = None
    num_prompts: int = 0
    score: Annotated[Score, HIDDEN] = UNSCORED
    is_longer: Annotated[bool, HIDDEN] = False
    equal: Annotated[tuple[str, ...], "readings that cannot be told from this one"] = ()
    doubt: Annotated[str | None, "why the reading improves acceptance and does not explain it"] = None

    @property
    @computed_key
    def factor(self) -> str:
        return self.alternative.factor

    @property
    @computed_key
    def reading(self) -> str:
        return self.alternative.name

    @property
    @computed_key
    def is_estimate(self) -> bool:
        return not self.num_prompts

    @property
    def own_len(self) -> float:
        """The acceptance length of the config's own reading on the same prompts."""
        return self.acceptance_len - self.difference

    @property
    def gain_text(self) -> str:
        """`+2.04 on 32 new prompts, p < 0.001`, with the interval of the gain if there are enough prompts."""
        assert self.p_value is not None
        chance = "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.3f}"
        return f"{value_text(self.difference, self.interval, '+.2f')} on {self.num_prompts} new prompts, {chance}"

    @property
    def matters(self) -> bool:
        """Whether the reading accepts enough tokens, and gains enough to explain the draft."""
        share = LEFT_OUT_SHARE if self.alternative.is_neutral else MIN_SHARE
        floor = max(self.alternative.min_len, 1 + share * self.alternative.config.num_draft_tokens)
        return self.acceptance_len >= floor and _is_large(self.difference, self.own_len)

    def adds_to(self, first: "ReadingResult") -> bool:
        """Whether this reading, which changes another setting on top of the first one, gains enough over it."""
        return self.matters and _is_large(self.acceptance_len - first.acceptance_len, first.acceptance_len)

    @property
    @computed_key
    def improves(self) -> bool:
        """Whether the reading matters, and surely gains on new prompts."""
        return self.matters and self.p_value is not None and self.p_value < SIGNIFICANCE

    @property
    @computed_key
    def explains(self) -> bool:
        """Whether the reading explains low acceptance: it improves acceptance, and nothing speaks against it."""
        return self.improves and self.doubt is None


@dataclass(frozen=True, slots=True)
class ReadingSearch:
    """The config's own reading and its alternatives on the same prompts. `readings` lists counted readings first.

    own_expected_len   the acceptance length that the draft's own probabilities foretell, along the same texts
    num_readings       all readings that were tried, including poor guesses, which `readings` omits
    tried              the factors of the readings, with the number of each
    expected           the figure that the user expects
    left_out           the prompts that failed, with the reasons
    warnings           the warnings of the pair
    harmful            the parts without which the draft is clearly better, by loss; empty if that was not tried
    """

    num_prompts: int
    num_tokens: int
    acceptance_len: Annotated[float, "with the config as it is"]
    readings: tuple[ReadingResult, ...]
    num_readings: int = 0
    own_expected_len: float | None = None
    tried: Mapping[str, int] = field(default_factory=dict)
    expected: ExpectedFigure | None = None
    left_out: tuple[str, ...] = ()
    target_runtime: str = "native"
    target_quantization: Annotated[str | None, "how the target's weights are packed"] = None
    warnings: Annotated[tuple[str, ...], HIDDEN] = ()
    harmful: Annotated[frozenset[Spot], HIDDEN] = frozenset()

    @property
    def explanation(self) -> ReadingResult | None:
        """The reading that explains the draft, if one does."""
        return next((item for item in self.readings if item.explains), None)

    @property
    def improvement(self) -> ReadingResult | None:
        """The reading that surely improves acceptance and does not explain it, if there is one."""
        return next((item for item in self.readings if item.improves and not item.explains), None)

    @property
    def is_short(self) -> bool:
        """Whether acceptance is short of the expected figure."""
        return self.expected is not None and self.acceptance_len - 1 < ENOUGH_OF_EXPECTED * (self.expected.value - 1)


SAME_LOSS = 1e-4
"""Nats. Two readings with the same loss are one reading in other words."""


def by_loss(item: ReadingResult) -> float:
    return item.score.loss


def by_loss_and_gain(item: ReadingResult) -> tuple[float, float]:
    return item.score.loss, -item.difference


def is_alike(item: ReadingResult, best: ReadingResult) -> bool:
    """Whether two readings tell the same cause: the same setting, or the same parts of the draft."""
    one, other = item.alternative, best.alternative
    if one.factor != other.factor:
        return False
    if one.cause != other.cause and ORDERED_TAPS in {one.cause, other.cause}:
        return False
    if (one.rewrite is None and other.rewrite is None) or one.cause == other.cause:
        return True
    # Two orders of the values of the same parts, as norms hardly notice.
    if (
        one.touches
        and one.touches == other.touches
        and not any(item.is_neutral or item.is_scale or item.changes_values or item.halves for item in (one, other))
    ):
        return True
    # An exchange, a scale or an offset of parts, and of the same parts with others beside them.
    is_nested = one.touches < other.touches or other.touches < one.touches
    is_shift = one.shift != 0 and one.shift == other.shift
    if is_nested and ((one.halves and other.halves) or (one.is_scale and other.is_scale) or is_shift):
        return True
    # A part that harms in one layer also harms in all layers together.
    return (
        one.is_neutral and other.is_neutral and {part for part, _ in one.touches} == {part for part, _ in other.touches}
    )


def of_different_causes(found: Sequence[ReadingResult], most: int) -> list[ReadingResult]:
    """Return the results with at most `most` of each cause, in the same order."""
    counts: Counter[str] = Counter()
    kept = []
    for item in found:
        counts[item.alternative.cause] += 1
        if counts[item.alternative.cause] <= most:
            kept.append(item)
    return kept


def combine(
    first: AlternativeReading, second: AlternativeReading, own: AlternativeReading
) -> AlternativeReading | None:
    """Both readings together; None if they change the same setting."""
    changed = {
        item.name: getattr(second.config, item.name)
        for item in fields(own.config)
        if getattr(second.config, item.name) != getattr(own.config, item.name)
    }
    if any(getattr(first.config, name) != getattr(own.config, name) for name in changed):
        return None
    rewrites = [item.rewrite for item in (first, second) if item.rewrite is not None]
    return replace(
        first,
        config=replace(first.config, **changed),
        rewrite=together(*rewrites) if rewrites else None,
    )


def compare(reading: AlternativeReading, base: StepCounts, other: StepCounts) -> ReadingResult:
    """The result of a reading, over the prompts with steps under both readings."""
    shared = [pair for pair in zip(base, other, strict=True) if pair[0][1] and pair[1][1]]
    own, alternative = [pair[0] for pair in shared], [pair[1] for pair in shared]
    accepted = pooled_acceptance_len(alternative)
    return ReadingResult(reading, accepted, accepted - pooled_acceptance_len(own), num_prompts=len(shared))


def find_best(results: Sequence[ReadingResult]) -> ReadingResult | None:
    """The reading to test: the lowest loss among the readings that matter, None if no reading matters."""
    return min((item for item in results if item.matters), key=by_loss_and_gain, default=None)


def pool_by_prompt(counts: StepCounts, prompts: Sequence[Hashable]) -> StepCounts:
    """Return tokens and steps by distinct prompt, from the counts of texts and the prompt of each text."""
    found: dict[Hashable, tuple[int, int]] = {}
    for (tokens, steps), prompt in zip(counts, prompts, strict=True):
        before = found.get(prompt, (0, 0))
        found[prompt] = before[0] + tokens, before[1] + steps
    return list(found.values())


def confirm(reading: AlternativeReading, base: StepCounts, other: StepCounts) -> ReadingResult:
    """The result of the chosen reading with a test. The prompts must differ from the prompts that chose it."""
    tested = paired_difference(base, other, 1 - SIGNIFICANCE)
    return replace(
        compare(reading, base, other),
        interval=tested.interval if tested is not None else None,
        no_interval=no_interval(tested, len(base)),
        p_value=tested.p_value if tested is not None else None,
    )
