"""Values of `--workers`, and Ray: it starts without output and leaves no processes or files behind."""

import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from dflash_cli.workers import ray_cluster
from dflash_cli.workers.messages import Lost, WorkerSpec
from dflash_cli.workers.ray_cluster import RayCluster
from dflash_cli.workers.ray_start import CLUSTERS, SECRET, WorkersRequest, count_workers, joined, parse_workers
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointNotFound, UsageError
from dflash_testing.command_line import run_main
from dflash_testing.processes import are_gone, descendants, listening_addresses
from dflash_testing.refusals import refuses

AUTO = WorkersRequest("auto", None)
SPEC = WorkerSpec(draft="tiny", target="tiny", config=EngineConfig())


def light_worker(package: str = "os") -> type:
    """A worker without models that imports `package`. Ray sends classes that are defined here to its processes."""

    class LightWorker:
        def __init__(self) -> None:
            __import__(package)

        def place(self) -> None: ...

        def load(self, spec: object) -> int:
            import os

            return os.getpid()

        def begin(self, batch: str) -> str:
            import os

            return f"answered {batch}" if batch != "end" else os._exit(1)

    return LightWorker


@pytest.mark.parametrize(
    ("text", "address", "count"),
    [
        ("4", "local", 4),
        ("auto", "auto", None),
        ("auto#8", "auto", 8),
        ("ray://head:10001", "ray://head:10001", None),
        ("ray://head:10001#2", "ray://head:10001", 2),
    ],
)
def test_workers_are_a_number_or_a_cluster(text: str, address: str, count: int | None) -> None:
    assert parse_workers(text) == WorkersRequest(address, count)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "two",
        "auto#",
        "auto#0",
        "local",
        "ray://head",
        "http://head:1",
        "4#2",
        "4097",
        "auto#4097",
        "9" * 20,
    ],
)
def test_malformed_values_are_refused(text: str) -> None:
    with refuses(UsageError, field="--workers", found=text):
        parse_workers(text)


def test_there_is_a_worker_for_each_gpu_or_machine() -> None:
    assert count_workers(AUTO, "auto", num_gpus=8, num_machines=2) == 8
    assert count_workers(AUTO, "auto", num_gpus=0, num_machines=2) == 2
    assert count_workers(WorkersRequest("local", 3), "auto", num_gpus=0, num_machines=1) == 3
    with refuses(UsageError, "too-few-gpus", found=2, expected="3"):
        count_workers(WorkersRequest("local", 3), "auto", num_gpus=2, num_machines=1)
    with refuses(UsageError, "no-gpu", field="--device", found="cuda"):
        count_workers(AUTO, "cuda", num_gpus=0, num_machines=2)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run_main("eval-acceptance", "tiny", "--workers", "2")
    assert (done.code, done.out) == (5, "")
    assert (done.error_id, done.field) == ("missing-package", "--workers")
    assert done.error is not None
    assert done.error.hint == "pip install 'dflash-cli[ray]'"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--device", "cuda:1"], "--device"),
        (["--device-map", "auto"], "--device-map"),
        (["--mode", "replay", "--dump", "d"], "--workers"),
    ],
)
def test_options_that_cannot_be_used_with_workers_are_refused(options: list[str], field: str) -> None:
    done = run_main("eval-acceptance", "tiny", "--workers", "2", *options)
    assert (done.code, done.field) == (2, field)


def test_an_absent_cluster_is_named() -> None:
    pytest.importorskip("ray")
    with refuses(CheckpointNotFound, "no-ray-cluster", field="--workers", found="auto"), joined(AUTO, "cpu"):
        raise AssertionError("there is none to join")


def test_ray_reports_ended_workers_and_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    ray = pytest.importorskip("ray")
    handler, before, before_children = signal.getsignal(signal.SIGTERM), set(os.environ), descendants(os.getpid())
    with joined(WorkersRequest("local", 2), "cpu") as (_, count):
        assert count == 2
        cluster: Any = RayCluster(ray, "local", has_gpus=False, kind=light_worker())
        assert [cluster.hire(SPEC), cluster.hire(SPEC)] == [0, 1]
        processes = {report.worker: report.found for report in (cluster.wait(), cluster.wait())}
        cluster.give(0, "end")
        assert cluster.wait().found.id == "ended"
        cluster.dismiss(0)
        cluster.give(1, "one")
        assert cluster.wait().found == "answered one"
        assert cluster.hire(SPEC) == 2
        assert cluster.wait().found not in processes.values()
        cluster.close()
        without: Any = RayCluster(ray, "local", has_gpus=False, kind=light_worker("absent_package"))
        without.hire(SPEC)
        lost = without.wait().found
        assert (lost.id, "absent_package" in lost.reason) == ("not-started", True)
        folder = Path(ray._private.worker._global_node.get_session_dir_path())
        home = folder.parent.parent
        assert stat.S_IMODE(home.stat().st_mode) == 0o700, "other users cannot reach Ray's own folder in it"
        addresses = listening_addresses(descendants(os.getpid()) - before_children)
        assert len(addresses) >= 4
        assert {*addresses} == {"127.0.0.1"}
        assert signal.getsignal(signal.SIGTERM) is handler
    assert not home.exists()
    assert are_gone(processes.values())
    assert not {SECRET, CLUSTERS} & (set(os.environ) - before)
    assert capfd.readouterr() == ("", "")


def test_a_worker_without_room_on_any_machine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example in a cluster that has lost a machine."""
    ray = MagicMock()
    ray.wait = lambda calls, **_: ([], calls)
    monkeypatch.setattr(ray_cluster, "START_S", -1.0)
    cluster = RayCluster(ray, "local", has_gpus=True)
    number = cluster.hire(SPEC)
    report = cluster.wait()
    assert report.worker == number
    assert isinstance(report.found, Lost)
    assert report.found.id == "no-room"
