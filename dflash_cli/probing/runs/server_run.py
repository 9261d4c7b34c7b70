"""Send all prompts to one server at a given concurrency, and measure acceptance from answers and counters."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Annotated, Any

from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.curve_shape import CurveShape, find_shapes
from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.acceptance.journal import Journal
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.generation.answers import Answer, Event
from dflash_cli.generation.prompt_source import Failure
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.runs.run_figures import Origin, Rows, conversations_of, count_run, find_disagreement, pool_run
from dflash_cli.probing.runs.run_load import NO_LOAD, RunLoad
from dflash_cli.probing.runs.served_answers import CounterWatch, ask_row
from dflash_cli.probing.servers.http_client import ServerUnreachable, TimeIsUp, refused_status
from dflash_cli.probing.servers.inference_server import Asked, InferenceServer, ServerFacts
from dflash_runtime.documents import HIDDEN, INLINE, computed_key
from dflash_runtime.errors import DFlashError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

FOREIGN = {"other-clients-counted", "steps-of-other-clients", "step-counts-differ"}
"""Ids of notes that say so."""
GLANCES = (1, 4)
"""Places of answers after which the metrics are read."""
MIN_ENDED = 2
"""Answers of a run that end with one token, from which it is an end token."""
MAX_FAILED_IN_A_ROW = 3
"""After this many unanswered prompts in a row the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """The prompts and options of a run, and the options of its intervals. Answers are stored in `journal`.

    After `ends_at`, in seconds of `time.monotonic`, no prompt is asked.
    """

    rows: Sequence[PromptRow]
    asked: Asked
    tokenizer: Tokenizer
    chat: bool = False
    confidence: float = 0.95
    num_resamples: int = 10_000
    ends_at: float = math.inf
    journal: Path | None = None
    resume: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class DraftWidths:
    """Draft tokens and verify steps of a run. `widest` is the largest number of draft tokens of a step, if known."""

    num_draft_tokens: int
    num_steps: int
    widest: int | None = None

    @property
    def mean(self) -> float:
        """Draft tokens per step."""
        return self.num_draft_tokens / self.num_steps


@dataclass(frozen=True, slots=True)
class ReadLength:
    """Tokens of a prompt, and how many the server says that it read."""

    sent: int
    read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRun:
    """A server's answers with `concurrency` requests at the same time."""

    total: Annotated[Summary, INLINE]
    name: str
    concurrency: Annotated[int, "requests at the same time"]
    origin: Annotated[Origin, "source of the acceptance: the steps of each answer, counters, or sums in answers"]
    counted: Annotated[ServerCounters | None, "by how much the server's counters rose, if that is known"]
    notes: Annotated[tuple[Notice, ...], "what to know about the figures"]
    failed: tuple[Failure, ...]
    seconds: float
    facts: Annotated[ServerFacts, HIDDEN]
    asked: Annotated[Asked, HIDDEN]
    chat: Annotated[bool, HIDDEN]
    conversations: Annotated[tuple[ConversationCounts, ...], HIDDEN]
    answers: Annotated[tuple[Answer, ...], HIDDEN]
    has_counters: Annotated[bool, HIDDEN]
    lists_steps: Annotated[bool, HIDDEN] = False
    reports_steps: Annotated[bool, HIDDEN] = False
    is_ordered: Annotated[bool, HIDDEN] = False
    sums: Annotated[Mapping[tuple[int, ...], tuple[int, int]], HIDDEN] = field(default_factory=dict)
    """Prompt -> accepted draft tokens and steps of its answer, where a server tells the sums alone."""
    widths: Annotated["DraftWidths | None", HIDDEN] = None
    ids: Annotated[Mapping[tuple[int, ...], str], HIDDEN] = field(default_factory=dict)
    """Prompt -> the server's id of its answer."""
    read_lengths: Annotated[tuple["ReadLength", ...], HIDDEN] = ()
    load: Annotated[RunLoad, HIDDEN] = NO_LOAD
    refusals: Annotated[Mapping[int, int], HIDDEN] = field(default_factory=dict)
    """Status of a server with too many requests -> answers with it, retries included."""
    end_ids: Annotated[frozenset[int], HIDDEN] = frozenset()
    """Tokens that ended several answers, as the answers tell."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", round(self.seconds, 6))

    @property
    @computed_key
    def is_engaged(self) -> bool | None:
        """Whether a token was drafted; null if neither answers nor counters show it."""
        if self.total.counts.num_drafts > 0:
            return True
        is_unanswered = bool(self.failed) and not self.answers
        return False if not is_unanswered and (self.counted is not None or not self.has_counters) else None

    @property
    def includes_others(self) -> bool:
        """Whether counters of the run include requests of other clients."""
        return any(note.id in FOREIGN for note in self.notes)

    def is_comparable(self, other: "ServerRun") -> bool:
        """Whether the lengths of two runs are about the same requests. Totals are about all requests of the server."""
        if self.conversations and other.conversations:
            return True
        asked = [{answer.row.digest for answer in run.answers} for run in (self, other)]
        return asked[0] == asked[1] and not any(run.includes_others for run in (self, other))

    @property
    @computed_key
    def shapes(self) -> list[CurveShape]:
        """Shapes of the acceptance curve that point to a fault."""
        return find_shapes(self.total.counts if self.total.counts.num_speculative_tokens else None, self.conversations)

    def as_result(self) -> MeasuredResult:
        """The run as a result to compare. The run must be engaged."""
        length = self.total.counts.acceptance_len
        assert length is not None
        return MeasuredResult(
            name=self.name,
            source=f"a server of {self.facts.engine}",
            acceptance_len=length,
            conversations=self.conversations,
            why_no_rows=None if self.conversations else self.total.acceptance_len_no_interval,
            counts=self.total.counts,
            facts=_facts(self.facts, self.asked, chat=self.chat),
        )


def _late(num_late: int, request: ServerRequest) -> list[Notice]:
    """A note about prompts for which no time was left."""
    num_rows = len(request.rows)
    text = f"{num_rows - num_late} of {num_rows} prompts asked: the time given by --max-time has passed"
    return [Notice(text, id="time-is-up")] if num_late else []


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


def _facts(facts: ServerFacts, asked: Asked, *, chat: bool) -> dict[str, Any]:
    """The settings that determine the answers, under the names of `eval-acceptance`."""
    return {"num_speculative_tokens": facts.num_draft_tokens or 0, "chat": chat, **asdict(asked)}


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
    settings = {"engine": facts.engine, "model": facts.model, "concurrency": concurrency}
    settings |= _facts(facts, request.asked, chat=request.chat)
    whole_end, num_retried = server.client.ends_at, server.client.num_retried
    refused_before = Counter(server.client.refusals)
    server.client.ends_at = min(whole_end, request.ends_at)
    watch = CounterWatch(server, before) if concurrency == 1 and before is not None and before.is_exact else None
    with Journal(request.journal, settings, request.rows, resume=request.resume, force=request.force) as journal:
        num_resumed = len(journal.answers)
        asked = _ask_all(server, request, journal.pending, concurrency, watch)
        found, failures, num_late = _keep(_glancing(asked, server, concurrency), journal, observe)
    journal.drop_unfinished()
    server.client.ends_at = whole_end
    # Requests that the end of the time cut off are counted, too, and each conversation may have sent several.
    num_extra = math.inf if num_late else server.client.num_retried - num_retried + len(failures)
    counted, notes = count_run(server, before, found, num_extra, watch)
    total, origin, why = pool_run(
        journal.answers,
        [served for _, served in found],
        counted,
        facts,
        confidence=request.confidence,
        num_resamples=request.num_resamples,
    )
    is_ordered = not num_resumed and all(served.steps is not None and served.steps.is_ordered for _, served in found)
    return ServerRun(
        name=name,
        facts=facts,
        asked=request.asked,
        chat=request.chat,
        concurrency=concurrency,
        origin=origin,
        total=total,
        conversations=conversations_of(journal.answers, is_ordered=is_ordered) if origin == "answers" else (),
        answers=tuple(journal.answers),
        counted=counted,
        has_counters=before is not None,
        lists_steps=any(served.steps is not None for _, served in found),
        reports_steps=any(served.steps is not None or served.num_steps for _, served in found),
        is_ordered=is_ordered,
        sums=_sums(found),
        widths=_widths(found, counted),
        ids={answer.output.prompt_token_ids: served.id for answer, served in found if served.id is not None},
        read_lengths=tuple(
            ReadLength(len(answer.output.prompt_token_ids), served.num_prompt)
            for answer, served in found
            if served.num_prompt is not None
        ),
        refusals=(server.client.refusals - refused_before) or _refusals(failures),
        end_ids=_end_ids(found),
        load=RunLoad.of([] if num_extra else found, server.readings[num_readings:]),
        failed=tuple(failures),
        notes=(*notes, *why, *find_disagreement(origin, total, counted, num_resumed), *_late(num_late, request)),
        seconds=time.perf_counter() - started,
    )


def _refusals(failures: Sequence[Failure]) -> Counter[int]:
    """Failures by status of a server with too many requests."""
    return Counter(status for item in failures if (status := refused_status(item.error)) is not None)


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


def _ask_all(
    server: InferenceServer,
    request: ServerRequest,
    rows: Sequence[PromptRow],
    concurrency: int,
    watch: CounterWatch | None,
) -> Iterator[Rows | Failure | TimeIsUp]:
    """Each row's answers, or its failure, in order of completion."""
    todo: SimpleQueue[PromptRow] = SimpleQueue()
    done: SimpleQueue[tuple[PromptRow, Rows | Exception]] = SimpleQueue()

    def work() -> None:
        with suppress(Empty):
            while True:
                row = todo.get_nowait()
                try:
                    asked = request.asked
                    found = list(ask_row(server, request.tokenizer, row, asked, chat=request.chat, watch=watch))
                    done.put((row, found))
                except Exception as error:
                    done.put((row, error))

    for row in rows:
        todo.put(row)
    # Daemon threads, because Python waits at exit for the threads of a pool, and a request may take minutes.
    for _ in range(min(concurrency, len(rows))):
        Thread(target=work, daemon=True).start()
    try:
        yield from _collect(done, len(rows), request, is_loaded=concurrency > 1)
    finally:
        with suppress(Empty):
            while True:
                todo.get_nowait()


def _collect(
    done: "SimpleQueue[tuple[PromptRow, Rows | Exception]]", num_rows: int, request: ServerRequest, *, is_loaded: bool
) -> Iterator[Rows | Failure | TimeIsUp]:
    """The items of `done` as they arrive. With several requests at a time, refusals for too many do not end the run.

    Raises:
        ServerUnreachable: several prompts in a row got no answer.
    """
    num_failed = num_done = 0
    for _ in range(num_rows):
        row, found = done.get()
        if isinstance(found, TimeIsUp):
            yield found
            continue
        if isinstance(found, ServerUnreachable):
            num_failed += 1
            is_full = is_loaded and refused_status(found.message) is not None
            if num_failed >= min(MAX_FAILED_IN_A_ROW, num_rows) and not is_full:
                raise _gone(found, num_done, request) from found
        if isinstance(found, DFlashError):
            yield Failure(row.index, row.id, f"{row.where}: {found.message}", exit_code=found.exit_code)
        elif isinstance(found, Exception):
            raise found
        else:
            yield found
            num_failed, num_done = 0, num_done + 1


def _gone(error: ServerUnreachable, num_done: int, request: ServerRequest) -> ServerUnreachable:
    kept = f"; {plural(num_done, 'answer')} kept in {request.journal}" if request.journal is not None else ""
    hint = "repeat the command with --resume to continue" if request.journal is not None else error.hint
    reason = error.message.removeprefix(f"{error.path}: ")
    return ServerUnreachable(f"{reason}{kept}", id=error.id, path=error.path, hint=hint)
