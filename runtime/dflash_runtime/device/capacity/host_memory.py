"""Free host memory of this process, within the limit of its control group."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that this process can allocate without swapping. Cached files count as free."""
    found = [_machine_bytes(), _group_bytes()]
    return min(item for item in found if item is not None)


def _machine_bytes() -> int:
    available = _fields(MEMINFO).get("MemAvailable:")
    if available is not None:
        return available * 1024
    # macOS reports only the size of its memory.
    name = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _group_bytes() -> int | None:
    """Free bytes below the limit of the control group, or None without a limit."""
    limit, used = (_read(GROUP / name).strip() for name in ("memory.max", "memory.current"))
    if not limit.isdigit() or not used.isdigit():
        return None
    cached = _fields(GROUP / "memory.stat").get("inactive_file", 0)
    return max(0, int(limit) - int(used) + cached)


def _fields(path: Path) -> dict[str, int]:
    """Name -> number, from the lines of a file that begin with a name and a number."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
