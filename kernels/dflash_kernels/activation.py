"""SwiGLU gate of a feed-forward layer.

Axis letters: T rows, F inner width.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.launch_config import ELEMENT_TILE, ceil_div, check_dtypes, check_tensors, jit, require, tl


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up. Both operations round to the model's dtype, as in transformers' Qwen3MLP.

    gate_up  [T, 2 F]   gate columns, then up columns
    Returns [T, F].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@jit
def gate_tiles(gate, up):
    """Return silu(gate) * up of two tiles in the model's dtype, with the roundings of `silu_mul_ref`."""
    wide = gate.to(tl.float32)
    exp_neg = tl.exp(-tl.abs(wide))  # exp(-|x|) never overflows
    gated = (wide * tl.where(wide < 0, exp_neg, 1.0) / (1.0 + exp_neg)).to(gate.dtype)
    return (gated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@jit
def _silu_mul_kernel(gate_up, out, gate_up_row, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < width
    source = gate_up + row * gate_up_row + column
    gate = tl.load(source, mask=is_column, other=0.0)
    up = tl.load(source + width, mask=is_column, other=0.0)
    tl.store(out + row * width + column, gate_tiles(gate, up), mask=is_column)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute `silu_mul_ref` in one launch."""
    check_tensors(gate_up)
    check_dtypes(gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    require(gate_up.dim() == 2 and gate_up.shape[1] == 2 * width, "gate_up", "two axes and an even number of columns")
    require(gate_up.stride(1) == 1, "gate_up", "contiguous rows")
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_mul_kernel[(num_rows, ceil_div(width, ELEMENT_TILE))](
            gate_up, out, gate_up.stride(0), width, TILE=ELEMENT_TILE, enable_fp_fusion=False
        )
    return out
