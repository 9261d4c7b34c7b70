"""Logits of heads with a cap: `cap * tanh(logits / cap)`.

Rounded as in the published models: after the division, the tangent and the product.
Source: huggingface/transformers models/gemma2/modeling_gemma2.py.

Axis letters: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, require, tl
from dflash_kernels.launch_config import VOCAB_TILE
from dflash_kernels.tanh import tanh, tanh_for_16_bits


def cap_logits_ref(logits: Tensor, cap: float) -> Tensor:
    """Return capped logits [T, V]. The result may take the memory of `logits`."""
    return torch.tanh(logits / cap) * cap


@jit(do_not_specialize=["num_elements"])
def _cap_logits_kernel(logits, num_elements, inverse, cap, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_element = place < num_elements
    dtype: tl.constexpr = logits.dtype.element_ty
    ratio = (tl.load(logits + place, mask=is_element, other=0.0).to(tl.float32) * inverse).to(dtype)
    share = tanh(ratio) if dtype == tl.float32 else tanh_for_16_bits(ratio.to(tl.float32)).to(dtype)
    tl.store(logits + place, (share.to(tl.float32) * cap).to(dtype), mask=is_element)


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Compute `cap_logits_ref` in one launch, in the memory of `logits`."""
    check_tensors(logits)
    check_dtypes(logits)
    require(logits.is_contiguous(), "logits", "contiguous memory")
    if logits.numel():
        _cap_logits_kernel[(ceil_div(logits.numel(), VOCAB_TILE),)](
            logits, logits.numel(), 1 / cap, cap, TILE=VOCAB_TILE, num_warps=8, enable_fp_fusion=False
        )
    return logits
