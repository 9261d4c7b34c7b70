"""Check that processes have ended."""

import time
from collections.abc import Iterable
from pathlib import Path


def are_gone(processes: Iterable[int], limit_s: float = 60.0) -> bool:
    """Whether all these process ids end within `limit_s`. Ray's helper processes end some time after their parent."""
    until = time.monotonic() + limit_s
    while any(Path("/proc", str(process)).exists() for process in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
