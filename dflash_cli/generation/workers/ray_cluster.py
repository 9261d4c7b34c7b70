"""Workers as Ray actors, one engine each: on this machine, or on a cluster that runs already."""

import logging
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_cli.generation.workers.messages import Batch, Lost, Piece, Report, WorkerSpec
from dflash_cli.generation.workers.prompt_worker import PromptWorker
from dflash_runtime.errors import CheckpointNotFound, UnsupportedError, UsageError

LOCAL = "local"
AUTO = "auto"
START_S = 300.0
"""A cluster that has no room for a worker for so long is taken to have none."""
STORE_BYTES = 100 * 2**20
"""Ray's own minimum, nearly; answers are small."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray writes what happens to processes to stdout, which is for results; a lost worker is told of by us.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkersRequest:
    """Which cluster, and how many workers: None is one for each of its GPUs or, where it has none, each machine."""

    address: str
    count: int | None


def parse_workers(text: str) -> WorkersRequest:
    """Read `4`, `auto`, `ray://host:10001`, or one of the latter with a number of workers, as `auto#4`.

    Raises:
        UsageError: anything else.
    """
    address, mark, count = text.partition("#") if not text.isdecimal() else (LOCAL, "#", text)
    is_known = address == AUTO or re.fullmatch(r"ray://[^\s/]+:\d+", address) or text.isdecimal()
    if not is_known or (mark and not (count.isdecimal() and int(count))):
        raise UsageError(
            f"--workers {text!r}: expected a number of 1 or more, auto, or ray://host:port",
            hint="auto is the Ray cluster that this machine is part of; auto#4 and ray://host:port#4 take 4 workers",
        )
    return WorkersRequest(address, int(count) if count else None)


@contextmanager
def joined(request: WorkersRequest, device: str) -> "Iterator[tuple[RayCluster, int]]":
    """A Ray cluster and how many workers it takes; one that was started for it is gone afterwards, with its files.

    Raises:
        UnsupportedError: Ray is not installed.
        CheckpointNotFound: no cluster answers at the address.
        UsageError: the cluster has not as many GPUs, or it is left open how many workers there should be.
    """
    ray = _import_ray()
    folder = tempfile.mkdtemp(prefix="dflash-") if request.address == LOCAL else None
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _start(ray, request, device, folder)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's own would exit before anything is kept
        num_gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        count = _count(request, num_gpus, sum(node["Alive"] for node in ray.nodes()), device)
        cluster = RayCluster(ray, request.address, has_gpus=num_gpus > 0)
        try:
            yield cluster, count
        finally:
            cluster.close()
    finally:
        with suppress(Exception):
            ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


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
            return Report(worker, Lost("its process has ended"))
        self._since.pop(worker, None)
        if found is None:
            return None
        if isinstance(found, Piece) and not found.is_last:
            self._calls[self._actors[worker].more.remote()] = worker
        return Report(worker, found)


def _import_ray() -> ModuleType:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"--workers needs {error.name}, which is not installed", hint="pip install 'dflash-cli[ray]'"
        ) from error
    return ray


def _start(ray: ModuleType, request: WorkersRequest, device: str, folder: str | None) -> None:
    """Start Ray here, or join a cluster."""
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if folder is None:
        try:
            ray.init(address=request.address, **quiet)
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointNotFound(
                f"--workers {request.address}: no Ray cluster: {reason}", hint="start one with ray start --head"
            ) from error
        return
    import torch

    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    ray.init(
        address=LOCAL,
        num_cpus=request.count,
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        _temp_dir=str(Path(folder).resolve()),
        **quiet,
    )


def _count(request: WorkersRequest, num_gpus: int, num_machines: int, device: str) -> int:
    """How many workers there are to be."""
    where = "this machine" if request.address == LOCAL else "the cluster"
    if device.startswith("cuda") and not num_gpus:
        raise UsageError(f"--device {device}: {where} has no GPU for a worker", hint="leave --device out")
    count = request.count or num_gpus or num_machines
    if num_gpus and count > num_gpus:
        raise UsageError(f"--workers {count}: {where} has {num_gpus} GPUs, and each worker takes one")
    return count
