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
from dflash_cli.acceptance.journal import check_journal
from dflash_cli.acceptance.measure import EvaluationPlan
from dflash_cli.comparing.contrasts import Contrast, correct_p_values
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import compare_results
from dflash_cli.documents.atomic_file import atomic_text, json_line
from dflash_cli.generation.loaded_pair import PairSession
from dflash_cli.terminal.sampling_options import LookupName
from dflash_cli.terminal.shown import Shown
from dflash_cli.tuning.budget_gain import BudgetGain, budget_gains
from dflash_cli.tuning.candidates import WAYS, Candidate, candidates_for, default_numbers, measure_candidate
from dflash_cli.tuning.speed import speed_request
from dflash_cli.tuning.speedups import Choice, batch_schedule, choose, overall_best
from dflash_cli.tuning.step_costs import (
    StepCosts,
    check_complete,
    measure_step_costs,
    num_timed_rounds,
    read_step_costs,
    read_step_times,
)
from dflash_cli.tuning.what_if import WhatIf, changes_nothing, refuse_rounding, rounded
from dflash_runtime.config import EngineConfig
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPlan:
    """The prompts, numbers of draft tokens, batch sizes and what-ifs of a tuning.

    `config` is the engine's config for measuring acceptance. If `numbers` or `batches` is None, the pair or the file of
    step times decides. Answers and step times go to `folder`, which `resume` and `force` of `evaluation` apply to.
    """

    evaluation: EvaluationPlan
    config: EngineConfig
    numbers: Sequence[int] | None = None
    trees: Sequence[int] = ()
    batches: Sequence[int] | None = None
    num_rounds: int = 4
    step_times: Path | None = None
    what_ifs: Sequence[WhatIf] = ()
    rivals: Sequence[LookupName] = ()
    folder: Path | None = None


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
    given = read_step_costs(request.step_times, trained) if request.step_times is not None else None
    candidates = candidates_for(_numbers(request, trained, given), trained, request.trees)
    for number in request.trees:
        session.llm.pair.with_tree(number)  # raises before anything is measured
    if given is not None:
        given = _at_batches(given, request)
    for item in request.what_ifs:
        refuse_rounding(session.llm.pair, session.target, item)
    lookups = [Candidate(trained, name) for name in dict.fromkeys(request.rivals)]
    _check_journals(request, [*candidates, *lookups, *request.what_ifs])
    evaluations = {item: _measure(session, item, request, progress) for item in candidates}
    rivals = {item: _measure(session, item, request, progress) for item in lookups}
    costs = given or _find_step_costs(session, [*candidates, *lookups], request, progress)
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


def _at_batches(given: StepCosts, request: TuningPlan) -> StepCosts:
    """Return the times of a file at the requested batch sizes, by default at all batch sizes of the file."""
    batches = request.batches or given.batches
    check_complete(given, request.numbers or (), batches)
    return replace(given, plain={batch: given.plain[batch] for batch in batches})


def _numbers(request: TuningPlan, trained: int, given: StepCosts | None) -> Sequence[int]:
    if request.numbers is not None:
        return request.numbers
    if given is None:
        return default_numbers(trained)
    drafted = (item for item in given.drafting if not (item.is_lookup or item.way == "tree"))
    numbers = sorted({item.num_speculative_tokens for item in drafted} or {trained})
    if numbers[-1] > trained:
        fitting = ",".join(str(number) for number in numbers if number <= trained)
        raise UsageError(
            id="k-out-of-range",
            path=request.step_times,
            field="K",
            found=numbers[-1],
            expected=f"1 to {trained}, the K of the draft's training",
            hint=f"choose among them: --num-speculative-tokens {fitting or trained}",
        )
    return numbers


def _check_journals(request: TuningPlan, measured: Sequence[Candidate | WhatIf]) -> None:
    """Check the output files of all candidates before the first measurement."""
    for item in measured:
        path = _journal_of(item, request)
        if path is not None:
            check_journal(path, resume=request.evaluation.resume, force=request.evaluation.force)


def _journal_of(item: Candidate | WhatIf, request: TuningPlan) -> Path | None:
    return None if request.folder is None else request.folder / f"{_name_of(item)}.jsonl"


def _name_of(item: Candidate | WhatIf) -> str:
    return item.name if isinstance(item, Candidate) else item.file_name


def _measure(
    session: PairSession,
    candidate: Candidate,
    request: TuningPlan,
    progress: TuningProgress,
    what_if: WhatIf | None = None,
) -> Evaluation:
    """Return a candidate's acceptance, with the original pair or the rounded pair of a what-if."""
    item = what_if or candidate
    name, asked = _name_of(item), replace(request.evaluation, journal=_journal_of(item, request))
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
