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
"""Seconds after which a worker that no machine has started counts as lost."""

logger = logging.getLogger(__name__)


class RayCluster:
    """Workers that are Ray actors; see `Cluster`. A busy worker has exactly one pending call."""

    def __init__(self, ray: ModuleType, address: str, *, has_gpus: bool, kind: type = PromptWorker) -> None:
        self.address = address
        self._ray = ray
        self._has_gpus = has_gpus
        self._actor = ray.remote(kind).options(
            num_cpus=0 if has_gpus else 1, num_gpus=int(has_gpus), max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}  # in call order, so that every worker gets its turn
        self._since: dict[int, float] = {}  # start times of workers that no machine has started yet
        self._num_hired = 0

    def hire(self, spec: WorkerSpec) -> int:
        """Start another worker, let it load the pair, and return its number."""
        number = self._num_hired
        self._num_hired += 1
        actor = self._actors[number] = self._actor.remote()
        self._since[number] = time.monotonic()
        self._calls[actor.place.remote()] = number
        self._calls[actor.load.remote(spec if self._has_gpus else spec.for_cpu)] = number
        return number

    def give(self, worker: int, batch: Batch) -> None:
        """Send a batch to an idle worker."""
        self._calls[self._actors[worker].begin.remote(batch)] = worker

    def wait(self) -> Report:
        """Wait for the next report of any worker. A worker continues by itself after a piece that is not its last."""
        while True:
            ended, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=1.0)
            for call in ended:
                report = self._read(self._calls.pop(call), call)
                if report is not None:
                    return report
            late = next((number for number, since in self._since.items() if time.monotonic() - since > START_S), None)
            if late is not None:
                reason = f"no machine of the cluster had room for it within {START_S:g} s"
                return Report(late, Lost("no-room", reason))

    def dismiss(self, worker: int) -> None:
        """Stop a worker, even if it is busy."""
        self._calls = {call: number for call, number in self._calls.items() if number != worker}
        self._since.pop(worker, None)
        with suppress(Exception):
            self._ray.kill(self._actors.pop(worker))

    def close(self) -> None:
        """Stop all workers."""
        for worker in list(self._actors):
            self.dismiss(worker)

    def _read(self, worker: int, call: Any) -> Report | None:
        """Return the report of a call, or None for the call that only confirms the worker's start."""
        try:
            found = self._ray.get(call)
        except self._ray.exceptions.RayActorError as error:
            logger.info("worker %d: %s", worker + 1, error)
            return Report(worker, _loss(str(error)))
        self._since.pop(worker, None)
        if found is None:
            return None
        if isinstance(found, Piece) and not found.is_last:
            self._calls[self._actors[worker].more.remote()] = worker
        return Report(worker, found)


def _loss(text: str) -> Lost:
    """The loss of a worker that Ray describes with `text`: an error at its start, or the end of its process."""
    named = re.findall(r"^\w+Error: .+$", text, re.MULTILINE)
    return Lost("not-started", f"it could not start: {named[-1]}") if named else Lost("ended", "its process has ended")
