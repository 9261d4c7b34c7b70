"""Measure the acceptance and step times of every candidate, and the effect of other number formats. Prints nothing."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Protocol

from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.comparing.contrasts import Contrast, correct_p_values
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import compare_results
from dflash_cli.documents.atomic_file import atomic_text, json_line, make_folder
from dflash_cli.generation.loaded_pair import PairSession
from dflash_cli.terminal.shown import Shown
from dflash_cli.tuning.budget_gain import BudgetGain, budget_gains
from dflash_cli.tuning.candidate_runs import measure_candidate
from dflash_cli.tuning.candidates import WAYS, Candidate
from dflash_cli.tuning.rounded_pairs import changes_nothing, refuse_rounding, rounded
from dflash_cli.tuning.speed import speed_request
from dflash_cli.tuning.speedups import Choice, batch_schedule, choose, overall_best
from dflash_cli.tuning.step_costs import StepCosts, read_step_costs, read_step_times
from dflash_cli.tuning.step_timing import measure_step_costs, num_timed_rounds
from dflash_cli.tuning.tuning_plan import TuningPlan, name_of
from dflash_cli.tuning.what_if import WhatIf
from dflash_runtime.documents import to_json
from dflash_runtime.errors import CheckpointNotFound, UsageError

DEFAULT_BATCHES = (1, 8, 32)
TIMED_TOKENS = 64
"""The most tokens of an answer while steps are timed. More tokens change a step's time little."""
STEP_TIMES_FILE = "step-times.json"


class TuningProgress(Protocol):
    """The progress display of a tuning."""

    def answers(self, name: str, num_answers: int) -> AbstractContextManager[AcceptanceProgress]:
        """Show the progress of `num_answers` answers under `name`."""
        ...

    def rounds(self, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show the progress of `total` timed rounds. Call the returned function with the number of finished rounds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tuning(Shown):
    """Result of `dflash tune`.

    ways      K -> acceptance of the narrowed block minus acceptance of the resized block
    what_ifs  name -> acceptance of the rounded pair minus acceptance of the original pair
    rivals    lookups, which draft without a draft model
    contests  choices among the candidates and the rivals together
    budget    simulated gains of a row budget, if its plan asks for confidences of the draft
    """

    evaluations: Mapping[Candidate, Evaluation]
    costs: StepCosts
    choices: Sequence[Choice]
    ways: Mapping[int, Contrast]
    what_ifs: Mapping[str, Contrast]
    session: PairSession
    request: TuningPlan
    seconds: float
    rivals: Mapping[Candidate, Evaluation] = field(default_factory=dict)
    contests: Sequence[Choice] = ()
    budget: Sequence[BudgetGain] = ()

    def summary(self) -> list[str]:
        best = self.overall
        found = (
            "no K is faster than plain decoding over all batch sizes"
            if best is None
            else f"best over all batch sizes: K {best.num_speculative_tokens}"
        )
        return [found, f"{len(self.evaluations)} candidates, batch sizes {', '.join(map(str, self.costs.batches))}"]

    @property
    def overall(self) -> Candidate | None:
        """See `overall_best`."""
        return overall_best(self.choices)

    @property
    def schedule(self) -> list[tuple[int, int, int]]:
        """See `batch_schedule`."""
        return batch_schedule(self.choices)

    @property
    def whole(self) -> Evaluation:
        """The evaluation of the trained block."""
        return next(item for candidate, item in self.evaluations.items() if candidate.way == "whole")


def tune(session: PairSession, request: TuningPlan, progress: TuningProgress) -> Tuning:
    """Measure every candidate on all prompts, and return their speed-ups, the best first.

    Load `session` with the config of `speed.smallest`, because each candidate allocates its own KV cache.

    Raises:
        UsageError: a K, a batch size or a file of step times does not fit the pair.
        UnsupportedError: a what-if cannot be simulated for this target; nothing has been measured then.
        RequestError: a prompt cannot be served.
    """
    started = time.perf_counter()
    trained, confidence = session.llm.num_draft_tokens, request.evaluation.confidence
    runs = request.runs(trained)
    candidates, lookups = runs.candidates, runs.lookups
    for number in request.trees:
        session.llm.pair.with_tree(number)  # raises before anything is measured
    for item in request.what_ifs:
        refuse_rounding(session.llm.pair, session.target, item)
    if request.folder is not None:
        make_folder(request.folder)
    evaluations = {item: _measure(session, item, request, progress) for item in candidates}
    rivals = {item: _measure(session, item, request, progress) for item in lookups}
    costs = runs.given or _find_step_costs(session, [*candidates, *lookups], request, progress)
    what_ifs = {
        item.name: _measure(session, candidates[-1], request, progress, item)
        for item in request.what_ifs
        if not changes_nothing(item, session.llm.pair)
    }
    return Tuning(
        evaluations=evaluations,
        costs=costs,
        choices=choose(evaluations, costs, confidence),
        ways=_compare_ways(evaluations, confidence),
        what_ifs=_contrasts(evaluations[candidates[-1]], what_ifs, confidence),
        session=session,
        request=request,
        seconds=time.perf_counter() - started,
        rivals=rivals,
        budget=_budget_gains(evaluations, costs) if request.config.draft_confidence else (),
        contests=choose(evaluations | rivals, costs, confidence) if rivals else (),
    )


def _budget_gains(evaluations: Mapping[Candidate, Evaluation], costs: StepCosts) -> list[BudgetGain]:
    """Return the gains of a row budget at each batch size with times of the whole block and of a narrowed one."""
    found = []
    whole = next(candidate for candidate in evaluations if candidate.way == "whole")
    for batch in costs.batches:
        timed = {item: costs.of(item, batch) for item in evaluations if item.way in ("whole", "narrowed")}
        widths = {item.num_speculative_tokens + 1: fmean(times) for item, times in timed.items() if times is not None}
        if len(widths) > 1 and whole.num_speculative_tokens + 1 in widths:
            found += budget_gains(evaluations[whole].blocks, batch, widths)
    return found


def _measure(
    session: PairSession,
    candidate: Candidate,
    request: TuningPlan,
    progress: TuningProgress,
    what_if: WhatIf | None = None,
) -> Evaluation:
    """Return a candidate's acceptance, with the original pair or the rounded pair of a what-if."""
    item = what_if or candidate
    name, asked = name_of(item), replace(request.evaluation, journal=request.journal_of(item))
    pair = session.llm.pair if what_if is None else rounded(session.llm.pair, session.target, what_if)
    with progress.answers(name, sum(row.num_turns for row in asked.rows)) as answers:
        return measure_candidate(session, candidate, asked, request.config, pair=pair, progress=answers)


def _find_step_costs(
    session: PairSession, candidates: Sequence[Candidate], request: TuningPlan, progress: TuningProgress
) -> StepCosts:
    """Return the stored step times of an interrupted run with the same settings, or measure and store them."""
    asked, batches = request.evaluation, list(request.batches or DEFAULT_BATCHES)
    timed = speed_request(
        session,
        asked.rows,
        batches,
        max_new_tokens=min(TIMED_TOKENS, asked.params.max_new_tokens),
        num_rounds=request.num_rounds,
        chat=asked.chat,
    )
    path = request.folder / STEP_TIMES_FILE if request.folder is not None else None
    settings = to_json(session.run_settings(asked.params, chat=asked.chat)) | {
        "candidates": [item.name for item in candidates], "batches": batches, "num_rounds": request.num_rounds,
    }  # fmt: skip
    if path is not None and asked.resume and _settings_of(path) == settings:
        return read_step_costs(path, session.llm.num_draft_tokens)
    with progress.rounds(num_timed_rounds(candidates, timed)) as observe:
        costs = measure_step_costs(session.llm.pair, candidates, timed, request.config, observe)
    if path is not None:
        with atomic_text(path) as stream:
            stream.write(json_line(replace(costs.times, settings=settings)))
    return costs


def _settings_of(path: Path) -> object:
    """Return the settings under which a file's times were measured; None if the file is absent or malformed."""
    try:
        return read_step_times(path).settings
    except (UsageError, CheckpointNotFound):
        return None


def _compare_ways(evaluations: Mapping[Candidate, Evaluation], confidence: float) -> dict[int, Contrast]:
    """Return the comparison of the narrowed block with the resized block, by K below the trained K."""
    numbers = [item.num_speculative_tokens for item in evaluations if item.way == "resized"]
    found = []
    for number in numbers:
        sides = [_result(way, evaluations[Candidate(number, way)]) for way in WAYS]
        found.append(compare_results(sides, confidence=confidence)[0].total)
    return dict(zip(numbers, correct_p_values(found), strict=True))


def _contrasts(whole: Evaluation, what_ifs: Mapping[str, Evaluation], confidence: float) -> dict[str, Contrast]:
    """Return the comparison of each rounded pair with the original pair, corrected for their number."""
    if not what_ifs:
        return {}
    results = [_result(name, item) for name, item in (("as it is", whole), *what_ifs.items())]
    return {item.other.name: item.total for item in compare_results(results, confidence=confidence)}


def _result(name: str, evaluation: Evaluation) -> MeasuredResult:
    return MeasuredResult(
        name=name,
        source="dflash tune",
        acceptance_len=evaluation.total.counts.acceptance_len or 1.0,
        conversations=evaluation.conversations,
    )
