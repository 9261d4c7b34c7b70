"""The number of CPU threads of a pair."""

from pathlib import Path

import pytest
import torch

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.generation import threads
from dflash_cli.generation.threads import SMALL_PARAMETERS, choose_threads, count_parameters, usable_cores, use_threads
from dflash_runtime.checkpoint.stored.files import Checkpoint


@pytest.fixture
def pair() -> list[Checkpoint]:
    return [Checkpoint(fetch_directory(TINY, role)) for role in (Role.DRAFT, Role.TARGET)]


@pytest.fixture
def set_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads that torch would use. The real number stays."""
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: told[-1] if told else 8)
    return told


def test_a_small_pair_runs_on_one_thread(
    pair: list[Checkpoint], set_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert 1_000_000 < count_parameters(pair) < SMALL_PARAMETERS
    assert use_threads(None, "cpu", pair) == 1


def test_threads_come_from_the_option_then_the_environment(
    pair: list[Checkpoint], set_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert use_threads(3, "cpu", pair) == 3
    set_threads.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert use_threads(None, "cpu", pair) == 8
    assert set_threads == []


def test_a_large_pair_gets_the_cores_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 6)
    assert choose_threads(SMALL_PARAMETERS - 1, 16) == 1
    assert choose_threads(SMALL_PARAMETERS, 16) == 6
    assert choose_threads(SMALL_PARAMETERS, 4) == 4


def test_cores_are_physical_and_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(threads, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cores() == 4
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == 4
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert usable_cores() == 2
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores() == 1
