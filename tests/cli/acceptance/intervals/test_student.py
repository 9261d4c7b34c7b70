"""Student's t: values of printed tables, closed formulas, and order between degrees of freedom."""

import math

import pytest

from dflash_cli.acceptance.intervals.student import student_quantile, student_tail

TABLE = [
    (0.975, 1, 12.706205), (0.975, 2, 4.302653), (0.975, 4, 2.776445), (0.95, 7, 1.894579), (0.975, 15, 2.131450),
    (0.975, 120, 1.979930), (0.995, 3, 5.840909), (0.9995, 4, 8.610302), (0.9, 10, 1.372184), (0.75, 3, 0.764892),
    (0.975, 1e6, 1.959966),
]  # fmt: skip


@pytest.mark.parametrize(("share", "freedom", "value"), TABLE)
def test_quantiles_equal_the_printed_tables(share: float, freedom: float, value: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(value, abs=1e-6)
    assert student_tail(value, freedom) == pytest.approx(1 - share, abs=1e-7)
    assert student_tail(-value, freedom) == pytest.approx(share, abs=1e-7)


@pytest.mark.parametrize("value", [-3.0, -0.4, 0.0, 1e-9, 0.7, 2.5, 40.0, 1e9])
def test_tails_of_one_and_two_degrees_of_freedom_equal_the_formulas(value: float) -> None:
    assert student_tail(value, 1) == pytest.approx(0.5 - math.atan(value) / math.pi, abs=1e-14)
    two = 0.5 - value / (2 * math.sqrt(2 + value * value))
    assert student_tail(value, 2) == pytest.approx(two, abs=1e-14)


@pytest.mark.parametrize("freedom", [1.1, 2.5, 3.7, 11.2, 250.5])
def test_quantiles_of_fractional_freedom_lie_between_whole_degrees(freedom: float) -> None:
    below, above = math.floor(freedom), math.ceil(freedom)
    for share in (0.6, 0.975, 0.9999):
        found = student_quantile(share, freedom)
        assert student_quantile(share, above) < found < student_quantile(share, below)
        assert student_tail(found, freedom) == pytest.approx(1 - share, rel=1e-9)


def test_infinite_values_zero_and_nan() -> None:
    assert (student_tail(math.inf, 3), student_tail(-math.inf, 3), student_tail(0, 3)) == (0, 1, 0.5)
    assert student_quantile(0.5, 3) == 0
    assert math.isnan(student_tail(math.nan, 3))
