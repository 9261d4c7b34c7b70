"""Free host memory is the smaller of the machine's free memory and the rest of the control group's limit."""

from pathlib import Path

import pytest

from dflash_runtime.device.capacity import host_memory
from dflash_runtime.device.capacity.host_memory import available_bytes

MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 100 MiB available."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {200 * 1024} kB\nMemAvailable: {100 * 1024} kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "GROUP", tmp_path)
    return tmp_path


def test_without_a_limit_the_machines_memory_counts(machine: Path) -> None:
    assert available_bytes() == 100 * MIB
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("5\n")
    assert available_bytes() == 100 * MIB


def test_cached_files_do_not_count_towards_the_groups_limit(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{64 * MIB}\n")
    (machine / "memory.current").write_text(f"{30 * MIB}\n")
    assert available_bytes() == 34 * MIB
    (machine / "memory.stat").write_text(f"anon 7\ninactive_file {10 * MIB}\n")
    assert available_bytes() == 44 * MIB


def test_without_proc_the_system_is_asked(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert available_bytes() > 0
