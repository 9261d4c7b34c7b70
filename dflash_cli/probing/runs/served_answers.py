"""Send one row of prompts to a server, turn by turn, and turn each answer into a `RequestOutput`."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from dflash_cli.generation.answers import Answer
from dflash_cli.generation.prompts import Conversation, PromptRow
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing.counters.counter_agreement import Answered, is_of_others, odd_counter
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.servers.inference_server import Asked, InferenceServer, ServedAnswer, ServedSteps
from dflash_runtime.errors import DFlashError
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput

MAX_UNCOUNTED, GLANCES = 3, 4
COUNTER_WAITS, COUNTER_PAUSE_S = 40, 0.025
"""How often and how long to wait for counters, which servers may update a moment after an answer."""


class CounterWatch:
    """Finds the steps of each answer from the counters before and after it, if requests come one at a time.

    `num_foreign` counts answers during which requests of other clients ran too. Their steps are unknown. After
    MAX_UNCOUNTED answers in a row that the server did not count in time, it waits for no more.
    """

    def __init__(self, server: InferenceServer, before: ServerCounters) -> None:
        self._server = server
        self._last = before
        self._num_uncounted = self._num_glances = 0
        self.num_foreign = 0

    def glance(self) -> None:
        """Read the counters after every GLANCES answers that list their own steps, to notice a restart."""
        self._num_glances += 1
        if self._num_glances % GLANCES == 0:
            with suppress(DFlashError):
                self._server.counters()

    def steps_of(self, served: ServedAnswer) -> ServedSteps | None:
        """The steps of the latest answer, or None if the counters do not show them."""
        if self._num_uncounted >= MAX_UNCOUNTED:
            return None
        num_tokens = len(served.token_ids)
        now = await_counters(self._server, self._last, num_requests=1, num_tokens=num_tokens)
        risen = None if now is None else now.since(self._last)
        is_counted = risen is not None and has_come(risen, num_requests=1, num_tokens=num_tokens)
        self._num_uncounted = 0 if is_counted else self._num_uncounted + 1
        self._last = now or self._last
        if risen is None or risen.histogram is None:
            return None
        own = Answered.of([served])
        if is_of_others(risen, own):
            self.num_foreign += 1
            return None
        if odd_counter(risen, own) == "steps":
            return None
        try:
            return ServedSteps.of_histogram(risen.histogram)
        except ValueError:  # counters of another server
            return None


def await_counters(
    server: InferenceServer, before: ServerCounters, *, num_requests: int, num_tokens: int
) -> ServerCounters | None:
    """The counters once they rose by `num_requests`, or by `num_tokens` if the server does not count requests.

    After the longest wait the counters are returned as they are.
    """
    now = None
    for _ in range(COUNTER_WAITS):
        now = server.counters()
        risen = None if now is None else now.since(before)
        if risen is None or has_come(risen, num_requests=num_requests, num_tokens=num_tokens):
            break
        time.sleep(COUNTER_PAUSE_S)
    return now


def has_come(risen: ServerCounters, *, num_requests: int, num_tokens: int) -> bool:
    """Whether counters rose by these requests, or by their tokens if the server does not count requests."""
    if risen.num_requests is not None:
        return risen.num_requests >= num_requests
    return risen.num_tokens is None or risen.num_tokens >= num_tokens


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
