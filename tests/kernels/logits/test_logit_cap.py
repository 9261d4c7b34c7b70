"""Capped logits: the kernel against torch, from zero to far above the cap."""

import pytest
import torch

from dflash_kernels.logits.logit_cap import cap_logits, cap_logits_ref
from dflash_testing.tensors import DEVICE, DTYPES, assert_mostly_equal, normal

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("dtype", DTYPES)
def test_cap_logits(dtype: torch.dtype) -> None:
    logits = normal(3, 5000, dtype=dtype) * torch.logspace(-4, 3, 5000, device=DEVICE).to(dtype)
    wanted = cap_logits_ref(logits, 30.0)
    found = cap_logits(logits.clone(), 30.0)
    assert found.abs().max() <= 30
    if dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    else:
        assert_mostly_equal(found, wanted)


def test_the_result_takes_the_memory_of_the_logits() -> None:
    logits = normal(2, 70)
    assert cap_logits(logits, 5.0).data_ptr() == logits.data_ptr()
    assert cap_logits(logits[:0], 5.0).shape == (0, 70)
    with pytest.raises(ValueError, match="contiguous"):
        cap_logits(normal(4, 8).T, 5.0)
