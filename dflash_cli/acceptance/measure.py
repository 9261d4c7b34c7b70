"""Measure a pair's acceptance on prompts. Prints nothing."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.calibration import find_calibration, predict_blocks
from dflash_cli.acceptance.condition_results import PairedCounts, compare_conditions, drafting
from dflash_cli.acceptance.context_curve import context_curve
from dflash_cli.acceptance.conversation_counts import count_conversations, distinct_prompts
from dflash_cli.acceptance.draft_confidence import find_confidence
from dflash_cli.acceptance.exact_match import score
from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_INTERVAL
from dflash_cli.acceptance.intervals.statistics import Summary, summarise
from dflash_cli.acceptance.journal import Journal
from dflash_cli.acceptance.rejected_tokens import find_rejected
from dflash_cli.generation.answers import Answer, Answering, Event, Tally
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.context_marks import ContextMark
from dflash_cli.generation.outputs import Sink
from dflash_cli.generation.prompt_source import Failure, PromptSource
from dflash_cli.generation.prompts import PromptRow, digest_rows
from dflash_cli.generation.run_facts import EvaluationRun
from dflash_runtime.checkpoint.stored.digests import digest_text
from dflash_runtime.errors import GateFailed
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """The prompts, how to answer them, and the interval to compute.

    A row names the condition under which it is answered. With `scores`, final numbers are compared with the rows'
    references. Each answer is written to `journal` when it ends. With `resume`, prompts answered in that file are not
    run again; with `force` alone, the file is replaced. `lock_sha256` is the hash of the pair's lock. `marks` are the
    context lengths that the draft names.
    """

    rows: Sequence[PromptRow]
    params: SamplingParams
    source: PromptSource
    chat: bool = False
    conditions: Sequence[Condition] = ()
    marks: Sequence[ContextMark] = ()
    scores: bool = False
    confidence: float = 0.95
    num_resamples: int = 10_000
    journal: Path | None = None
    resume: bool = False
    force: bool = False
    lock_sha256: str | None = None


def measure(
    session: Answering,
    request: EvaluationPlan,
    *,
    tally: Tally | None = None,
    progress: AcceptanceProgress | None = None,
) -> Evaluation:
    """Answer the rows and pool their verify steps, in total and by category.

    A conversation with a failed turn is left out of the counts and listed in `failed`. `tally` receives every event of
    the generation.
    """
    session.check_params(request.params)
    params = request.params.with_stops(session.stop_token_ids)
    settings = session.run_settings(params, chat=request.chat)
    started = time.perf_counter()
    with Journal(request.journal, settings, request.rows, resume=request.resume, force=request.force) as journal:
        events = _answer(session, journal.pending, params, chat=request.chat)
        failed = _keep(events, journal, tally, progress)
    journal.drop_unfinished()
    answers = [answer for answer in journal.answers if not answer.row.is_plain]
    blocks = predict_blocks((answer.row.prompt_index, answer.output) for answer in answers)
    failures, pool = find_failures(failed), partial(_pool, session=session, request=request)
    conditions = drafting(request.conditions)
    paired = PairedCounts.of(answers, conditions)
    return Evaluation(
        total=pool(answers),
        categories={name: pool(members) for name, members in by_category(answers).items()},
        conditions=compare_conditions(
            answers, conditions, pool, [item.condition for item in failures], paired, request.confidence
        ),
        context=context_curve(conditions, request.marks, paired.sides, request.confidence),
        exact_match=score(journal.answers, request.confidence) if request.scores else (),
        settings={**session.references, **settings},
        prompts=request.source,
        conversations=count_conversations(answers),
        rejected_tokens=find_rejected([answer.output for answer in answers], session.tokenizer),
        draft_confidence=find_confidence([answer.output for answer in answers], session.num_draft_tokens),
        calibration=find_calibration(blocks),
        blocks=blocks,
        measured=EvaluationRun.of(
            session.describe(),
            num_prompts=len({row.prompt_index for row in request.rows}),
            prompts_digest=digest_rows(request.rows),
            rendered_prompts_digest=_digest_rendered(answers),
            lock_sha256=request.lock_sha256,
        ),
        failed=failures,
        seconds=time.perf_counter() - started,
    )


def _keep(
    events: Iterable[Event], journal: Journal, tally: Tally | None, progress: AcceptanceProgress | None
) -> list[Answer]:
    """Write each answer to the journal as it ends, and return the failed ones."""
    sinks: list[Sink] = [] if tally is None else [tally.add]
    failed: list[Answer] = []
    if progress is not None:
        progress.resume(journal.answers)
        sinks.append(progress)
    for event in events:
        for sink in sinks:
            sink(event)
        if event.answer is not None:
            journal.add(event.answer)
            failed += [event.answer] if event.answer.output.error is not None else []
    return failed


def _answer(session: Answering, rows: Sequence[PromptRow], params: SamplingParams, *, chat: bool) -> Iterator[Event]:
    """Answer rows with the draft first, then rows without it, so that plain rows never share a step with drafting.

    Rows with and without the grammar do not share a step either.
    """
    for is_plain, is_free in product((False, True), repeat=2):
        own = replace(params, verify_width=1) if is_plain else params
        own = replace(own, grammar=None) if is_free else own
        members = [row for row in rows if row.is_plain is is_plain and row.is_free is is_free]
        yield from session.answer(members, own, chat=chat)


def _digest_rendered(answers: Sequence[Answer]) -> str:
    """Return a hash of the prompts' token ids, as rendered by template and tokenizer."""
    lines = [f"{answer.row.index} {answer.turn} {list(answer.output.prompt_token_ids)}\n" for answer in answers]
    return digest_text("".join(lines))


def find_failures(answers: Iterable[Answer]) -> tuple[Failure, ...]:
    """Return one failure per prompt and condition, from its first failed turn."""
    found: dict[tuple[int, str | None], Failure] = {}
    for answer in answers:
        row, output = answer.row, answer.output
        if output.error is not None:
            failure = Failure(row.prompt_index, row.id, output.error, row.condition_name, output.exit_code)
            found.setdefault((row.prompt_index, row.condition_name), failure)
    return tuple(found.values())


def check_gate(evaluation: Evaluation, minimum: float, *, use_lower_bound: bool) -> None:
    """Require an acceptance length, or lower end of its interval, of at least `minimum` under each condition.

    Raises:
        GateFailed: the value is below the minimum, or there are too few steps or prompts to compute it.
    """
    for item in evaluation.conditions:
        check_summary(item.summary, minimum, item.condition.name, use_lower_bound=use_lower_bound)
    if not evaluation.conditions:
        check_summary(evaluation.total, minimum, use_lower_bound=use_lower_bound)


def check_summary(total: Summary, minimum: float, condition: str = "", *, use_lower_bound: bool) -> None:
    """Require the acceptance length of one summary to be at least `minimum`.

    Raises:
        GateFailed: see `check_gate`.
    """
    name = f"{condition}: " if condition else ""
    name += "lower confidence bound" if use_lower_bound else "acceptance length"
    interval = total.acceptance_len_interval
    lower = interval.low if interval is not None else None
    value = lower if use_lower_bound else total.counts.acceptance_len
    if value is None and 0 < total.num_units < MIN_FOR_INTERVAL and use_lower_bound:
        raise GateFailed(
            f"{name}: {plural(total.num_units, 'distinct prompt')} measured, expected {MIN_FOR_INTERVAL} or more",
            id="too-few-prompts",
            field="num_prompts",
            found=total.num_units,
            expected=f"{MIN_FOR_INTERVAL} or more",
            hint="measure more prompts, or use --gate point",
        )
    if value is None:
        raise GateFailed(f"{name}: no steps were measured, expected at least {minimum:g}", id="no-steps")
    if value < minimum:
        raise GateFailed(
            f"{name} {value:.3f}, expected at least {minimum:g}",
            id="acceptance-too-low",
            field=name,
            found=value,
            expected=f"at least {minimum:g}",
        )


def _pool(answers: Sequence[Answer], session: Answering, request: EvaluationPlan) -> Summary:
    return summarise(
        [answer.output for answer in answers],
        session.num_draft_tokens,
        conversations=[answer.row.prompt_index for answer in answers],
        prompts=distinct_prompts(answers),
        confidence=request.confidence,
        num_resamples=request.num_resamples,
    )


def by_category(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Return the answers of each category that rows name, sorted by name."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.row.category is not None:
            groups.setdefault(answer.row.category, []).append(answer)
    return {name: groups[name] for name in sorted(groups)}
