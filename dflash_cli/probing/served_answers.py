"""One row of prompts asked of a server, turn by turn, and each answer in the form of our own."""

import random
import time
from collections.abc import Iterator, Sequence

from dflash_cli.generation.answers import Answer
from dflash_cli.generation.prompts import Conversation, PromptRow
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing.inference_server import Asked, InferenceServer, ServedAnswer, ServedSteps
from dflash_cli.probing.server_counters import ServerCounters
from dflash_runtime.scheduling.request import FinishReason, RequestOutput

COUNTER_WAITS, COUNTER_PAUSE_S = 40, 0.025
"""A server may show a request's counts a moment after its answer; for how long they are waited for."""


class CounterWatch:
    """Finds the steps of each answer from the counters before and after it, while requests come one at a time.

    `num_foreign` counts answers during which somebody else asked too, so that the counts are not theirs alone.
    """

    def __init__(self, server: InferenceServer, before: ServerCounters) -> None:
        self._server = server
        self._last = before
        self.num_foreign = 0

    def steps_of(self, served: ServedAnswer) -> ServedSteps | None:
        """The steps of the answer that came last; None where the counters do not tell them."""
        now = await_counters(self._server, self._last, num_requests=1, num_tokens=len(served.token_ids))
        risen = None if now is None else now.since(self._last)
        self._last = now or self._last
        if risen is None or risen.histogram is None:
            return None
        if risen.num_requests is not None and risen.num_requests > 1:
            self.num_foreign += 1
            return None
        return ServedSteps.of_histogram(risen.histogram)


def await_counters(
    server: InferenceServer, before: ServerCounters, *, num_requests: int, num_tokens: int
) -> ServerCounters | None:
    """The counters once so many requests, or tokens where requests are not counted, were added to those before."""
    now = None
    for _ in range(COUNTER_WAITS):
        now = server.counters()
        risen = None if now is None else now.since(before)
        if risen is None or _has_come(risen, num_requests, num_tokens):
            break
        time.sleep(COUNTER_PAUSE_S)
    return now


def _has_come(risen: ServerCounters, num_requests: int, num_tokens: int) -> bool:
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
    """The answers to a row's turns, each with what the server said of it.

    Raises:
        RequestError, ServerUnreachable, UnsupportedError: a turn is not answered.
    """
    conversation = Conversation(row)
    while not conversation.is_done:
        prompt_ids = conversation.next_prompt(tokenizer, chat=chat)
        served = server.answer(prompt_ids, asked)
        steps = served.steps
        if steps is None and watch is not None:
            steps = watch.steps_of(served)
        yield (
            Answer(row, conversation.turn, to_output(row, conversation.turn, prompt_ids, served, steps), served.text),
            served,
        )
        conversation.add_answer(served.text)


def to_output(
    row: PromptRow, turn: int, prompt_ids: Sequence[int], served: ServedAnswer, steps: ServedSteps | None
) -> RequestOutput:
    """An answer as our engine would give it.

    Steps whose order is not known stand in an order drawn from the prompt, so that nobody finds a trend in it.
    """
    accepted, drafted = ((), ()) if steps is None else (steps.accepted, steps.drafted)
    places = list(range(len(accepted)))
    if steps is not None and not steps.is_ordered:
        random.Random(f"{row.digest} {turn}").shuffle(places)
    lengths = tuple(accepted[place] + 1 for place in places)
    return RequestOutput(
        index=row.index,
        prompt_token_ids=tuple(prompt_ids),
        token_ids=served.token_ids,
        finish_reason=FinishReason(served.finish_reason if served.finish_reason in ("stop", "length") else "stop"),
        acceptance_lengths=lengths,
        verify_widths=tuple(drafted[place] + 1 for place in places) if drafted else (),
        committed_lengths=_committed(lengths, len(served.token_ids)),
    )


def _committed(lengths: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What steps left in an answer: all but what was cut off at its end, taken from the steps that gave most.

    The first token is the prompt's. Steps that decoded plainly are not among these, and nothing is cut for them.
    """
    kept = list(lengths)
    surplus = sum(kept) - max(0, num_tokens - 1)
    for place in sorted(range(len(kept)), key=lambda item: -kept[item]):
        if surplus <= 0:
            break
        cut = min(surplus, kept[place] - 1)
        kept[place], surplus = kept[place] - cut, surplus - cut
    return tuple(kept)
