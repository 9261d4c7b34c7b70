"""Readings of one process, of a restarted one and of several."""

import pytest

from dflash_cli.probing.counters.process_identity import identify
from dflash_cli.probing.counters.server_counters import ServerCounters, ServerMetrics


def read(num_tokens: int, started_s: float | None = None) -> ServerMetrics:
    return ServerMetrics(counters=ServerCounters(num_drafts=0, num_tokens=num_tokens), started_s=started_s)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((5, 5, 9, 30), "one"),
        ((50, 90, 3, 40), "restarted"),
        ((50, 90, 3, 95, 200), "restarted"),
        ((90, 40, 90, 40, 95, 44), "several"),
        ((40, 90, 40, 40, 90, 90, 41, 95), "several"),
        ((), "one"),
    ],
)
def test_counters_that_fall_once_are_a_restart_and_counters_that_come_back_are_several(
    counts: tuple[int, ...], expected: str
) -> None:
    assert identify([read(count) for count in counts]) == expected


@pytest.mark.parametrize(("starts", "expected"), [((7, 7, 7), "one"), ((7, 7, 9), "restarted"), ((7, 9, 7), "several")])
def test_a_start_that_comes_back_is_of_several_servers(starts: tuple[float, ...], expected: str) -> None:
    assert identify([read(5, start) for start in starts]) == expected
