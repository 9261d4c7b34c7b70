"""Measure a pair's acceptance on prompts. Knows no terminal."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_cli.evaluation.acceptance_progress import AcceptanceProgress
from dflash_cli.evaluation.acceptance_report import Evaluation, Failure, PromptSource
from dflash_cli.evaluation.conversation_counts import count_conversations
from dflash_cli.evaluation.journal import Journal
from dflash_cli.evaluation.resampling import MIN_UNITS
from dflash_cli.evaluation.statistics import Summary, summarise
from dflash_cli.generation.answers import Answer, Answering, Tally, plural
from dflash_cli.generation.outputs import Sink
from dflash_cli.generation.prompts import PromptRow, digest_rows
from dflash_runtime.errors import GateFailed
from dflash_runtime.scheduling.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Prompts, how to answer them, and the interval to compute.

    Each answer is written to `journal` as it ends. With `resume`, prompts answered in that file are not run again; with
    `force` alone, the file is replaced.
    """

    rows: Sequence[PromptRow]
    params: SamplingParams
    source: PromptSource
    chat: bool = False
    confidence: float = 0.95
    num_resamples: int = 10_000
    journal: Path | None = None
    resume: bool = False
    force: bool = False


def measure(
    session: Answering,
    request: EvaluationRequest,
    *,
    tally: Tally | None = None,
    progress: AcceptanceProgress | None = None,
) -> Evaluation:
    """Answer the request's rows and pool their verify steps, all together and by category.

    Conversations in which a turn cannot be served are left out and named. `tally` sees whatever is generated.
    """
    session.check_params(request.params)
    params = request.params.with_stops(session.stop_token_ids)
    settings = session.run_settings(params, chat=request.chat)
    sinks: list[Sink] = [] if tally is None else [tally.add]
    failures: list[Failure] = []
    started = time.perf_counter()
    with Journal(request.journal, settings, request.rows, resume=request.resume, force=request.force) as journal:
        if progress is not None:
            progress.resume(journal.answers)
            sinks.append(progress)
        for event in session.answer(journal.pending, params, chat=request.chat):
            for sink in sinks:
                sink(event)
            if event.answer is not None:
                journal.add(event.answer)
                failures += _failure(event.answer, failures)
    journal.drop_unfinished()
    return Evaluation(
        total=_pool(journal.answers, session, request),
        categories={name: _pool(answers, session, request) for name, answers in by_category(journal.answers).items()},
        settings={**session.references, **settings},
        source=request.source,
        conversations=count_conversations(journal.answers),
        measured={
            "workers": None,
            **session.describe(),
            "num_prompts": len(request.rows),
            "prompts_digest": digest_rows(request.rows),
            "rendered_prompts_digest": _digest_rendered(journal.answers),
        },
        failures=tuple(failures),
        seconds=time.perf_counter() - started,
    )


def _digest_rendered(answers: Sequence[Answer]) -> str:
    """A hash of the token ids that were asked, as template and tokenizer made them."""
    hashed = hashlib.sha256()
    for answer in answers:
        hashed.update(f"{answer.row.index} {answer.turn} {list(answer.output.prompt_token_ids)}\n".encode())
    return hashed.hexdigest()[:16]


def _failure(answer: Answer, known: Sequence[Failure]) -> list[Failure]:
    """The failure of a row, at the first of its turns that failed."""
    row, output = answer.row, answer.output
    if output.error is None or any(item.index == row.index for item in known):
        return []
    return [Failure(row.index, row.id, output.error, output.exit_code)]


def check_gate(evaluation: Evaluation, minimum: float, *, use_lower_bound: bool) -> None:
    """Require that the acceptance length, or the lower end of its interval, is at least `minimum`.

    Raises:
        GateFailed: the value is below the minimum, or there were too few steps for one.
    """
    total = evaluation.total
    name = "lower confidence bound" if use_lower_bound else "acceptance length"
    lower = total.interval.low if total.interval is not None else None
    value = lower if use_lower_bound else total.counts.acceptance_len
    if value is None and 0 < total.num_conversations < MIN_UNITS and use_lower_bound:
        raise GateFailed(
            f"{name}: {plural(total.num_conversations, 'prompt')} measured, expected {MIN_UNITS} or more",
            hint="measure more prompts, or use --gate point",
        )
    if value is None:
        raise GateFailed(f"{name}: too few steps to measure, expected at least {minimum:g}")
    if value < minimum:
        raise GateFailed(f"{name} {value:.3f}, expected at least {minimum:g}")


def _pool(answers: Sequence[Answer], session: Answering, request: EvaluationRequest) -> Summary:
    return summarise(
        [answer.output for answer in answers],
        session.num_draft_tokens,
        conversations=[answer.row.index for answer in answers],
        confidence=request.confidence,
        num_resamples=request.num_resamples,
    )


def by_category(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The answers of each category that rows name, by name."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.row.category is not None:
            groups.setdefault(answer.row.category, []).append(answer)
    return {name: groups[name] for name in sorted(groups)}
