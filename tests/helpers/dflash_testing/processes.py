"""Processes of tests: whether they have ended, which they started, and where they listen."""

import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def are_gone(processes: Iterable[int], limit_s: float = 60.0) -> bool:
    """Whether all these process ids end within `limit_s`. Ray's helper processes end some time after their parent."""
    until = time.monotonic() + limit_s
    while any(Path("/proc", str(process)).exists() for process in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and the processes that these have started. Linux only."""
    parents = {}
    for item in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(item.name)] = int((item / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def listening_addresses(pids: Iterable[int]) -> list[str]:
    """The IPv4 address, or the address in IPv6 form, of each TCP socket on which one of these processes listens."""
    links = []
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                links.append(str(descriptor.readlink()))
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and f"socket:[{parts[9]}]" in links:
                found.append(socket.inet_ntoa(bytes.fromhex(parts[1].partition(":")[0][-8:])[::-1]))
    return found
