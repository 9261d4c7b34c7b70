"""Parse `--workers`, and start Ray on this machine or join a running cluster."""

import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_cli.workers.ray_cluster import RayCluster
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointNotFound, UnsupportedError, UsageError

LOCAL = "local"
AUTO = "auto"
MAX_WORKERS = 4096
STORE_BYTES = 100 * 2**20
"""Little more than Ray's minimum; answers are small."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray logs process events to stdout, which is for results. We report lost workers ourselves.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
SECRET = "RAY_AUTH_TOKEN"
"""Authenticates the processes of one cluster. Without it, Ray writes a token into the user's home."""


@dataclass(frozen=True, slots=True)
class WorkersRequest:
    """The cluster and the number of workers. With None, each GPU gets a worker, or each machine without GPUs."""

    address: str
    count: int | None


def parse_workers(text: str) -> WorkersRequest:
    """Parse `4`, `auto`, `ray://host:10001`, or an address with a number of workers, such as `auto#4`.

    Raises:
        UsageError: the text has another form.
    """
    address, mark, count = text.partition("#") if not text.isdecimal() else (LOCAL, "#", text)
    is_known = address == AUTO or text.isdecimal() or re.fullmatch(r"ray://[^\s/]+:\d+", address)
    is_count = len(count) <= len(str(MAX_WORKERS)) and count.isdecimal() and 1 <= int(count) <= MAX_WORKERS
    if not is_known or (mark and not is_count):
        raise UsageError(
            field="--workers",
            found=text,
            expected=f"a number from 1 to {MAX_WORKERS}, auto, or ray://host:port",
            hint="auto is the Ray cluster that this machine is part of; auto#4 and ray://host:port#4 take 4 workers",
        )
    return WorkersRequest(address, int(count) if count else None)


def check_workers(text: str, config: EngineConfig) -> WorkersRequest:
    """Read `--workers` before anything is loaded.

    Raises:
        UsageError: the text has another form, or an option cannot be used with workers.
        UnsupportedError: Ray is not installed.
    """
    request = parse_workers(text)
    if config.device_map is not None:
        raise UsageError(
            "--device-map cannot be used with --workers, where each worker has one GPU",
            id="not-with-workers",
            field="--device-map",
            found=config.device_map,
        )
    if config.device.startswith("cuda:"):
        raise UsageError(
            f"--device {config.device} cannot be used with --workers, where each worker has its own GPU",
            id="not-with-workers",
            field="--device",
            found=config.device,
        )
    _import_ray()
    return request


@contextmanager
def joined(request: WorkersRequest, device: str) -> Iterator[tuple[RayCluster, int]]:
    """Yield a Ray cluster and its number of workers. A cluster started for this run stops at the end of the block.

    Raises:
        UnsupportedError: Ray is not installed.
        CheckpointNotFound: no cluster answers at the address.
        UsageError: the cluster has fewer GPUs than workers.
    """
    ray = _import_ray()
    with _own_cluster(ray, request, device) if request.address == LOCAL else _other_cluster(ray, request.address):
        num_gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        count = count_workers(request, device, num_gpus=num_gpus, num_machines=sum(n["Alive"] for n in ray.nodes()))
        cluster = RayCluster(ray, request.address, has_gpus=num_gpus > 0)
        try:
            yield cluster, count
        finally:
            cluster.close()


def count_workers(request: WorkersRequest, device: str, *, num_gpus: int, num_machines: int) -> int:
    """Return the number of workers to start.

    Raises:
        UsageError: there are fewer GPUs than workers, or `device` is a GPU on machines without GPUs.
    """
    where = "this machine" if request.address == LOCAL else "the cluster"
    if device.startswith("cuda") and not num_gpus:
        text = f"--device {device}: a worker needs a GPU, but {where} has 0"
        raise UsageError(text, id="no-gpu", field="--device", found=device, hint="leave --device out")
    count = request.count or num_gpus or num_machines
    if num_gpus and count > num_gpus:
        text = f"--workers: found {num_gpus} GPUs on {where}, expected {count}, one for each worker"
        raise UsageError(text, id="too-few-gpus", field="--workers", found=num_gpus, expected=str(count))
    return count


def _import_ray() -> ModuleType:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"--workers needs {error.name}, which is not installed",
            id="missing-package",
            field="--workers",
            found=error.name,
            hint="pip install 'dflash-cli[ray]'",
        ) from error
    return ray


@contextmanager
def _own_cluster(ray: ModuleType, request: WorkersRequest, device: str) -> Iterator[None]:
    """Run a cluster on this machine alone. Its folder of files is private, and is deleted afterwards."""
    import torch

    folder = tempfile.mkdtemp(prefix="dflash-ray-")
    has_secret = any(name in os.environ for name in (SECRET, f"{SECRET}_PATH", "RAY_AUTH_MODE"))
    if not has_secret:
        os.environ[SECRET] = secrets.token_hex(32)
    try:
        with _on_loopback(ray), _left_afterwards(ray):
            _init(
                ray,
                address=LOCAL,
                num_cpus=request.count,
                num_gpus=0 if device == "cpu" else torch.cuda.device_count(),
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                _temp_dir=str(Path(folder).resolve() / "r"),  # Ray opens its own folder to all users
            )
            yield
    finally:
        if not has_secret:
            os.environ.pop(SECRET, None)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _on_loopback(ray: ModuleType) -> Iterator[None]:
    """Let Ray's servers listen on the loopback address only.

    Ray lacks an option for this. It does so on systems without clusters, and this switch makes a system one of these:
    the constant decides for this process, and the variable for Ray's own processes.
    """
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    stated = os.environ.get(CLUSTERS)
    os.environ[CLUSTERS] = "0"
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(CLUSTERS)
        if stated is not None:
            os.environ[CLUSTERS] = stated


@contextmanager
def _other_cluster(ray: ModuleType, address: str) -> Iterator[None]:
    """Join a running cluster, which keeps running afterwards."""
    with _left_afterwards(ray):
        try:
            _init(ray, address=address)
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            hint = f"check that this is the port of its Ray Client server, and that {SECRET} is the cluster's token"
            raise CheckpointNotFound(
                f"--workers {address}: cannot join a Ray cluster: {reason}",
                id="no-ray-cluster",
                field="--workers",
                found=address,
                hint="start one with ray start --head" if address == AUTO else hint,
            ) from error
        yield


@contextmanager
def _left_afterwards(ray: ModuleType) -> Iterator[None]:
    """Disconnect from Ray at the end, even if joining failed."""
    try:
        yield
    finally:
        with suppress(Exception):
            ray.shutdown()


def _init(ray: ModuleType, **settings: Any) -> None:
    """Start or join Ray without output. The SIGTERM handler is restored, since Ray's handler would lose results."""
    handler = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **settings)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
