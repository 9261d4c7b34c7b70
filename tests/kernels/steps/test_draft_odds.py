"""Predictions for draft tokens, and the sums of their outcomes."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.steps.draft_odds import NUM_SUMS, add_outcomes, add_outcomes_ref, draft_odds, draft_odds_ref
from dflash_testing.tensors import DEVICE

BIASES = 9


def model() -> tuple[Tensor, Tensor]:
    """A weight and biases."""
    biases = torch.linspace(-1, 2, BIASES, dtype=torch.float64, device=DEVICE)
    return torch.tensor(0.8, dtype=torch.float64, device=DEVICE), biases


@pytest.mark.parametrize(("num_requests", "num_drafts"), [(1, 1), (5, 7), (19, BIASES)])
def test_predictions_and_sums_equal_the_references(num_requests: int, num_drafts: int) -> None:
    """Confidences include 0, 1 and NaN. Counts have a stride, and some requests verify nothing."""
    generator = torch.Generator().manual_seed(num_requests)
    confidences = torch.rand(num_requests, num_drafts, generator=generator).to(DEVICE)
    confidences[0, 0], confidences[-1, -1], confidences[num_requests // 2, 0] = 0.0, 1.0, float("nan")
    counts = torch.randint(0, num_drafts + 1, (num_requests, 3), generator=generator).to(DEVICE)
    verified = torch.randint(0, num_drafts + 1, (num_requests,), generator=generator).to(DEVICE)
    found = draft_odds(confidences, *model(), verified)
    expected = draft_odds_ref(confidences, *model(), verified)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-12, atol=1e-7)
    assert bool((found.survivals[:, 1:] <= found.survivals[:, :-1]).all())
    sums, sums_ref = (torch.ones(NUM_SUMS, BIASES, dtype=torch.float64, device=DEVICE) for _ in range(2))
    for _ in range(2):
        add_outcomes(sums, *model(), expected.features, counts[:, 1], verified)
        add_outcomes_ref(sums_ref, *model(), expected.features, counts[:, 1], verified)
    assert sums_ref.unique().numel() > 3
    torch.testing.assert_close(sums, sums_ref, rtol=1e-12, atol=1e-12)
