"""The step loop: schedule, launch, and commit what has come back.

Synchronous, a step's results are read before the next is scheduled. Asynchronous, `max_in_flight` steps are queued
before the oldest is read, so the device never waits for the host; what the host decides meanwhile holds whatever the
counts turn out to be.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_runtime.device.results import Launch
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
        self._in_flight: deque[Launch] = deque()

    def add(self, request: Request) -> None:
        """Queue a request; see `Scheduler.add` for what is refused."""
        self.scheduler.add(request)

    def step(self) -> list[Committed]:
        """Launch a step and commit the results that are due."""
        batch = self._schedule()
        launch = self.runner.launch(batch) if not batch.is_empty else None
        if launch is not None:
            self._in_flight.append(launch)
        committed: list[Committed] = []
        while self._in_flight and (batch.is_empty or len(self._in_flight) > self.max_in_flight):
            committed += self._commit(self._in_flight.popleft())
            if batch.is_empty:
                break
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

    def _commit(self, launch: Launch) -> list[Committed]:
        committed = []
        for request, output in launch.read():
            token_ids = self.scheduler.commit(request, output)
            if token_ids:
                committed.append(Committed(request, token_ids))
        return committed

    def _schedule(self) -> Batch:
        try:
            return self.scheduler.schedule(is_drained=not self._in_flight)
        except OutOfPages:
            return Batch()  # the step then waits for the oldest results, which may free pages
