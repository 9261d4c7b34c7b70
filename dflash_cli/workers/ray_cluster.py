"""Workers as Ray actors, one engine each."""

import logging
import re
import time
from contextlib import suppress
from types import ModuleType
from typing import Any

from dflash_cli.workers.messages import Batch, Lost, Piece, Report, WorkerSpec
from dflash_cli.workers.prompt_worker import PromptWorker

START_S = 300.0
"""A cluster that has no room for a worker for so long is taken to have none."""

logger = logging.getLogger(__name__)


class RayCluster:
    """Workers that are actors of Ray; see `Cluster`. Each has one call under way, unless it has nothing to do."""

    def __init__(self, ray: ModuleType, address: str, *, has_gpus: bool, kind: type = PromptWorker) -> None:
        self.address = address
        self._ray = ray
        self._has_gpus = has_gpus
        self._actor = ray.remote(kind).options(
            num_cpus=0 if has_gpus else 1, num_gpus=int(has_gpus), max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}  # in the order in which they were made, so that all get their turn
        self._since: dict[int, float] = {}  # of workers that no machine has taken yet
        self._num_hired = 0

    def hire(self, spec: WorkerSpec) -> int:
        """Start another worker and let it load the pair; its number."""
        number = self._num_hired
        self._num_hired += 1
        actor = self._actors[number] = self._actor.remote()
        self._since[number] = time.monotonic()
        self._calls[actor.place.remote()] = number
        self._calls[actor.load.remote(spec if self._has_gpus else spec.for_cpu)] = number
        return number

    def give(self, worker: int, batch: Batch) -> None:
        """Let a worker that has nothing to do begin a batch."""
        self._calls[self._actors[worker].begin.remote(batch)] = worker

    def wait(self) -> Report:
        """Wait for the next thing that came of any worker; one whose piece is not its last goes on by itself."""
        while True:
            ended, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=1.0)
            for call in ended:
                report = self._read(self._calls.pop(call), call)
                if report is not None:
                    return report
            late = next((number for number, since in self._since.items() if time.monotonic() - since > START_S), None)
            if late is not None:
                return Report(late, Lost(f"no machine of the cluster had room for it within {START_S:g} s"))

    def dismiss(self, worker: int) -> None:
        """End a worker, whatever it is at."""
        self._calls = {call: number for call, number in self._calls.items() if number != worker}
        self._since.pop(worker, None)
        with suppress(Exception):
            self._ray.kill(self._actors.pop(worker))

    def close(self) -> None:
        """End all workers."""
        for worker in list(self._actors):
            self.dismiss(worker)

    def _read(self, worker: int, call: Any) -> Report | None:
        """The result of a call; None of one that only said where the worker is."""
        try:
            found = self._ray.get(call)
        except self._ray.exceptions.RayActorError as error:
            logger.info("worker %d: %s", worker + 1, error)
            return Report(worker, Lost(_why(str(error))))
        self._since.pop(worker, None)
        if found is None:
            return None
        if isinstance(found, Piece) and not found.is_last:
            self._calls[self._actors[worker].more.remote()] = worker
        return Report(worker, found)


def _why(text: str) -> str:
    """Why a worker is gone: the error that it could not start for, such as a package that its machine lacks."""
    named = re.findall(r"^\w+Error: .+$", text, re.MULTILINE)
    return f"it could not start: {named[-1]}" if named else "its process has ended"
