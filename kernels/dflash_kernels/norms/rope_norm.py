"""RMS normalisation and rotary embedding, with the roundings of the published models.

The norm is computed in float32 (float64 for float64 models), as in transformers' Qwen3. Therefore bf16 runs agree with
the models that drafts were trained with. Source: huggingface/transformers models/qwen3/modeling_qwen3.py.
The kernels round like the references: after the norm, after its weight, and after each product of the rotation. They
are compiled without fused multiply-add, which would skip the last rounding (seen: `fma.rn.bf16` for a rotation).

Axis letters: T rows, H heads, D head dim.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import check_dtypes, check_tensors, jit, power_of_2, require, tl, warps_for
from dflash_kernels.norms.pushed_sum import Rooms, sum_of_ranks


def rms_norm_ref(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis and multiply by `weight`.

    hidden  [..., D]
    weight  [D]   in the dtype of `hidden`; or wider, and then the normalised rows are rounded only once, at the end
    Returns [..., D] in the dtype of `hidden`.
    """
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    normed = wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (weight * normed.to(weight.dtype)).to(hidden.dtype)


def add_rms_norm_ref(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the residual stream, and normalise the sum for the next sublayer.

    parts     [P, T, D]   the output, as returned by `product_parts_ref`
    residual  [T, D]
    weight    [D]
    Returns the normalised sum and the sum, which is the new residual, both [T, D].
    """
    total = sum_parts_ref(parts, residual.dtype) + residual
    return rms_norm_ref(total, weight, eps), total


def sum_rms_norm_ref(parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add up the parts of a product [P, T, D] in the model's dtype, and normalise the sum: -> [T, D]."""
    return rms_norm_ref(sum_parts_ref(parts, dtype), weight, eps)


def sum_parts_ref(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up parts [P, ...] and round once: -> [...]."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)


def rope_ref(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position. Elements of both halves are paired (the "neox" layout).

    heads     [..., H, D]
    cos, sin  [..., D]   rows of the rope table for these positions; both halves are equal
    Returns [..., H, D].
    """
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return heads * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)


def norm_rope_ref(heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise each query or key head, then rotate it.

    heads     [T, H, D]   D even
    weight    [D], or [H, D] with one norm per head; None for no norm
    cos, sin  [T, D]
    Returns [T, H, D].
    """
    return rope_ref(heads if weight is None else rms_norm_ref(heads, weight, eps), cos, sin)


@jit
def wide_sum(parts, offsets, is_element, part_stride, NUM_PARTS: tl.constexpr):
    """Add up elements of parts in order, in float32.

    A kernel must let the compiler know whether 16 divides `part_stride`: otherwise each element is a load of its own.
    """
    stride = tl.cast(part_stride, tl.int64)
    total = tl.load(parts + offsets, mask=is_element, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(parts + part * stride + offsets, mask=is_element, other=0.0).to(tl.float32)
    return total


@jit
def sum_parts(parts, offsets, is_element, part_stride, NUM_PARTS: tl.constexpr, dtype: tl.constexpr):
    """Add up elements of parts in order, and round to the model's dtype once, as for an uncut product."""
    return wide_sum(parts, offsets, is_element, part_stride, NUM_PARTS).to(dtype)


@jit
def normalised_row(
    hidden, residual, weight, total, room, addresses, counts, row, hidden_row, residual_row, part_stride, eps,
    dtype: tl.constexpr, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NUM_PARTS: tl.constexpr, RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Return a normalised row of the summed parts [TILE] in the model's dtype; with a residual, store the sum."""
    dim = tl.arange(0, TILE)
    is_dim = dim < WIDTH
    # Load the weights before the sums, so that all loads wait for memory at the same time.
    weights = tl.load(weight + dim, mask=is_dim, other=0.0).to(tl.float32)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    if HAS_RESIDUAL:
        stream = tl.load(residual + row * residual_row + dim, mask=is_dim, other=0.0).to(tl.float32)
    wide = wide_sum(hidden, row * hidden_row + dim, is_dim, part_stride, NUM_PARTS)
    if NUM_RANKS > 1:
        wide = sum_of_ranks(wide, room, addresses, counts, row, dim, is_dim, RANK, NUM_RANKS, LENGTH, WIDTH)
    wide = wide.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        wide = (wide + stream).to(dtype).to(tl.float32)
        tl.store(total + row * WIDTH + dim, wide.to(dtype), mask=is_dim)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    return ((wide * scale).to(weight.dtype.element_ty).to(tl.float32) * weights).to(dtype)


@jit
def _rms_norm_kernel(
    hidden, residual, weight, normed, total, room, addresses, counts, hidden_row, residual_row, part_stride, eps,
    WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NUM_PARTS: tl.constexpr, RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, TILE)
    found = normalised_row(
        hidden, residual, weight, total, room, addresses, counts, row, hidden_row, residual_row, part_stride, eps,
        normed.dtype.element_ty, WIDTH, HAS_RESIDUAL, NUM_PARTS, RANK, NUM_RANKS, LENGTH, TILE, IS_EARLY,
    )  # fmt: skip
    tl.store(normed + row * WIDTH + dim, found, mask=dim < WIDTH)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm_ref` in one launch, one program per row."""
    rows = _rows(hidden)
    return _launch_norm(rows[None], None, weight, eps, hidden.dtype)[0].view(hidden.shape)


def sum_rms_norm(parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute `sum_rms_norm_ref` in one launch, one program per row."""
    require(parts.stride(2) == 1, "parts", "contiguous rows")
    return _launch_norm(parts, None, weight, eps, dtype)[0]


def add_rms_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm_ref` in one launch, one program per row."""
    return add_rms_norm_of_ranks(parts, residual, weight, eps, None)


def add_rms_norm_of_ranks(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, rooms: Rooms | None
) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm_ref` with the parts of all ranks, through `rooms`. The sum over ranks is rounded once."""
    require(parts.shape[1:] == residual.shape, "residual", "the shape of one part")
    require(residual.stride(1) == 1 and parts.stride(2) == 1, "parts, residual", "contiguous rows")
    return _launch_norm(parts, residual, weight, eps, residual.dtype, rooms)


def _launch_norm(
    parts: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, rooms: Rooms | None = None
) -> tuple[Tensor, Tensor]:
    """Return the normalised sum and the sum of parts [P, T, D], [T, D] each, in a dtype."""
    others = parts[0] if residual is None else residual
    check_tensors(parts, weight, others)
    num_parts, num_rows, width = parts.shape
    normed = torch.empty((num_rows, width), dtype=dtype, device=parts.device)
    check_dtypes(normed, *(() if residual is None else (residual,)))
    check_weight(weight, dtype)
    check_parts(parts, dtype)
    require(weight.shape == (width,), "weight", "one element per column")
    message, sources = (parts, parts, parts), {"RANK": 0, "NUM_RANKS": 1, "LENGTH": 0}
    if rooms is not None:
        require(rooms.takes(num_rows, width), "rooms", "room for a number of each column")
        message = (rooms.own, rooms.addresses, rooms.counts)
        sources = {"RANK": rooms.rank, "NUM_RANKS": rooms.num_ranks, "LENGTH": rooms.own.shape[2]}
    total = normed if residual is None else torch.empty_like(normed)
    if num_rows:
        tile = power_of_2(width)
        _rms_norm_kernel[(num_rows,)](
            parts, others, weight.contiguous(), normed, total, *message,
            parts.stride(1), others.stride(0), parts.stride(0), eps,
            WIDTH=width, HAS_RESIDUAL=residual is not None, NUM_PARTS=num_parts, **sources, TILE=tile,
            num_warps=warps_for(tile), enable_fp_fusion=False, **early(parts.device),
        )  # fmt: skip
    return normed, total


def check_weight(weight: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless the weight of a norm is float32 or has the model's dtype."""
    if weight.dtype not in (dtype, torch.float32):
        raise TypeError(f"weight: expected float32 or {dtype}, found {weight.dtype}")


def check_parts(parts: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless parts are float32 or have the model's dtype."""
    if parts.dtype not in (dtype, torch.float32):
        raise TypeError(f"parts: expected float32 or {dtype}, found {parts.dtype}")


def _rows(hidden: Tensor) -> Tensor:
    """Return [..., D] as [T, D] with contiguous rows. Copies only if a view is impossible."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@jit
def rotate_half_tiles(first, second, cos_first, cos_second, sin_first, sin_second):
    """Return both halves of rotated heads, rounded like `rope_ref`. All arguments have the model's dtype."""
    dtype = first.dtype
    first_cos = (first.to(tl.float32) * cos_first.to(tl.float32)).to(dtype).to(tl.float32)
    first_sin = (first.to(tl.float32) * sin_second.to(tl.float32)).to(dtype).to(tl.float32)
    second_cos = (second.to(tl.float32) * cos_second.to(tl.float32)).to(dtype).to(tl.float32)
    second_sin = (second.to(tl.float32) * sin_first.to(tl.float32)).to(dtype).to(tl.float32)
    return (first_cos - second_sin).to(dtype), (second_cos + first_sin).to(dtype)


@jit
def norm_half_tiles(first, second, weight_first, weight_second, eps, HEAD_DIM: tl.constexpr):
    """Return both halves [heads, half] of RMS-normalised heads, rounded like `rms_norm_ref`.

    Weights are [heads, half], or [1, half] for all heads.
    """
    dtype = first.dtype
    norm_dtype = weight_first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    wide_first = (wide_first * scale).to(norm_dtype).to(tl.float32) * weight_first.to(tl.float32)
    wide_second = (wide_second * scale).to(norm_dtype).to(tl.float32) * weight_second.to(tl.float32)
    return wide_first.to(dtype), wide_second.to(dtype)
