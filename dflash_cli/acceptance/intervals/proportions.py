"""Intervals of proportions of prompts, and of the difference of two proportions over the same prompts."""

import math
from statistics import NormalDist

from dflash_cli.acceptance.intervals.statistics import Interval


def wilson_interval(count: float, total: float, confidence: float) -> Interval | None:
    """Return the interval of a proportion, or None if `total` is 0. Source: Wilson 1927."""
    if not total:
        return None
    low, high = _wilson_ends(count, total, confidence)
    return Interval(low, high, confidence)


def paired_share_interval(both: int, only_first: int, only_second: int, total: int, confidence: float) -> Interval:
    """Return the interval of the second proportion minus the first, over the same `total` (1 or more) prompts.

    `both` counts successes on both sides, `only_first` and `only_second` on one side alone. Source: Newcombe 1998,
    method 10.
    """
    first, second = both + only_first, both + only_second
    shares = [count / total for count in (first, second)]
    ends = [_wilson_ends(count, total, confidence) for count in (first, second)]
    below, above = ([abs(share - end[place]) for share, end in zip(shares, ends, strict=True)] for place in (0, 1))
    phi = _correlation(both, only_first, only_second, total - both - only_first - only_second)
    gap = shares[1] - shares[0]
    low = gap - math.sqrt(below[1] ** 2 - 2 * phi * below[1] * above[0] + above[0] ** 2)
    high = gap + math.sqrt(above[1] ** 2 - 2 * phi * above[1] * below[0] + below[0] ** 2)
    return Interval(max(-1.0, low), min(1.0, high), confidence)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of a split this uneven, if a change in either direction is equally likely.

    Source: McNemar 1947, with the exact binomial distribution.
    """
    changed, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(changed, count) for count in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2**changed))


def _wilson_ends(count: float, total: float, confidence: float) -> tuple[float, float]:
    quantile = NormalDist().inv_cdf((1 + confidence) / 2)
    share, square = count / total, quantile**2
    centre = (share + square / (2 * total)) / (1 + square / total)
    half = quantile / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _correlation(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Return the correlation of the two sides over prompts. Newcombe's correction reduces positive values."""
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if not margins:
        return 0.0
    product = float(both * neither - only_first * only_second)
    if product > 0:
        product = max(product - (both + only_first + only_second + neither) / 2, 0)
    return product / math.sqrt(margins)
