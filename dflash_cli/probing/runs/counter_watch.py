"""Wait for a server's counters, and find the steps of each answer from their rise."""

import time
from contextlib import suppress

from dflash_cli.probing.counters.counter_agreement import Answered, is_of_others, odd_counter
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.served.served_answer import ServedAnswer, ServedSteps
from dflash_cli.probing.servers.inference_server import InferenceServer
from dflash_runtime.errors import DFlashError

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
