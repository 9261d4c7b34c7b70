"""Processes by id, of the command line or of a library, that are to be gone."""

import time
from collections.abc import Iterable
from pathlib import Path


def are_gone(processes: Iterable[int], limit_s: float = 60.0) -> bool:
    """Whether all end in time; Ray's helpers see only after a while that what they help is gone."""
    until = time.monotonic() + limit_s
    while any(Path("/proc", str(process)).exists() for process in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
