"""Student's t, with degrees of freedom that need not be a whole number.

Its tail is half of a regularised incomplete beta function, which is summed as a continued fraction.
Sources: Abramowitz and Stegun, 26.5.8 and 26.7.1; Lentz 1976.
"""

import math
from functools import lru_cache
from statistics import NormalDist

PRECISION = 1e-15
"""Of the last factor of a continued fraction."""
MOST_TERMS = 10_000
"""Some fifty are enough up to a million degrees of freedom; what is no number would never end."""


def student_tail(value: float, freedom: float) -> float:
    """Probability that Student's t is above `value`."""
    if math.isinf(value):
        return 0.0 if value > 0 else 1.0
    half = _incomplete_beta(freedom, value * value) / 2
    return half if value >= 0 else 1 - half


@lru_cache(maxsize=4096)
def student_quantile(share: float, freedom: float) -> float:
    """The value that Student's t is below with probability `share`, for a share from a half on.

    By Newton's method from the normal distribution's, which is the smaller one: from there it never steps too far.
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
    """I_x(freedom / 2, 1 / 2) for x = freedom / (freedom + square), by the side where the fraction converges fast."""
    a, b = freedom / 2, 0.5
    x, rest = freedom / (freedom + square), square / (freedom + square)
    if rest == 0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1 / (1 + d1 / (1 + d2 / ...)) of I_x(a, b), by Lentz's method."""
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
