"""Tell readings of one process from readings of several ones, and of a process that started anew.

One process has one start, and its counters never fall. Several processes give readings that fall and come back.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from dflash_cli.probing.counters.server_counters import ServerCounters, ServerMetrics

NUM_LOOKS = 6
"""Readings before the first request."""
MIN_RETURNS = 2
"""Counters that fell and came back this often belong to several processes. After a restart they come back once."""
Identity = Literal["one", "restarted", "several"]


def identify(readings: Sequence[ServerMetrics]) -> Identity:
    """Whether readings, in order of time, come from one process, a restarted one or several."""
    starts = [item.started_s for item in readings if item.started_s is not None]
    changes = sum(now != before for before, now in pairwise(starts))
    if changes >= len(set(starts)) > 1:
        return "several"
    counters = [item.counters for item in readings if item.counters is not None]
    falls = [place for place, (before, now) in enumerate(pairwise(counters)) if now.since(before) is None]
    returns = sum(_comes_back(counters, place) for place in falls)
    if min(len(falls), returns) >= MIN_RETURNS:
        return "several"
    return "restarted" if changes or falls else "one"


def _comes_back(counters: Sequence[ServerCounters], place: int) -> bool:
    """Whether a reading soon after a fall is at least as high as the reading before the fall."""
    return any(later.since(counters[place]) is not None for later in counters[place + 2 : place + 2 + NUM_LOOKS])


def rises_alone(readings: Sequence[ServerMetrics]) -> bool:
    """Whether counters rose between the first readings, before this probe sent a request."""
    counters = [item.counters for item in readings if item.counters is not None]
    if len(counters) < 2:
        return False
    risen = counters[-1].since(counters[0])
    return risen is not None and bool(risen.num_tokens or risen.num_drafts or risen.num_requests)
