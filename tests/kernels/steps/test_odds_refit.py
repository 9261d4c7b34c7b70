"""The refit of the predictions for draft tokens."""

import pytest
import torch

from dflash_kernels.steps.draft_odds import NUM_SUMS
from dflash_kernels.steps.odds_refit import refit_odds, refit_odds_ref
from dflash_testing.tensors import DEVICE


@pytest.mark.parametrize("num_biases", [1, 7, 16])
def test_a_refit_equals_the_reference(num_biases: int) -> None:
    """Two refits. Only the first one has tokens. Positions have many tokens, few, or none."""
    generator = torch.Generator().manual_seed(num_biases)
    sums = torch.randn(NUM_SUMS, num_biases, dtype=torch.float64, generator=generator)
    sums[0] = torch.tensor([40.0, 3.0, 0.0]).repeat(6)[:num_biases]
    sums[3], sums[5] = sums[3].abs(), sums[5].abs() + sums[4] ** 2
    sums[1:] *= sums[0] > 0
    weight = torch.tensor(0.8, dtype=torch.float64)
    biases, num_judged = torch.randn(2, num_biases, dtype=torch.float64, generator=generator)
    given = (sums, weight, biases, num_judged.abs())
    found, expected = ([item.to(DEVICE, copy=True) for item in given] for _ in range(2))
    for _ in range(2):
        refit_odds(*found)
        refit_odds_ref(*expected)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        assert not found[0].any()
    assert all((new.cpu() != old).any() for new, old in zip(found[1:], given[1:], strict=True))
