"""Send all prompts to one server at a given concurrency, and measure acceptance from answers and counters."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dflash_cli.acceptance.journal import Journal
from dflash_cli.generation.answers import Answer, Event
from dflash_cli.generation.prompt_source import Failure
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.runs.counter_watch import CounterWatch
from dflash_cli.probing.runs.run_figures import Rows, conversations_of, count_run, find_disagreement, pool_run
from dflash_cli.probing.runs.run_load import RunLoad
from dflash_cli.probing.runs.served_answers import ask_all
from dflash_cli.probing.runs.server_run import DraftWidths, ReadLength, ServerRequest, ServerRun, answer_settings
from dflash_cli.probing.servers.http_client import FULL, TimeIsUp, told_status
from dflash_cli.probing.servers.inference_server import InferenceServer
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.errors import DFlashError
from dflash_runtime.notices import Notice

GLANCES = (1, 4)
"""Places of answers after which the metrics are read."""
MIN_ENDED = 2
"""Answers of a run that end with one token, from which it is an end token."""


def run_server(
    server: InferenceServer,
    facts: ServerFacts,
    request: ServerRequest,
    *,
    name: str,
    concurrency: int,
    observe: Callable[[Event], None] | None = None,
) -> ServerRun:
    """Send all rows, `concurrency` at a time, and pool their acceptance.

    Raises:
        ServerUnreachable: several prompts in a row got no answer. The journal keeps the earlier answers.
    """
    num_readings = len(server.readings)
    started, before = time.perf_counter(), server.counters()
    refused_before = Counter(server.client.refusals)
    watch = CounterWatch(server, before) if concurrency == 1 and before is not None and before.is_exact else None
    gathered = _gather(server, facts, request, concurrency, watch, observe)
    found = gathered.found
    counted, notes = count_run(server, before, found, gathered.num_extra, watch)
    total, origin, why = pool_run(
        gathered.answers,
        [served for _, served in found],
        counted,
        facts,
        confidence=request.confidence,
        num_resamples=request.num_resamples,
    )
    is_sorted = all(served.steps is not None and served.steps.is_ordered for _, served in found)
    is_ordered = is_sorted and not gathered.num_resumed
    return ServerRun(
        name=name,
        facts=facts,
        asked=request.asked,
        chat=request.chat,
        concurrency=concurrency,
        origin=origin,
        total=total,
        conversations=conversations_of(gathered.answers, is_ordered=is_ordered) if origin == "answers" else (),
        answers=tuple(gathered.answers),
        counted=counted,
        has_counters=before is not None,
        lists_steps=any(served.steps is not None for _, served in found),
        reports_steps=any(served.steps is not None or served.num_steps for _, served in found),
        is_ordered=is_ordered,
        sums=_sums(found),
        widths=_widths(found, counted),
        ids={answer.output.prompt_token_ids: served.id for answer, served in found if served.id is not None},
        read_lengths=_read_lengths(found),
        refusals=(server.client.refusals - refused_before) or _refusals(gathered.failures),
        end_ids=_end_ids(found),
        load=RunLoad.of([] if gathered.num_extra else found, server.readings[num_readings:]),
        failed=tuple(gathered.failures),
        notes=(
            *notes,
            *why,
            *find_disagreement(origin, total, counted, gathered.num_resumed),
            *_late(gathered.num_late, request),
        ),
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Answers and failures of a run.

    answers      all answers of the journal, also from an earlier run
    found        answers of this run, each with the server's data about it
    num_resumed  answers of an earlier run
    num_late     rows that were not asked or not answered in time
    num_extra    requests in the counters beyond one for each answer; infinite if their number is not known
    """

    answers: Sequence[Answer]
    found: Rows
    failures: Sequence[Failure]
    num_resumed: int
    num_late: int
    num_extra: float


def _gather(
    server: InferenceServer, facts: ServerFacts, request: ServerRequest, concurrency: int, watch: CounterWatch | None,
    observe: Callable[[Event], None] | None,
) -> Gathered:  # fmt: skip
    """Ask for the answers that the journal lacks, until the end of the run's time."""
    client = server.client
    whole_end, num_retried = client.ends_at, client.num_retried
    client.ends_at = min(whole_end, request.ends_at)
    with _journal(facts, request, concurrency) as journal:
        num_resumed = len(journal.answers)
        asked = ask_all(server, request, journal.pending, concurrency, watch)
        found, failures, num_late = _keep(_glancing(asked, server, concurrency), journal, observe)
    journal.drop_unfinished()
    client.ends_at = whole_end
    return Gathered(
        answers=journal.answers,
        found=found,
        failures=failures,
        num_resumed=num_resumed,
        num_late=num_late,
        # Requests that the end of the time cut off are counted, too, and each conversation may have sent several.
        num_extra=math.inf if num_late else client.num_retried - num_retried + len(failures),
    )


def _journal(facts: ServerFacts, request: ServerRequest, concurrency: int) -> Journal:
    """The file of the answers, with the settings that decide them."""
    settings = {"engine": facts.engine, "model": facts.model, "concurrency": concurrency}
    settings |= answer_settings(facts, request.asked, chat=request.chat)
    return Journal(request.journal, settings, request.rows, resume=request.resume, force=request.force)


def _read_lengths(found: Rows) -> tuple[ReadLength, ...]:
    """The length of each prompt, as sent and as the server read it."""
    return tuple(
        ReadLength(len(answer.output.prompt_token_ids), served.num_prompt)
        for answer, served in found
        if served.num_prompt is not None
    )


def _glancing(
    asked: Iterator[Rows | Failure | TimeIsUp], server: InferenceServer, concurrency: int
) -> Iterator[Rows | Failure | TimeIsUp]:
    """The same items. With several requests at a time, the metrics are read while some of them run."""
    for place, item in enumerate(asked):
        if concurrency > 1 and place in GLANCES:
            with suppress(DFlashError):
                server.metrics()
        yield item


def _keep(
    asked: Iterator[Rows | Failure | TimeIsUp], journal: Journal, observe: Callable[[Event], None] | None
) -> tuple[Rows, list[Failure], int]:
    """Add answers to the journal as they arrive -> the answers, the failures, and the number of late rows."""
    found: Rows = []
    failures: list[Failure] = []
    num_late = 0
    for item in asked:
        if isinstance(item, Failure):
            failures.append(item)
        elif isinstance(item, TimeIsUp):
            num_late += 1
        else:
            for answer, served in item:
                journal.add(answer)
                found.append((answer, served))
                if observe is not None:
                    observe(Event(answer.row, answer.output.token_ids, answer.text, answer))
    return found, failures, num_late


def _refusals(failures: Sequence[Failure]) -> Counter[int]:
    """Failures by status of a server with too many requests."""
    return Counter(status for item in failures if (status := told_status(item.error, FULL)) is not None)


def _end_ids(found: Rows) -> frozenset[int]:
    """Tokens that ended MIN_ENDED answers or more. A token that a request stops at may end a single one."""
    told = Counter(served.end_id for _, served in found if served.end_id is not None)
    return frozenset(token for token, count in told.items() if count >= MIN_ENDED)


def _sums(found: Rows) -> dict[tuple[int, ...], tuple[int, int]]:
    """Accepted draft tokens and steps of each prompt's answer, by the answer's own sums."""
    return {
        answer.output.prompt_token_ids: (served.num_accepted, served.num_steps)
        for answer, served in found
        if served.num_accepted is not None and served.num_steps
    }


def _widths(found: Rows, counted: ServerCounters | None) -> DraftWidths | None:
    """The draft tokens of steps, from answers that list them, otherwise from counters, otherwise from sums."""
    listed = [drafted for _, served in found if served.steps is not None for drafted in served.steps.drafted]
    if listed:
        return DraftWidths(sum(listed), len(listed), max(listed))
    if counted is not None and counted.num_draft_tokens and counted.num_drafts:
        return DraftWidths(counted.num_draft_tokens, counted.num_drafts)
    sums = [(served.num_drafted, served.num_steps) for _, served in found if served.num_drafted and served.num_steps]
    drafted, steps = (sum(values) for values in zip(*sums, strict=True)) if sums else (0, 0)
    return DraftWidths(drafted, steps) if steps else None


def _late(num_late: int, request: ServerRequest) -> list[Notice]:
    """A note about prompts for which no time was left."""
    num_rows = len(request.rows)
    text = f"{num_rows - num_late} of {num_rows} prompts asked: the time given by --max-time has passed"
    return [Notice(text, id="time-is-up")] if num_late else []
