"""Intervals of proportions: published values, coverage of the true value, and symmetry of the two sides."""

import numpy as np
import pytest

from dflash_cli.acceptance.intervals.proportions import mcnemar_p_value, paired_share_interval, wilson_interval


def test_wilsons_interval_equals_the_published_interval() -> None:
    """81 of 263, of Newcombe 1998, table I."""
    found = wilson_interval(81, 263, 0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 0, 0.95) is None


@pytest.mark.parametrize(("changed", "expected"), [((0, 0), 1.0), ((1, 9), 22 / 1024), ((5, 5), 1.0), ((0, 6), 2 / 64)])
def test_mcnemars_test_is_exact(changed: tuple[int, int], expected: float) -> None:
    assert mcnemar_p_value(*changed) == mcnemar_p_value(*changed[::-1]) == pytest.approx(expected)


def test_exchanging_the_sides_negates_the_interval_of_a_difference() -> None:
    there, back = paired_share_interval(30, 9, 4, 60, 0.95), paired_share_interval(30, 4, 9, 60, 0.95)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert there.low < -5 / 60 < there.high
    same = paired_share_interval(60, 0, 0, 60, 0.95)
    assert same.low <= 0 <= same.high


def test_the_interval_of_a_difference_covers() -> None:
    """Of 2,000 draws of 200 pairs, 93% to 97% have an interval with the true difference, within two standard errors."""
    generator = np.random.default_rng(0)
    for shares in ((0.6, 0.1, 0.05, 0.25), (0.9, 0.05, 0.01, 0.04)):
        draws = generator.multinomial(200, shares, size=2000)
        truth = shares[2] - shares[1]
        spans = [
            paired_share_interval(int(both), int(first), int(second), 200, 0.95) for both, first, second, _ in draws
        ]
        assert 0.92 <= np.mean([span.low <= truth <= span.high for span in spans]) <= 0.98
