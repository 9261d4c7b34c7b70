"""Norms around a sublayer, in one launch: of its output, then of the residual stream, as Gemma has them.

The output may come from two sublayers that run beside each other, such as a feed-forward and experts. Each then has a
norm of its own before their sum. Source: huggingface/transformers models/gemma4/modeling_gemma4.py.

Axis letters: T rows, D width, P parts, N norms.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import check_dtypes, check_tensors, jit, power_of_2, require, tl, warps_for
from dflash_kernels.norms.rope_norm import check_parts, check_weight, rms_norm_ref, sum_parts, sum_parts_ref


class Beside(NamedTuple):
    """The output of a second sublayer, and the norms of both outputs before their sum."""

    parts: Tensor
    """[P, T, D]"""
    first_norm: Tensor
    """[D], of the first sublayer's output."""
    norm: Tensor
    """[D], of these parts."""


def sandwich_norm_ref(
    parts: Tensor,
    residual: Tensor,
    inner: Tensor,
    outer: Tensor,
    eps: float,
    scale: Tensor | None = None,
    beside: Beside | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise a sublayer's output, add it to the residual stream, and normalise the sum with one or more weights.

    parts     [P, T, D]   the output, as returned by `product_parts_ref`
    residual  [T, D]
    inner     [D]         norm weight of the output
    outer     [N, D]      norm weights of the sum
    scale     [1]         factor of the sum, or None
    beside    the output of a second sublayer
    Returns the normalised sums [N, T, D] and the sum [T, D].
    """
    output = sum_parts_ref(parts, residual.dtype)
    if beside is not None:
        second = rms_norm_ref(sum_parts_ref(beside.parts, residual.dtype), beside.norm, eps)
        output = rms_norm_ref(output, beside.first_norm, eps) + second
    total = residual + rms_norm_ref(output, inner, eps)
    if scale is not None:
        total = total * scale
    return torch.stack([rms_norm_ref(total, weight, eps) for weight in outer]), total


@jit
def _normed(wide, weights, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Return a normalised row, rounded to the model's dtype, as float32."""
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)).to(weights.dtype).to(tl.float32)
    return (scaled * weights.to(tl.float32)).to(dtype).to(tl.float32)


@jit(do_not_specialize=["num_rows"])
def _sandwich_norm_kernel(
    parts, second, residual, inner, first_norm, second_norm, outer, scale, normed, total,
    num_rows, parts_row, second_row, residual_row, part_stride, second_stride, eps,
    WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, NUM_SECOND: tl.constexpr, NUM_NORMS: tl.constexpr,
    HAS_SCALE: tl.constexpr, TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, TILE)
    is_dim = dim < WIDTH
    dtype: tl.constexpr = normed.dtype.element_ty
    # Load the weights before the rows, so that all loads wait for memory at the same time.
    inner_weights = tl.load(inner + dim, mask=is_dim, other=0.0)
    if NUM_SECOND:
        first_weights = tl.load(first_norm + dim, mask=is_dim, other=0.0)
        second_weights = tl.load(second_norm + dim, mask=is_dim, other=0.0)
    outer_weights = ()
    for index in tl.static_range(NUM_NORMS):
        outer_weights += (tl.load(outer + index * WIDTH + dim, mask=is_dim, other=0.0),)  # type: ignore[assignment]
    if HAS_SCALE:
        factor = tl.load(scale).to(tl.float32)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    stream = tl.load(residual + row * residual_row + dim, mask=is_dim, other=0.0).to(tl.float32)
    wide = sum_parts(parts, row * parts_row + dim, is_dim, part_stride, NUM_PARTS, dtype).to(tl.float32)
    if NUM_SECOND:
        offsets = row * second_row + dim
        other = sum_parts(second, offsets, is_dim, second_stride, NUM_SECOND, dtype).to(tl.float32)
        wide = _normed(wide, first_weights, eps, WIDTH, dtype)
        wide = (wide + _normed(other, second_weights, eps, WIDTH, dtype)).to(dtype).to(tl.float32)
    wide = (stream + _normed(wide, inner_weights, eps, WIDTH, dtype)).to(dtype).to(tl.float32)
    if HAS_SCALE:
        wide = (wide * factor).to(dtype).to(tl.float32)
    tl.store(total + row * WIDTH + dim, wide.to(dtype), mask=is_dim)
    for index in tl.static_range(NUM_NORMS):
        found = _normed(wide, outer_weights[index], eps, WIDTH, dtype)
        tl.store(normed + (index * num_rows.to(tl.int64) + row) * WIDTH + dim, found.to(dtype), mask=is_dim)


def sandwich_norm(
    parts: Tensor,
    residual: Tensor,
    inner: Tensor,
    outer: Tensor,
    eps: float,
    scale: Tensor | None = None,
    beside: Beside | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `sandwich_norm_ref` in one launch, one program per row."""
    second, first_norm, second_norm = (parts, inner, inner) if beside is None else (
        beside.parts, beside.first_norm, beside.norm
    )  # fmt: skip
    factor = residual if scale is None else scale
    check_tensors(parts, residual, inner, outer, factor, second, first_norm, second_norm)
    check_dtypes(residual, factor)
    for weight in (inner, outer, first_norm, second_norm):
        check_weight(weight, residual.dtype)
    for output in (parts, second):
        check_parts(output, residual.dtype)
        require(output.shape[1:] == residual.shape, "residual", "the shape of one part")
        require(output.stride(2) == 1, "parts", "contiguous rows")
    num_parts, num_rows, width = parts.shape
    require(residual.stride(1) == 1, "residual", "contiguous rows")
    require(outer.dim() == 2 and outer.is_contiguous(), "outer", "contiguous norms")
    are_whole = all(weight.shape[-1:] == (width,) and weight.stride(-1) == 1 for weight in (inner, outer, second_norm))
    require(are_whole and first_norm.shape == (width,), "norms", "one element per column")
    normed = torch.empty((len(outer), num_rows, width), dtype=residual.dtype, device=residual.device)
    total = torch.empty((num_rows, width), dtype=residual.dtype, device=residual.device)
    if num_rows:
        tile = power_of_2(width)
        _sandwich_norm_kernel[(num_rows,)](
            parts, second, residual, inner, first_norm, second_norm, outer, factor, normed, total,
            num_rows, parts.stride(1), second.stride(1), residual.stride(0), parts.stride(0), second.stride(0), eps,
            WIDTH=width, NUM_PARTS=num_parts, NUM_SECOND=0 if beside is None else len(second), NUM_NORMS=len(outer),
            HAS_SCALE=scale is not None, TILE=tile, num_warps=warps_for(tile), enable_fp_fusion=False,
            **early(residual.device),
        )  # fmt: skip
    return normed, total
