"""RMS normalisation and rotary embedding, with the rounding of the published models.

Both are computed in float32 (float64 stays float64) and rounded once, as transformers' Qwen3 does, so that bf16 runs
agree with the models drafts were trained against. Source: huggingface/transformers models/qwen3/modeling_qwen3.py.
The kernels round where the references round: after the norm, after its weight, after each product of the rotation. They
are compiled without fused multiply-add, which would swallow the last of these (seen: `fma.rn.bf16` for a rotation).

Axis letters: T rows, H heads, D head dim.
"""

import torch
from torch import Tensor

from dflash_kernels.launch_config import (
    HEAD_TILE,
    ceil_div,
    check_dtypes,
    check_tensors,
    jit,
    power_of_2,
    require,
    tl,
    warps_for,
)


def rms_norm_ref(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis and scale by `weight`.

    hidden  [..., D]
    weight  [D]
    Returns [..., D] in the dtype of `hidden`.
    """
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(hidden.dtype)


def add_rms_norm_ref(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the residual stream, and normalise the sum for the next sublayer.

    hidden, residual  [..., D]
    weight            [D]
    Returns the normalised sum and the sum, the new residual, both [..., D].
    """
    total = hidden + residual
    return rms_norm_ref(total, weight, eps), total


def rope_ref(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position, halves paired (the "neox" layout).

    heads     [..., H, D]
    cos, sin  [..., D]   rows of the rope table for these positions, both halves filled
    Returns [..., H, D].
    """
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return heads * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)


def qk_norm_rope_ref(heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise each query or key head, then rotate it.

    heads     [T, H, D]   D even
    weight    [D], or [H, D] where heads differ, as those of queries and keys do; None where a model has no such norm
    cos, sin  [T, D]
    Returns [T, H, D].
    """
    return rope_ref(heads if weight is None else rms_norm_ref(heads, weight, eps), cos, sin)


@jit
def _rms_norm_kernel(
    hidden, residual, weight, normed, total, hidden_row, residual_row, eps,
    WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, TILE)
    is_dim = dim < WIDTH
    loaded = tl.load(hidden + row * hidden_row + dim, mask=is_dim, other=0.0)
    dtype = loaded.dtype
    wide = loaded.to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + row * residual_row + dim, mask=is_dim, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
        tl.store(total + row * WIDTH + dim, wide.to(dtype), mask=is_dim)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = (wide * scale).to(dtype).to(tl.float32)
    scaled *= tl.load(weight + dim, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + dim, scaled.to(dtype), mask=is_dim)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_ref` in one launch, a program a row."""
    return _launch_norm(hidden, None, weight, eps)[0]


def add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_ref` in one launch, a program a row."""
    require(hidden.shape == residual.shape, "a residual of the shape of hidden")
    return _launch_norm(hidden, residual, weight, eps)


def _launch_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    given = (hidden, weight) if residual is None else (hidden, weight, residual)
    check_tensors(*given)
    check_dtypes(*given)
    width = hidden.shape[-1]
    require(weight.shape == (width,), f"a weight of {width} elements")
    rows = _rows(hidden)
    others = rows if residual is None else _rows(residual)
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    total = normed if residual is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if len(rows):
        tile = power_of_2(width)
        _rms_norm_kernel[(len(rows),)](
            rows, others, weight.contiguous(), normed, total, rows.stride(0), others.stride(0), eps,
            WIDTH=width, HAS_RESIDUAL=residual is not None, TILE=tile,
            num_warps=warps_for(tile), enable_fp_fusion=False,
        )  # fmt: skip
    return normed, total


def _rows(hidden: Tensor) -> Tensor:
    """[..., D] as [T, D] with contiguous rows; copies only what no stride can describe."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@jit
def rotate_half_tiles(first, second, cos_first, cos_second, sin_first, sin_second):
    """Both halves of a rotated head, rounded as `rope_ref` rounds. All arguments in the model's dtype."""
    dtype = first.dtype
    first_cos = (first.to(tl.float32) * cos_first.to(tl.float32)).to(dtype).to(tl.float32)
    first_sin = (first.to(tl.float32) * sin_second.to(tl.float32)).to(dtype).to(tl.float32)
    second_cos = (second.to(tl.float32) * cos_second.to(tl.float32)).to(dtype).to(tl.float32)
    second_sin = (second.to(tl.float32) * sin_first.to(tl.float32)).to(dtype).to(tl.float32)
    return (first_cos - second_sin).to(dtype), (second_cos + first_sin).to(dtype)


@jit
def norm_half_tiles(first, second, weight_first, weight_second, eps, HEAD_DIM: tl.constexpr):
    """Both halves [heads, half] of RMS-normalised heads, rounded as `rms_norm_ref` rounds.

    Weights are [heads, half], or [1, half] for all heads.
    """
    dtype = first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    wide_first = (wide_first * scale).to(dtype).to(tl.float32) * weight_first.to(tl.float32)
    wide_second = (wide_second * scale).to(dtype).to(tl.float32) * weight_second.to(tl.float32)
    return wide_first.to(dtype), wide_second.to(dtype)


@jit
def _qk_norm_rope_kernel(
    heads, weight, cos, sin, out, heads_row, heads_head, weight_head, cos_row, sin_row, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    TILE_H: tl.constexpr, TILE_HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * TILE_H + tl.arange(0, TILE_H)
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, TILE_HALF)
    is_dim = dim < HALF
    is_element = (head < NUM_HEADS)[:, None] & is_dim[None, :]
    source = heads + row * heads_row + head[:, None] * heads_head + dim[None, :]
    first = tl.load(source, mask=is_element, other=0.0)
    second = tl.load(source + HALF, mask=is_element, other=0.0)
    if HAS_NORM:
        weights = weight + head[:, None] * weight_head + dim[None, :]
        weight_first = tl.load(weights, mask=is_element, other=0.0)
        weight_second = tl.load(weights + HALF, mask=is_element, other=0.0)
        first, second = norm_half_tiles(first, second, weight_first, weight_second, eps, HEAD_DIM)
    first, second = rotate_half_tiles(
        first, second,
        tl.load(cos + row * cos_row + dim, mask=is_dim, other=0.0)[None, :],
        tl.load(cos + row * cos_row + HALF + dim, mask=is_dim, other=0.0)[None, :],
        tl.load(sin + row * sin_row + dim, mask=is_dim, other=0.0)[None, :],
        tl.load(sin + row * sin_row + HALF + dim, mask=is_dim, other=0.0)[None, :],
    )  # fmt: skip
    target = out + (row * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(target, first, mask=is_element)
    tl.store(target + HALF, second, mask=is_element)


def qk_norm_rope(heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`qk_norm_rope_ref` in one launch. Heads may be views of a wider projection."""
    given = (heads, cos, sin) if weight is None else (heads, cos, sin, weight)
    check_tensors(*given)
    check_dtypes(*given)
    num_rows, num_heads, head_dim = heads.shape
    require(head_dim % 2 == 0, "an even head size")
    shapes = ((head_dim,), (num_heads, head_dim))
    require(weight is None or weight.shape in shapes, f"a weight of {head_dim} elements, or one for each head")
    require(cos.shape == sin.shape == (num_rows, head_dim), "a row of cos and sin for each row of heads")
    require(heads.stride(2) == cos.stride(1) == sin.stride(1) == 1, "contiguous heads and table rows")
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    if num_rows:
        tile_heads, tile_half = min(HEAD_TILE, power_of_2(num_heads)), power_of_2(head_dim // 2)
        _qk_norm_rope_kernel[(num_rows, ceil_div(num_heads, tile_heads))](
            heads, cos if weight is None else weight.contiguous(), cos, sin, out,
            heads.stride(0), heads.stride(1), head_dim if weight is not None and weight.dim() == 2 else 0,
            cos.stride(0), sin.stride(0), eps,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, HAS_NORM=weight is not None,
            TILE_H=tile_heads, TILE_HALF=tile_half, num_warps=warps_for(tile_heads * tile_half), enable_fp_fusion=False,
        )  # fmt: skip
    return out
