"""Intervals of times and of their differences."""

from dflash_cli.tuning.round_intervals import mean_interval, time_interval


def test_a_time_is_never_below_zero() -> None:
    """Two unlike rounds have a wide interval. A difference of times may be negative."""
    found, difference = time_interval([1.0, 9.0]), mean_interval([1.0, 9.0])
    assert found is not None
    assert difference is not None
    assert (found.low, found.high) == (0.0, difference.high)
    assert difference.low < 0
    assert time_interval([1.0]) is None
