"""The search for a better reading of a draft: run the draft as its config says, and again with one setting changed.

A draft with a wrong tap offset, causality, mask or rope base loads without an error, and fewer of its tokens are
accepted. If a changed setting surely raises acceptance by much, the setting is the cause. Greedy text does not depend
on the draft, so all readings are compared on the same text, prompt by prompt. `reading_screen` estimates every reading
along the text of the first run, and the most promising readings are run.

One of many readings could gain by chance. The first prompts therefore only choose a reading: the reading
with the largest gain is tested on new prompts. The choice does not depend on the new prompts, so this is one test at
5%, for any number of readings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from dflash_cli.acceptance.intervals.resampling import MIN_UNITS
from dflash_cli.acceptance.intervals.statistics import (
    Interval,
    StepCounts,
    count_steps,
    paired_interval,
    pooled_acceptance_len,
)
from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.diagnosis.alternatives import AlternativeReading, ReadingSpace, alternative_readings
from dflash_cli.diagnosis.mask_candidates import find_specials
from dflash_cli.diagnosis.run_settings import Observe, SearchBudget
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import EngineConfig
from dflash_runtime.documents import HIDDEN, computed_key
from dflash_runtime.errors import UsageError
from dflash_runtime.scheduling.request import RequestOutput

if TYPE_CHECKING:
    from dflash_cli.diagnosis.reading_runner import ReadingRunner
    from dflash_cli.diagnosis.reading_screen import ReadingScreen

MIN_PROMPTS = 4
"""The fewest prompts that choose a reading."""

MAX_RUN = 4
"""The most readings that are run after the screen."""

MIN_ESTIMATE = 0.02
"""Estimated gain, in tokens per block, from which a reading is run."""

VERY_FEW_ANCHORS, FEW_ANCHORS, MANY_ANCHORS = 16, 64, 256
MAX_GUESSES, MAX_SCREENED_AGAIN = 6, 12
"""Guesses are screened at very few anchors; the best guesses and all other readings at few; the best of all at many."""

NUM_RARE_IDS = 96

MIN_TEST_PROMPTS = 32
"""Prompts of the test, or the number of prompts that chose the reading if it is larger.

In the bundled pairs, with 48 tokens per prompt, a gain that matters is 0.14 tokens, and the gain of single prompts has
a standard deviation of 0.27. With 32 prompts the test finds four of five such gains.
"""

MIN_GAIN = 0.1
"""The gain in tokens per step from which a reading explains a draft."""

MIN_GAIN_SHARE = 0.1
"""The gain as a share of the tokens accepted per step under the config's own reading."""

MIN_BLOCK_SHARE = 1 / 8
"""The acceptance length as a share of the block."""

SIGNIFICANCE = 0.05


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """Acceptance under another reading, and its difference from the config's own reading on the same prompts.

    If the reading was not run, the lengths are estimates of the screen and `num_prompts` is 0. Only the reading that
    was tested on new prompts has an interval, and its lengths are from these prompts.
    """

    alternative: Annotated[AlternativeReading, HIDDEN]
    acceptance_len: float
    difference: float
    interval: Annotated[Interval | None, "of the difference, on new prompts"] = None
    num_prompts: int = 0

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
    def matters(self) -> bool:
        """Whether the reading accepts enough tokens, and gains enough to explain the draft."""
        floor = max(self.alternative.min_len, MIN_BLOCK_SHARE * self.alternative.config.block_size)
        is_large = self.difference > MIN_GAIN and self.difference > MIN_GAIN_SHARE * (self.own_len - 1)
        return self.acceptance_len >= floor and is_large

    @property
    @computed_key
    def explains(self) -> bool:
        """Whether the reading explains low acceptance: it matters, and surely gains on new prompts."""
        return self.matters and self.interval is not None and self.interval.low > 0


@dataclass(frozen=True, slots=True)
class ReadingSearch:
    """The config's own reading and its alternatives on the same prompts. `readings` lists readings that were run first.

    num_readings    all readings that were tried, including poor guesses, which `readings` omits
    left_out        the prompts that failed, with the reasons
    warnings        the warnings of the pair
    """

    num_prompts: int
    num_tokens: int
    acceptance_len: Annotated[float, "with the config as it is"]
    readings: tuple[ReadingResult, ...]
    num_readings: int = 0
    left_out: tuple[str, ...] = ()
    target_runtime: str = "native"
    target_quantization: Annotated[str | None, "how the target's weights are packed"] = None
    warnings: Annotated[tuple[str, ...], HIDDEN] = ()

    @property
    def explanation(self) -> ReadingResult | None:
        """The reading that explains the draft, if one does."""
        return next((item for item in self.readings if item.explains), None)


def search_readings(
    draft: DraftCheckpoint,
    target: TargetSource,
    prompts: Sequence[Sequence[int]] | None,
    *,
    config: EngineConfig,
    budget: SearchBudget,
    observe: Observe,
) -> ReadingSearch:
    """Load both models once, choose a reading on the given or made prompts, and test it on new prompts.

    Raises:
        UsageError: too few prompts are given, or too few succeed.
        DFlashError: the pair cannot be loaded or run.
    """
    from dflash_cli.diagnosis.reading_runner import ReadingRunner

    if prompts is not None and len(prompts) < MIN_PROMPTS:
        raise UsageError(
            f"{len(prompts)} prompts, expected at least {MIN_PROMPTS} to choose a reading",
            id="too-few-prompts",
            field="--prompts",
            found=len(prompts),
            expected=f"at least {MIN_PROMPTS}",
            hint="add prompts, or leave out --prompts",
        )
    runner = ReadingRunner(draft, target, config, budget, longest=max(map(len, prompts)) if prompts else None)
    readings = _readings_of(runner, draft, target, budget)
    total, is_given = len(readings) + 1, prompts is not None
    if prompts is None:
        observe("making prompts", 0, total)
        prompts = runner.make_prompts(range(budget.num_prompts))
    observe("config as it is", 0, total)
    own = AlternativeReading("", "config as it is", draft.config)
    outputs, left_out = _answered(runner.run(runner.build(own), prompts))
    prompts = [output.prompt_token_ids for output in outputs]
    base = count_steps(outputs)
    screen = runner.screen(outputs, {tap for item in (own, *readings) for tap in item.config.target_layer_ids})
    screened = _screen(Screening(runner, screen, own), readings, observe)
    chosen = [item for item in screened[:MAX_RUN] if item.difference > MIN_ESTIMATE]
    results = []
    for item in chosen:
        observe(item.reading, total, total)
        results.append(compare(item.alternative, base, _run(runner, item.alternative, prompts, own)))
    results.sort(key=lambda item: -item.difference)
    best = find_best(results)
    new = _new_prompts(runner, outputs, budget, is_given=is_given) if best is not None else []
    if best is not None and len(new) >= MIN_UNITS:
        observe(f"{best.reading}, tested on {len(new)} new prompts", total, total)
        own_counts, counts = _run(runner, own, new, own), _run(runner, best.alternative, new, own)
        results = [
            confirm(best.alternative, own_counts, counts, budget),
            *(item for item in results if item is not best),
        ]
    length = pooled_acceptance_len(base)
    # The screen averages over all positions of the text, not over steps, so only its differences can be used.
    estimated = [replace(item, acceptance_len=max(1.0, length + item.difference)) for item in screened[len(chosen) :]]
    return ReadingSearch(
        num_prompts=len(base),
        num_tokens=budget.max_new_tokens * len(base),
        acceptance_len=length,
        readings=(*results, *estimated),
        num_readings=len(readings),
        left_out=left_out,
        target_runtime=runner.target_runtime,
        target_quantization=runner.target_quantization,
        warnings=runner.warnings,
    )


class Screening:
    """Estimates of readings and of the config's own reading, which is estimated once per number of anchors."""

    def __init__(self, runner: "ReadingRunner", screen: "ReadingScreen", own: AlternativeReading) -> None:
        self._runner, self._screen = runner, screen
        self._own = runner.build(own)
        self._own_lengths: dict[int, float] = {}

    def estimate(self, reading: AlternativeReading, num_anchors: int) -> ReadingResult:
        if num_anchors not in self._own_lengths:
            self._own_lengths[num_anchors] = self._screen.acceptance_len(self._own, num_anchors)
        found = self._screen.acceptance_len(self._runner.build(reading), num_anchors)
        return ReadingResult(reading, found, found - self._own_lengths[num_anchors], None)


def _screen(screening: Screening, readings: Sequence[AlternativeReading], observe: Observe) -> list[ReadingResult]:
    """Estimates of all readings except poor guesses, the best first."""

    def gain(item: ReadingResult) -> float:
        return -item.difference

    total = len(readings) + 1
    guesses = [item for item in readings if item.is_guess]
    tried = [item for item in readings if not item.is_guess]
    if guesses:
        observe("rarely used ids as the mask", 0, total)
        estimates = sorted([screening.estimate(item, VERY_FEW_ANCHORS) for item in guesses], key=gain)
        tried += [item.alternative for item in estimates[:MAX_GUESSES]]
    found = []
    for index, reading in enumerate(tried, start=1 + len(readings) - len(tried)):
        observe(reading.name, index, total)
        found.append(screening.estimate(reading, FEW_ANCHORS))
    found.sort(key=gain)
    again = [screening.estimate(item.alternative, MANY_ANCHORS) for item in found[:MAX_SCREENED_AGAIN]]
    return [*sorted(again, key=gain), *found[len(again) :]]


def _readings_of(
    runner: "ReadingRunner", draft: DraftCheckpoint, target: TargetSource, budget: SearchBudget
) -> list[AlternativeReading]:
    """The alternative readings to try."""
    space = ReadingSpace(
        config=draft.config,
        target=runner.target_config,
        masks=find_specials(target),
        rare_ids=runner.rare_ids(NUM_RARE_IDS),
        text_len=runner.text_len,
    )
    return [
        reading for reading in alternative_readings(space) if budget.factors is None or reading.factor in budget.factors
    ]


def _answered(outputs: Sequence[RequestOutput]) -> tuple[list[RequestOutput], tuple[str, ...]]:
    """The outputs of the prompts that succeed, and the reasons of the others. Readings are run on these prompts.

    Raises:
        UsageError: too few prompts succeed.
    """
    answered = [output for output in outputs if output.error is None]
    failed = [f"prompt {output.index + 1}: {output.error}" for output in outputs if output.error is not None]
    if failed and len(answered) < MIN_PROMPTS:
        raise UsageError(
            f"{len(failed)} of {len(outputs)} prompts failed, expected at least {MIN_PROMPTS} to succeed; {failed[0]}",
            id="too-few-prompts",
            field="--prompts",
            found=len(answered),
            expected=f"at least {MIN_PROMPTS}",
        )
    return answered, tuple(failed)


def _count(outputs: Sequence[RequestOutput], block_size: int) -> StepCounts:
    """(tokens, steps) of each output; (0, 0) if it failed. Only the first `block_size` tokens of a block count."""
    lengths = [
        [min(length, block_size) for length in output.acceptance_lengths] if output.error is None else []
        for output in outputs
    ]
    return [(sum(item), len(item)) for item in lengths]


def _run(
    runner: "ReadingRunner", reading: AlternativeReading, prompts: Sequence[Sequence[int]], own: AlternativeReading
) -> StepCounts:
    """(tokens, steps) of each prompt under a reading. Only the tokens of the config's own block count."""
    return _count(runner.run(runner.build(reading), prompts), own.config.block_size)


def compare(reading: AlternativeReading, base: StepCounts, other: StepCounts) -> ReadingResult:
    """The result of a reading, over the prompts with steps under both readings."""
    shared = [pair for pair in zip(base, other, strict=True) if pair[0][1] and pair[1][1]]
    own, alternative = [pair[0] for pair in shared], [pair[1] for pair in shared]
    accepted = pooled_acceptance_len(alternative)
    return ReadingResult(reading, accepted, accepted - pooled_acceptance_len(own), num_prompts=len(shared))


def find_best(results: Sequence[ReadingResult]) -> ReadingResult | None:
    """The reading to test: the largest gain among the readings that matter, None if no reading matters."""
    return max((item for item in results if item.matters), key=lambda item: item.difference, default=None)


def confirm(reading: AlternativeReading, base: StepCounts, other: StepCounts, budget: SearchBudget) -> ReadingResult:
    """The result of the chosen reading with an interval. The prompts must differ from the prompts that chose it."""
    found = compare(reading, base, other)
    interval = paired_interval(
        base, other, confidence=1 - SIGNIFICANCE, num_resamples=budget.num_resamples, seed=budget.seed
    )
    return replace(found, interval=interval)


def _new_prompts(
    runner: "ReadingRunner", outputs: Sequence[RequestOutput], budget: SearchBudget, *, is_given: bool
) -> list[list[int]]:
    """Prompts with other greedy texts than these outputs: from other random ids, or further into the given prompts."""
    given = [output.prompt_token_ids for output in outputs] if is_given else []
    first = max(budget.num_prompts, len(outputs))
    made = runner.make_prompts(range(first, first + max(MIN_TEST_PROMPTS, len(outputs))), given)
    known = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    # A confident target may sample the same text twice, or the greedy text.
    new = dict.fromkeys(tuple(prompt) for prompt in made if all(text[: len(prompt)] != prompt for text in known))
    return [list(prompt) for prompt in new]
