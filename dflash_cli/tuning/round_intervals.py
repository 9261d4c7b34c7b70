"""Intervals over timed rounds: Student's t. A single round has none."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.acceptance.intervals.student import student_quantile

CONFIDENCE = 0.95


def half_width(values: Sequence[float], confidence: float) -> float:
    """Return half the width of the interval of the mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return student_quantile((1 + confidence) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the interval of the mean, or None for a single value."""
    half = half_width(values, CONFIDENCE)
    return None if math.isinf(half) else Interval(fmean(values) - half, fmean(values) + half, CONFIDENCE)


def time_interval(times: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of times, which is never below 0; None for a single time."""
    found = mean_interval(times)
    return None if found is None else replace(found, low=max(0.0, found.low))
