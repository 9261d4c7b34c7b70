"""The step loop: schedule a batch, queue it on the device, commit results that have come back.

Synchronous, a step's results are read before the next is scheduled. Asynchronous, `max_in_flight` steps are queued
before the oldest one's results are read, so the device never waits for the host. The scheduler then does not know how
many drafts those steps accept, and plans for every count they can give: pages are reserved as if all were accepted, a
request that the queued steps end in any case is left out, and nothing is preempted while a step is in flight.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_runtime.device.results import PendingStep
from dflash_runtime.device.runner import Runner
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.scheduler import OutOfPages, Scheduler


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens of a request that became final."""

    request: Request
    token_ids: list[int]


class Engine:
    """Takes requests and steps until none is left. `max_in_flight` 0 is the synchronous loop."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, max_in_flight: int = 0) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.max_in_flight = max_in_flight
        self._in_flight: deque[PendingStep] = deque()

    def add(self, request: Request) -> None:
        """Queue a request; see `Scheduler.add` for what is refused."""
        self.scheduler.add(request)

    def step(self) -> list[Committed]:
        """Queue a step and commit the results that are due; with nothing to queue, commit the oldest."""
        batch = self._schedule()
        if batch.is_empty:
            return self._commit_oldest()
        pending = self.runner.submit(batch)
        if pending is not None:
            self._in_flight.append(pending)
        committed: list[Committed] = []
        while len(self._in_flight) > self.max_in_flight:
            committed += self._commit_oldest()
        return committed

    def run(self) -> Iterator[Committed]:
        """Step until every request has ended. Leaving early drops the requests and frees what they hold."""
        try:
            while self.scheduler.has_work:
                yield from self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Drop every request and forget the steps in flight."""
        self.scheduler.abort()
        self._in_flight.clear()

    def _commit_oldest(self) -> list[Committed]:
        """Wait for the results of the oldest step in flight, if there is one, and make its tokens final."""
        if not self._in_flight:
            return []
        committed = []
        for request, output in self._in_flight.popleft().read():
            token_ids = self.scheduler.commit(request, output)
            if token_ids:
                committed.append(Committed(request, token_ids))
        return committed

    def _schedule(self) -> Batch:
        try:
            return self.scheduler.schedule(is_drained=not self._in_flight)
        except OutOfPages:
            return Batch()  # nothing to queue: the oldest results are committed instead, which may free pages
