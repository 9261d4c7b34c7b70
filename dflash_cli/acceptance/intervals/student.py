"""Student's t distribution for any positive number of degrees of freedom.

Half of a regularised incomplete beta function gives its tail. A continued fraction computes the beta function.
Sources: Abramowitz and Stegun, 26.5.8 and 26.7.1; Lentz 1976.
"""

import math
from functools import lru_cache
from statistics import NormalDist

PRECISION = 1e-15
"""The continued fraction stops when a factor differs from 1 by less."""
MOST_TERMS = 10_000
"""About fifty terms are enough up to a million degrees of freedom. The limit ends the loop for NaN."""


def student_tail(value: float, freedom: float) -> float:
    """Return the probability that Student's t is above `value`."""
    if math.isinf(value):
        return 0.0 if value > 0 else 1.0
    half = _incomplete_beta(freedom, value * value) / 2
    return half if value >= 0 else 1 - half


@lru_cache(maxsize=4096)
def student_quantile(share: float, freedom: float) -> float:
    """Return the value that Student's t stays below with probability `share`, for a share of at least 0.5.

    Newton's method starts at the normal quantile. This start is too small, so no step overshoots.
    """
    value = NormalDist().inv_cdf(share)
    while True:
        step = (student_tail(value, freedom) - (1 - share)) / _density(value, freedom)
        if not step > 1e-12 * value:
            return value
        value += step


def _density(value: float, freedom: float) -> float:
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    return math.exp(log_scale - (freedom + 1) / 2 * math.log1p(value * value / freedom))


def _incomplete_beta(freedom: float, square: float) -> float:
    """Return I_x(freedom / 2, 1 / 2) for x = freedom / (freedom + square), in the form that converges fast."""
    a, b = freedom / 2, 0.5
    x, rest = freedom / (freedom + square), square / (freedom + square)
    if rest == 0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction 1 / (1 + d1 / (1 + d2 / ...)) of I_x(a, b), by Lentz's method."""
    lower = total = 1 / (1 - (a + b) * x / (a + 1))
    upper = 1.0
    for half in range(1, MOST_TERMS):
        even = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        odd = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        for term in (even, odd):
            lower, upper = 1 / (1 + term * lower), 1 + term / upper
            factor = lower * upper
            total *= factor
        if abs(factor - 1) < PRECISION:
            break
    return total
