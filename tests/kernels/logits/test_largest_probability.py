"""The largest probability of rows of logits."""

import pytest
import torch

from dflash_kernels.logits.largest_probability import largest_probability, largest_probability_ref
from dflash_kernels.logits.sampling import argmax
from dflash_testing.tensors import DEVICE, DTYPES, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 63, 2 * 4096 + 15])
def test_it_is_the_largest_value_of_the_softmax(vocab_size: int, dtype: torch.dtype) -> None:
    """Rows with a stride, and rows whose probabilities are not numbers."""
    logits = (4 * normal(7, vocab_size + 3, dtype=dtype))[:, :vocab_size]
    logits[1, vocab_size // 2 :] = float("-inf")
    logits[1, 0] = 300.0
    logits[2], logits[3, -1], logits[4, -1] = float("-inf"), float("nan"), float("inf")
    expected = torch.softmax(logits.double(), -1).amax(-1).float()
    expected[2:5] = float("nan")
    found = largest_probability(logits)
    assert found.probabilities.dtype == torch.float32
    torch.testing.assert_close(found.probabilities, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    reference = largest_probability_ref(logits)
    torch.testing.assert_close(reference.probabilities, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert found.token_ids.tolist() == argmax(logits).tolist()
    is_number = ~logits.isnan().any(1)
    assert torch.equal(found.token_ids[is_number], reference.token_ids[is_number])


def test_the_token_is_the_first_of_equal_ones() -> None:
    """Two tiles of 4,096 and a part of one. Rows have their largest logit several times, in one tile or in several."""
    logits = torch.zeros(4, 2 * 4096 + 15, device=DEVICE)
    places = ([17, 18], [4095, 4096], [5000, 8200], [8206])
    for row, own in zip(logits, places, strict=True):
        row[own] = 3.0
    logits[0, :17] = float("nan")
    found = largest_probability(logits).token_ids
    assert found.tolist() == argmax(logits).tolist() == [own[0] for own in places]
