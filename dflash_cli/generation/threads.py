"""How many CPU threads a pair runs with. For a small model, more threads are slower than one."""

import os
from collections.abc import Iterable
from math import prod
from pathlib import Path

from dflash_runtime.checkpoint.stored.files import Checkpoint

SMALL_PARAMETERS = 50_000_000
"""Below this many parameters in target and draft together one thread is fastest."""
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
TOPOLOGY = Path("/sys/devices/system/cpu")


def use_threads(asked: int | None, device: str, checkpoints: Iterable[Checkpoint]) -> int:
    """Set torch's number of threads for these checkpoints on `device`, and return it.

    `asked` comes first, then OMP_NUM_THREADS, then the size of the pair.
    """
    import torch

    is_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    if asked is not None:
        torch.set_num_threads(asked)
    elif is_cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(choose_threads(count_parameters(checkpoints), torch.get_num_threads()))
    return torch.get_num_threads()


def choose_threads(num_parameters: int, default: int) -> int:
    """Return 1 for a small pair; otherwise torch's own number, limited to the usable cores."""
    return 1 if num_parameters < SMALL_PARAMETERS else max(1, min(default, usable_cores()))


def count_parameters(checkpoints: Iterable[Checkpoint]) -> int:
    """Return the number of parameters in all checkpoints, from their headers."""
    return sum(prod(info.shape) for checkpoint in checkpoints for info in checkpoint.tensors.values())


def usable_cores() -> int:
    """Return how many physical cores this process may use, within the CPU quota of its control group."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = [_read(TOPOLOGY / f"cpu{number}" / "topology" / "thread_siblings_list") for number in allowed]
    physical = len(set(siblings)) if all(siblings) else len(allowed)
    quota, _, period = (_read(CPU_MAX) or "max").partition(" ")
    paid = int(quota) // int(period) if quota.isdigit() and period.isdigit() and int(period) else physical
    return max(1, min(physical, paid))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
