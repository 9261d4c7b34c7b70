"""The step loop: schedule, execute, commit."""

from collections.abc import Iterator

from dflash_runtime.request import Request
from dflash_runtime.runner import Runner
from dflash_runtime.scheduler import Committed, Scheduler


class Engine:
    """Takes requests and steps until none is left."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    def add(self, request: Request) -> None:
        """Queue a request; see `Scheduler.add` for what is refused."""
        self.scheduler.add(request)

    def step(self) -> list[Committed]:
        """Run one step and return the tokens that became final in it."""
        batch = self.scheduler.schedule()
        outputs = self.runner.execute(batch)
        return self.scheduler.commit(outputs)

    def run(self) -> Iterator[Committed]:
        """Step until every request has ended. Leaving early drops the requests and frees their pages."""
        try:
            while self.scheduler.has_work:
                yield from self.step()
        finally:
            self.scheduler.abort()
