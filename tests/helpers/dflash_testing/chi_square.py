"""Pearson's chi-square test."""

import math

from torch import Tensor


def chi_square(observed: Tensor, expected: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom. Cells with fewer than five expected counts are pooled."""
    common = expected >= 5
    terms = ((observed - expected)[common] ** 2 / expected[common]).sum().item()
    rest = expected[~common].sum().item()
    if rest > 0:
        terms += (observed[~common].sum().item() - rest) ** 2 / rest
    return terms, int(common.sum()) - (rest == 0)


def chi_square_quantile(degrees: int, normal: float) -> float:
    """The quantile of the chi-square distribution at the probability of the standard normal quantile `normal`.

    Source: Wilson and Hilferty's approximation.
    """
    term = 2 / (9 * degrees)
    return degrees * (1 - term + normal * math.sqrt(term)) ** 3
