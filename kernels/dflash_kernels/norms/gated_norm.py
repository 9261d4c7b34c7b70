"""RMS normalisation of each head of a recurrent layer, gated by silu of another projection, in one launch.

Rounded as in the published models: after the norm, then once after weight and gate.
Source: huggingface/transformers models/qwen3_5/modeling_qwen3_5.py, Qwen3_5RMSNormGated.

Axis letters: T rows, H heads, V head size.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.early_launch import early, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl, warps_for
from dflash_kernels.launch_config import HEAD_TILE


def gated_norm_ref(heads: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each head, multiply by `weight` and by silu of the gate.

    heads   [T, H, V]
    gate    [T, H * V]
    weight  [V]
    Returns [T, H * V].
    """
    wide = torch.promote_types(heads.dtype, torch.float32)
    rows = heads.to(wide)
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    scaled = (weight * normed.to(heads.dtype)).flatten(1)
    return (scaled * functional.silu(gate.to(wide))).to(heads.dtype)


@jit
def _gated_norm_kernel(
    heads, gate, weight, out, gate_row, eps, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    TILE_H: tl.constexpr, TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, dim = (tl.program_id(1) * TILE_H + tl.arange(0, TILE_H))[:, None], tl.arange(0, TILE)[None, :]
    is_element = (head < NUM_HEADS) & (dim < WIDTH)
    dtype = out.dtype.element_ty
    place = head * WIDTH + dim
    scale = tl.load(weight + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
    wait_for_launches_before(IS_EARLY)
    value = tl.load(heads + row * NUM_HEADS * WIDTH + place, mask=is_element, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_row + place, mask=is_element, other=0.0).to(tl.float32)
    normed = (value * tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]).to(dtype).to(tl.float32)
    scaled = (normed * scale).to(dtype).to(tl.float32)
    result = scaled * (opened / (1.0 + tl.exp(-opened)))
    tl.store(out + row * NUM_HEADS * WIDTH + place, result.to(dtype), mask=is_element)


def gated_norm(heads: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `gated_norm_ref` in one launch."""
    check_tensors(heads, gate, weight)
    check_dtypes(heads, gate, weight)
    count, num_heads, width = heads.shape
    require(heads.is_contiguous(), "heads", "contiguous")
    require(gate.shape == (count, num_heads * width) and gate.stride(1) == 1, "gate", "one row per row of heads")
    require(weight.shape == (width,) and weight.is_contiguous(), "weight", "one number per dimension of a head")
    out = torch.empty((count, num_heads * width), dtype=heads.dtype, device=heads.device)
    if count:
        tile_heads, tile = min(HEAD_TILE, power_of_2(num_heads)), power_of_2(width)
        _gated_norm_kernel[(count, ceil_div(num_heads, tile_heads))](
            heads, gate, weight, out, gate.stride(0), eps, NUM_HEADS=num_heads, WIDTH=width, TILE_H=tile_heads,
            TILE=tile, num_warps=warps_for(tile_heads * tile), **early(heads.device),
        )  # fmt: skip
    return out
