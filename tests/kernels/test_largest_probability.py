"""The largest probability of rows of logits."""

import pytest
import torch

from dflash_kernels.largest_probability import largest_probability, largest_probability_ref
from dflash_testing.tensors import DTYPES, normal


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
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(largest_probability_ref(logits), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
