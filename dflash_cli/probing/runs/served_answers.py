"""Send rows of prompts to a server, several at a time, and turn each answer into a `RequestOutput`."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread

from dflash_cli.generation.answers import Answer
from dflash_cli.generation.prompt_source import Failure
from dflash_cli.generation.prompts import Conversation, PromptRow
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing.runs.counter_watch import CounterWatch
from dflash_cli.probing.runs.run_figures import Rows
from dflash_cli.probing.runs.server_run import ServerRequest
from dflash_cli.probing.served.served_answer import ServedAnswer, ServedSteps
from dflash_cli.probing.servers.http_client import FULL, ServerUnreachable, TimeIsUp, told_status
from dflash_cli.probing.servers.inference_server import Asked, InferenceServer
from dflash_runtime.errors import DFlashError
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput


def ask_row(
    server: InferenceServer,
    tokenizer: Tokenizer,
    row: PromptRow,
    asked: Asked,
    *,
    chat: bool,
    watch: CounterWatch | None = None,
) -> Iterator[tuple[Answer, ServedAnswer]]:
    """The answers to a row's turns, each with the server's own answer.

    Raises:
        RequestError: the server refuses a turn.
        ServerUnreachable: the server does not answer.
        UnsupportedError: an answer has an unknown form.
    """
    conversation = Conversation(row)
    while not conversation.is_done:
        prompt_ids = conversation.next_prompt(tokenizer, chat=chat)
        started = time.perf_counter()
        served = server.answer(prompt_ids, asked)
        served = replace(served, started_s=started, seconds=time.perf_counter() - started)
        steps = served.steps
        if steps is None and watch is not None:
            steps = watch.steps_of(served)
        elif watch is not None:
            watch.glance()
        yield (
            Answer(row, conversation.turn, to_output(row, conversation.turn, prompt_ids, served, steps), served.text),
            served,
        )
        conversation.add_answer(served.text)


def to_output(
    row: PromptRow, turn: int, prompt_ids: Sequence[int], served: ServedAnswer, steps: ServedSteps | None
) -> RequestOutput:
    """A server's answer in the form of our engine's answers.

    Steps of unknown order are shuffled with the prompt's digest as the seed, so that they show no false trend.
    """
    accepted, drafted = ((), ()) if steps is None else (steps.accepted, steps.drafted)
    order = list(range(len(accepted)))
    if steps is not None and not steps.is_ordered:
        random.Random(f"{row.digest} {turn}").shuffle(order)
    lengths = tuple(accepted[step] + 1 for step in order)
    return RequestOutput(
        index=row.index,
        prompt_token_ids=tuple(prompt_ids),
        token_ids=served.token_ids,
        finish_reason=FinishReason(served.finish_reason if served.finish_reason in ("stop", "length") else "stop"),
        acceptance_lengths=lengths,
        verify_widths=tuple(drafted[step] + 1 for step in order) if drafted else (),
        committed_lengths=_committed(lengths, len(served.token_ids)),
    )


def _committed(lengths: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Tokens of each step that are in the answer.

    The answer's end may cut tokens off. They are taken from the longest steps. The answer's first token comes from
    prefill. Steps without a draft are not in `lengths`, so their tokens are not cut.
    """
    kept = list(lengths)
    surplus = sum(kept) - max(0, num_tokens - 1)
    for step in sorted(range(len(kept)), key=lambda item: -kept[item]):
        if surplus <= 0:
            break
        cut = min(surplus, kept[step] - 1)
        kept[step], surplus = kept[step] - cut, surplus - cut
    return tuple(kept)


MAX_FAILED_IN_A_ROW = 3
"""After this many unanswered prompts in a row the run ends."""


def ask_all(
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
            is_full = is_loaded and told_status(found.message, FULL) is not None
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
