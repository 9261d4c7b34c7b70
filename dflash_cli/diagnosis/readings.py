"""The search for a better reading of a draft: run the draft as its config says, and again with one setting changed.

A draft with a wrong tap offset, causality, mask or rope base loads without an error, and fewer of its tokens are
accepted. Greedy text does not depend on the draft, so all readings draft along the same texts, which the target writes
once (`reading_screen`). Readings of the config come first. Then every part of the draft is left out once, and the parts
that are missed least are read in other ways.

A reading that gains need not be right: many changes make up for a part of a fault. Training has minimised the loss
under the right reading, so the right reading has the lowest loss by a margin, and no other change on top of it lowers
the loss much. Only such a reading explains a draft (`ReadingResult.doubt`).

One of many readings could gain by chance. The first prompts therefore only choose a reading: the reading with the
lowest loss is tested on new prompts. The choice does not depend on the new prompts, so this is one test at 5%, for any
number of readings.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_TEST
from dflash_cli.acceptance.intervals.statistics import StepCounts, pooled_acceptance_len
from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.diagnosis.alternatives import (
    AlternativeReading,
    ReadingSpace,
    alternative_readings,
    moved_taps,
    neutral_readings,
)
from dflash_cli.diagnosis.answered_prompts import answered
from dflash_cli.diagnosis.chosen_values import LOWER, longer_block, usual_value
from dflash_cli.diagnosis.mask_candidates import find_specials
from dflash_cli.diagnosis.reading_doubts import ReadingCase
from dflash_cli.diagnosis.reading_results import (
    ENOUGH_OF_EXPECTED,
    SAME_LOSS,
    ReadingResult,
    ReadingSearch,
    by_loss,
    compare,
    confirm,
    find_best,
    of_different_causes,
    pool_by_prompt,
)
from dflash_cli.diagnosis.run_settings import RunSettings, Score
from dflash_cli.diagnosis.same_part import is_contesting, readings_of_same_parts
from dflash_cli.diagnosis.suspect_parts import harmful_spots, most_pulled, most_strained, suspect_spots
from dflash_cli.diagnosis.weight_rewrites import Spot
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.scheduling.request_output import RequestOutput

if TYPE_CHECKING:
    from dflash_cli.diagnosis.further_training import Trainable
    from dflash_cli.diagnosis.reading_runner import ReadingRunner
    from dflash_cli.diagnosis.reading_screen import ReadingScreen

T = TypeVar("T")
Readings = Sequence[AlternativeReading]

MAX_RUN = 4
"""The most readings whose steps are counted after the screen."""

VERY_FEW_ANCHORS, FEW_ANCHORS, MANY_ANCHORS = 16, 48, 192
MAX_GUESSES, MAX_SCREENED_AGAIN = 20, 16
"""Guesses are screened at very few anchors; the best guesses and all other readings at few; the best of all at many."""

MAX_OF_A_CAUSE = 3
"""Guesses with the same cause that are kept. More of them would crowd out the guesses that speak against them."""

MAX_ON_TOP = 24
"""Readings that are tried on top of the best one."""

MAX_TOGETHER = 3
"""The most readings that are taken together: faults that one mistake planted in several settings."""

MAX_SUSPECTS = 4
"""Norms, and matrices, of single layers and of all layers, that are read in other ways (`suspect_spots`)."""

MAX_PULLED = 5
"""Parts of single layers, and parts of all layers, that are also read in other scales."""

MAX_STRAINED = 3
"""Matrices of single layers to read in other ways too: their values change the loss most."""

EXPECTED_SHARE = 0.25
"""Share of the readings of single parts that are expected to be tried."""

MAX_HARMFUL = 6
"""Parts that a draft may be better without."""

NUM_RARE_IDS = 96

ENOUGH_SHARE = 0.9
"""Share of the drafted tokens above which no part of the draft is suspect."""

MIN_TEST_PROMPTS = 32
"""Prompts of the test, or the number of prompts that chose the reading if it is larger.

In the bundled pairs, with 48 tokens per prompt, a gain that matters is 0.14 tokens, and the gain of single prompts has
a standard deviation of 0.27. With 32 prompts the test finds four of five such gains.
"""

MAX_EQUAL = 3


def search_readings(
    draft: DraftCheckpoint,
    target: TargetSource,
    prompts: Sequence[Sequence[int]] | None,
    *,
    settings: RunSettings,
) -> ReadingSearch:
    """Load both models once, choose a reading on the given or made prompts, and test it on new prompts.

    Raises:
        UsageError: too few prompts are given, or too few succeed.
        DFlashError: the pair cannot be loaded or run.
    """
    from dflash_cli.diagnosis.reading_runner import ReadingRunner

    make_runner = settings.make_runner or ReadingRunner
    longest = max(map(len, prompts)) if prompts else None
    runner = make_runner(draft, target, settings.config, settings.budget, longest=longest)
    return Searcher(runner, draft.config, find_specials(target), settings).search(prompts)


class Searcher:
    """One search. `runner` holds the pair; everything that depends on the target only comes from it."""

    def __init__(
        self,
        runner: "ReadingRunner",
        config: DraftConfig,
        specials: Mapping[int, str],
        settings: RunSettings,
    ) -> None:
        self._runner, self._expected, budget = runner, settings.expected, settings.budget
        self._budget, self._observe = budget, settings.observe
        self._own = AlternativeReading("", "config as it is", config)
        self._space = ReadingSpace(
            config=config,
            target=runner.target_config,
            masks=specials,
            rare_ids=runner.rare_ids(NUM_RARE_IDS),
            text_len=runner.text_len,
            weights=runner.weights,
        )
        readings = alternative_readings(self._space)
        self._readings = [item for item in readings if budget.factors is None or item.factor in budget.factors]
        self._tried: Counter[str] = Counter()
        self._same_parts: Sequence[ReadingResult] = ()
        self._harmful: frozenset[Spot] = frozenset()
        self._num_scored, self._num_probed, self._num_planned = 0, 0, self._plan()

    def search(self, prompts: Sequence[Sequence[int]] | None) -> ReadingSearch:
        """The whole search on given prompts, or on made ones."""
        runner, budget = self._runner, self._budget
        is_given = prompts is not None
        if prompts is None:
            self._observe("making prompts", 0, self._num_planned)
            prompts = runner.make_prompts(range(budget.num_prompts))
        self._observe("config as it is", 0, self._num_planned)
        outputs, left_out = answered(runner.run(runner.build(self._own), prompts))
        self._screen = runner.screen(outputs, self._taps())
        base = self._screen.walk(runner.build(self._own))
        self._base_scores: dict[int, Score] = {}
        own, length = self._own_score(MANY_ANCHORS), pooled_acceptance_len(base)
        screened = self._screened(length)
        best, counted = self._chosen(screened, own, base)
        if best is not None:
            best = self._doubted(best, screened, own)
            new = self._new_texts(outputs, best.alternative, is_given=is_given)
            tested = self._tested(best, *new) if new is not None else best
            counted = [tested, *(item for item in counted if item.alternative is not best.alternative)]
        seen = {id(item.alternative) for item in counted}
        rest = [self._estimated(item, length) for item in screened if id(item.alternative) not in seen]
        return ReadingSearch(
            num_prompts=len(base),
            num_tokens=budget.max_new_tokens * len(base),
            acceptance_len=length,
            readings=(*counted, *rest),
            num_readings=sum(self._tried.values()),
            own_expected_len=own.expected,
            tried=dict(self._tried),
            expected=self._expected,
            left_out=left_out,
            target_runtime=runner.target_runtime,
            target_quantization=runner.target_quantization,
            warnings=runner.warnings,
            harmful=self._harmful,
        )

    def _chosen(
        self, screened: Sequence[ReadingResult], own: Score, base: StepCounts
    ) -> tuple[ReadingResult | None, list[ReadingResult]]:
        """The reading to test on new prompts, None if no reading gains enough, and the readings with counted steps."""
        counted = [self._counted(item, base) for item in screened[:MAX_RUN] if item.score.loss < own.loss]
        best = usual_value(find_best(counted), counted, own, self._readings)
        if best is not None:
            return self._composed(self._contested(self._refined(best, base), base), screened, own, base), counted
        longer = longer_block(screened, own, self._own.config)
        longer = self._counted(longer, base) if longer is not None else None
        return (longer, [longer]) if longer is not None and longer.matters else (None, counted)

    def _doubted(self, best: ReadingResult, screened: Sequence[ReadingResult], own: Score) -> ReadingResult:
        """The best reading with its doubt, and with the names of readings that have the same loss."""
        equal = [item.reading for item in screened if abs(item.score.loss - best.score.loss) < SAME_LOSS]
        equal = [name for name in equal if name not in {best.reading, *best.alternative.equal}][:MAX_EQUAL]
        doubt = self._case(best, screened, own).doubt()
        return replace(best, doubt=doubt, equal=(*best.alternative.equal, *equal))

    def _taps(self) -> set[int]:
        return {tap for item in (self._own, *self._readings) for tap in item.config.target_layer_ids}

    def _plan(self, num_suspected: int | None = None) -> int:
        """How many scores the search takes. Until suspect parts are known, a share of their readings is expected."""
        tried = [item for item in self._readings if not (item.is_guess and item.factor == "weights")]
        num_guesses = len(self._readings) - len(tried)
        if num_guesses and num_suspected is None:
            num_suspected = len(neutral_readings(self._space)) + round(EXPECTED_SHARE * num_guesses)
        factors = {item.factor for item in self._readings if item.is_guess}
        return len(tried) + (num_suspected or 0) + len(factors) * MAX_GUESSES + MAX_SCREENED_AGAIN + MAX_ON_TOP

    def _score(self, reading: AlternativeReading, num_anchors: int) -> Score:
        self._num_scored += 1
        self._observe(reading.name, min(self._num_scored, self._num_planned), self._num_planned)
        return self._screen.score(self._runner.build(reading), num_anchors)

    def _own_score(self, num_anchors: int) -> Score:
        if num_anchors not in self._base_scores:
            self._base_scores[num_anchors] = self._score(self._own, num_anchors)
        return self._base_scores[num_anchors]

    def _estimate(self, reading: AlternativeReading, num_anchors: int) -> ReadingResult:
        score, own = self._score(reading, num_anchors), self._own_score(num_anchors)
        return ReadingResult(reading, score.accepted, score.accepted - own.accepted, score=score)

    def _screened(self, own_len: float) -> list[ReadingResult]:
        """Estimates of all readings except poor guesses, the lowest loss first."""
        found = self._best([item for item in self._readings if not item.is_guess], FEW_ANCHORS)
        left_out = [item for item in found if item.alternative.is_neutral]
        self._harmful = harmful_spots(left_out, self._own_score(FEW_ANCHORS).loss)
        for factor in dict.fromkeys(item.factor for item in self._readings if item.is_guess):
            guesses = [item for item in self._readings if item.is_guess and item.factor == factor]
            if factor == "weights":
                guesses = self._suspected(guesses, own_len, found[0] if found else ReadingResult(self._own, 1.0, 0.0))
                self._num_planned = self._plan(self._num_probed + len(guesses))
            best = of_different_causes(self._best(guesses, VERY_FEW_ANCHORS), MAX_OF_A_CAUSE)[:MAX_GUESSES]
            found += [self._estimate(item.alternative, FEW_ANCHORS) for item in best]
        found.sort(key=by_loss)
        again = [self._estimate(item.alternative, MANY_ANCHORS) for item in found[:MAX_SCREENED_AGAIN]]
        return [*sorted(again, key=by_loss), *found[len(again) :]]

    def _best(self, readings: Sequence[AlternativeReading], num_anchors: int) -> list[ReadingResult]:
        found = []
        for reading in readings:
            found.append(self._estimate(reading, num_anchors))
            self._tried[reading.factor] += 1
        return sorted(found, key=by_loss)

    def _suspected(self, guesses: Readings, own_len: float, best: ReadingResult) -> list[AlternativeReading]:
        """The parts left out, and readings of suspect parts; if a reading accepts nearly all, its rivals only."""
        enough = 1 + ENOUGH_SHARE * self._own.config.num_draft_tokens
        length = max(own_len, best.score.accepted)
        if length > enough and not self._is_below(length):
            return [item for item in guesses if own_len <= enough and is_contesting(item, best.alternative)]
        probes = neutral_readings(self._space)
        self._num_probed = len(probes)
        found = self._best(probes, VERY_FEW_ANCHORS)
        suspects = suspect_spots(found, MAX_SUSPECTS)
        own = self._own_score(VERY_FEW_ANCHORS).loss
        self._harmful |= harmful_spots(found, own)
        harmful = [item.alternative for item in found[:MAX_HARMFUL] if item.score.loss < own]
        pulls = self._in_memory(self._screen.pulls, self._own)
        pulled = most_pulled(pulls, self._own.config, MAX_PULLED) if pulls is not None else frozenset()
        suspects |= most_strained(pulls, self._own.config, MAX_STRAINED) if pulls is not None else frozenset()
        return [
            *harmful,
            *(item for item in guesses if item.touches & (suspects | pulled if item.is_scale else suspects)),
        ]

    def _is_below(self, own_len: float) -> bool:
        return self._expected is not None and own_len - 1 < ENOUGH_OF_EXPECTED * (self._expected.value - 1)

    def _counted(self, item: ReadingResult, base: StepCounts) -> ReadingResult:
        """The reading with the steps of a run."""
        counts = self._screen.walk(self._runner.build(item.alternative), is_whole=item.is_longer)
        return replace(compare(item.alternative, base, counts), score=item.score, is_longer=item.is_longer)

    def _refined(self, best: ReadingResult, base: StepCounts) -> ReadingResult:
        """The best reading, with its tapped layers moved one by one as long as this lowers the loss."""
        while best.factor == "taps":
            space = replace(self._space, config=best.alternative.config)
            moved = [item for item in moved_taps(space) if set(item.config.target_layer_ids) <= self._taps()]
            better = self._best(moved, MANY_ANCHORS)[:1]
            if not better or better[0].score.loss >= LOWER * best.score.loss:
                break
            found = better[0].alternative
            name = f"tapped layers {list(found.config.target_layer_ids)}"
            found = replace(found, name=name, cause="the tapped layers differ from training")
            best = self._counted(replace(better[0], alternative=found), base)
        return best

    def _contested(self, best: ReadingResult, base: StepCounts) -> ReadingResult:
        """The best reading, or another kind of reading of the same parts that has a lower loss."""
        found = readings_of_same_parts(
            best.alternative, self._space.weights, lambda reading: self._estimate(reading, MANY_ANCHORS)
        )
        self._tried["weights"] += len(found)
        self._same_parts = of_different_causes(found, 1)
        if not found or found[0].score.loss >= LOWER * best.score.loss:
            return best
        better = self._counted(found[0], base)
        return better if better.matters else best

    def _estimated(self, item: ReadingResult, length: float) -> ReadingResult:
        """The screen averages over all positions of the text, not over steps, so only its differences can be used."""
        return replace(item, acceptance_len=max(1.0, length + item.difference))

    def _composed(
        self, best: ReadingResult, screened: Sequence[ReadingResult], own: Score, base: StepCounts
    ) -> ReadingResult:
        """The best reading together with others that undo other faults. Each must gain as much as a fault costs."""
        for _ in range(MAX_TOGETHER - 1):
            both = self._case(best, screened, own).further()
            if both is None:
                break
            found = self._counted(self._estimate(both, MANY_ANCHORS), base)
            if not found.adds_to(best) or found.score.loss >= best.score.loss:
                break
            best = found
        return best

    def _case(self, best: ReadingResult, screened: Sequence[ReadingResult], own: Score) -> ReadingCase:
        """The best reading, and the means to doubt it."""
        return ReadingCase(
            best, self._own, own, self._own_score(FEW_ANCHORS), screened, MAX_ON_TOP,
            lambda reading, is_close: self._score(reading, MANY_ANCHORS if is_close else FEW_ANCHORS),
            lambda reading: self._in_memory(self._screen.training_gain, reading),
            self._expected, self._same_parts,
        )  # fmt: skip

    def _in_memory(self, compute: "Callable[[Trainable, int], T]", reading: AlternativeReading) -> T | None:
        """Return the result of `compute` with gradients of a reading; None if memory does not suffice."""
        import torch

        try:
            return compute(self._runner.trainable(reading), MANY_ANCHORS)
        except torch.OutOfMemoryError:
            return None

    def _new_texts(
        self, outputs: Sequence[RequestOutput], best: AlternativeReading, *, is_given: bool
    ) -> "tuple[ReadingScreen, Sequence[Hashable]] | None":
        """Other greedy texts, and the distinct prompt of each: from other random ids, or further into given prompts.

        Texts of one given prompt resemble each other, so they count once. Of few given prompts each text counts: the
        test is then about these prompts alone.
        """
        given = list(dict.fromkeys(output.prompt_token_ids for output in outputs)) if is_given else []
        first = max(self._budget.num_prompts, len(outputs))
        made = self._runner.make_prompts(range(first, first + max(MIN_TEST_PROMPTS, len(outputs))), given)
        known = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        # A confident target may sample the same text twice, or the greedy text.
        new = dict.fromkeys(tuple(prompt) for prompt in made if all(text[: len(prompt)] != prompt for text in known))
        if len(new) < MIN_FOR_TEST:
            return None
        self._observe(f"{best.name}, tested on {len(new)} new prompts", self._num_planned, self._num_planned)
        written = [
            output
            for output in self._runner.run(self._runner.build(best), [list(prompt) for prompt in new])
            if output.error is None
        ]
        taps = {*self._own.config.target_layer_ids, *best.config.target_layer_ids}
        if len(written) < MIN_FOR_TEST:
            return None
        starts, counted = [output.prompt_token_ids for output in written], given if len(given) >= MIN_FOR_TEST else []
        prompts = [next((item for item in counted if text[: len(item)] == item), text) for text in starts]
        return self._runner.screen(written, taps), prompts

    def _tested(self, best: ReadingResult, screen: "ReadingScreen", prompts: Sequence[Hashable]) -> ReadingResult:
        base = screen.walk(self._runner.build(self._own))
        other = screen.walk(self._runner.build(best.alternative), is_whole=best.is_longer)
        found = confirm(best.alternative, *(pool_by_prompt(counts, prompts) for counts in (base, other)))
        return replace(found, score=best.score, doubt=best.doubt, is_longer=best.is_longer, equal=best.equal)
