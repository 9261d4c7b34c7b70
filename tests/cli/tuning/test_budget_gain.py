"""The simulated gain of a row budget, in batches whose best rows can be counted by hand."""

import pytest

from dflash_cli.acceptance.calibration import PredictedBlock
from dflash_cli.tuning.budget_gain import budget_gains, rows_ms

WIDTHS = {2: 10.0, 8: 16.0}
"""Milliseconds of a step by verify width: a row of each request costs 1 ms."""


def block(prompt: int, likely: float, num_accepted: int) -> PredictedBlock:
    return PredictedBlock(prompt, (likely,) * 7, (likely,) * 7, num_accepted)


def test_times_lie_between_the_measured_widths() -> None:
    assert [rows_ms(WIDTHS, 4, rows) for rows in (4, 8, 20, 32)] == [10, 10, 13, 16]


@pytest.mark.parametrize("batch", [2, 6])
def test_a_budget_gives_rows_to_the_requests_that_use_them(batch: int) -> None:
    """Half of the requests accept all 7 drafts and half accept none. Whole blocks take 16 ms, and 4.5 rows 12.5 ms."""
    blocks = [block(prompt, 0.99, 7) for prompt in range(3)] + [block(prompt, 0.01, 0) for prompt in range(3, 6)]
    gains = {item.feature: item for item in budget_gains(blocks, batch, WIDTHS) if item.requests == "two kinds"}
    assert gains["perfect"].over_all_rows == pytest.approx(16 / 12.5)
    assert gains["perfect"].rows_per_request == pytest.approx(4.5)
    assert gains["measured"].over_all_rows == pytest.approx(16 / 12.5, rel=0.01)
    assert gains["uninformative"].over_all_rows == pytest.approx(1)
    assert {item.one_width for item in gains.values()} == {8}
    assert gains["perfect"].over_one_width == gains["perfect"].over_all_rows


def test_the_best_width_is_known_in_advance() -> None:
    """Every block accepts its first draft only, so all rows but two of each request are lost."""
    blocks = [block(prompt, 0.5, 1) for prompt in range(4)]
    (measured, perfect, uninformative) = budget_gains(blocks, 3, WIDTHS)
    assert {item.requests for item in (measured, perfect, uninformative)} == {"as measured"}
    assert perfect.one_width == uninformative.one_width == 2
    assert perfect.over_one_width == pytest.approx(1)
    assert perfect.over_all_rows == pytest.approx(1.6)
    assert uninformative.over_one_width == pytest.approx(1, rel=0.01)


def test_without_blocks_there_is_no_gain_to_simulate() -> None:
    assert budget_gains([], 2, WIDTHS) == []
