"""Gates of feed-forward layers: SwiGLU, the tanh form of GeGLU, and the clamped SwiGLU of gpt-oss.

Axis letters: T rows, F inner width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, require, tl
from dflash_kernels.launch_config import ELEMENT_TILE


@dataclass(frozen=True, slots=True)
class Gate:
    """The function that joins gate and up. `alpha` and `limit` belong to the clamped kind.

    silu     silu(gate) * up
    gelu     gelu(gate) * up, with the tanh form of gelu
    clamped  (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit`, and up from -limit to limit
    """

    kind: Literal["silu", "gelu", "clamped"]
    alpha: float = 0.0
    limit: float = 0.0


SILU, GELU = Gate("silu"), Gate("gelu")


def gate_ref(gate_up: Tensor, gate: Gate) -> Tensor:
    """Return the gated product, [..., 2 F] -> [..., F], with the gate's columns first.

    Every operation rounds to the model's dtype. Sources: transformers models/gemma4, models/gpt_oss.
    """
    if gate.kind == "silu":
        return silu_mul_ref(gate_up)
    first, up = gate_up.chunk(2, dim=-1)
    if gate.kind == "gelu":
        return functional.gelu(first, approximate="tanh") * up
    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return (up + 1) * (first * torch.sigmoid(first * gate.alpha))


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
def _sigmoid(wide):
    exp_neg = tl.exp(-tl.abs(wide))
    return tl.where(wide < 0, exp_neg, 1.0) / (1.0 + exp_neg)


@jit
def _rounded(values, dtype: tl.constexpr):
    return values.to(dtype).to(tl.float32)


@jit
def joined_tiles(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the gated product of two tiles in the model's dtype, with the roundings of `gate_ref`."""
    dtype = gate.dtype
    wide, wide_up = gate.to(tl.float32), up.to(tl.float32)
    if KIND == "silu":
        joined = gate_tiles(gate, up)
    elif KIND == "gelu":
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        joined = (_rounded(wide * _sigmoid(2 * inner), dtype) * wide_up).to(dtype)  # (1 + tanh(x)) / 2
    else:
        limited = tl.minimum(wide, LIMIT)
        more = _rounded(tl.minimum(tl.maximum(wide_up, -LIMIT), LIMIT) + 1, dtype)
        share = _rounded(_sigmoid(_rounded(limited * ALPHA, dtype)), dtype)
        joined = (more * _rounded(limited * share, dtype)).to(dtype)
    return joined


def gate_options(gate: Gate) -> dict[str, object]:
    """Return the options of launches that call `joined_tiles`."""
    return {"KIND": gate.kind, "ALPHA": gate.alpha, "LIMIT": gate.limit}


@jit
def _silu_mul_kernel(
    gate_up, out, gate_up_row, width, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < width
    source = gate_up + row * gate_up_row + column
    gate = tl.load(source, mask=is_column, other=0.0)
    up = tl.load(source + width, mask=is_column, other=0.0)
    tl.store(out + row * width + column, joined_tiles(gate, up, KIND, ALPHA, LIMIT), mask=is_column)


def silu_mul(gate_up: Tensor, gate: Gate = SILU) -> Tensor:
    """Compute `silu_mul_ref`, or `gate_ref` of another gate, in one launch."""
    check_tensors(gate_up)
    check_dtypes(gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    require(gate_up.dim() == 2 and gate_up.shape[1] == 2 * width, "gate_up", "two axes and an even number of columns")
    require(gate_up.stride(1) == 1, "gate_up", "contiguous rows")
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_mul_kernel[(num_rows, ceil_div(width, ELEMENT_TILE))](
            gate_up,
            out,
            gate_up.stride(0),
            width,
            TILE=ELEMENT_TILE,
            enable_fp_fusion=False,
            **gate_options(gate),
        )
    return out
