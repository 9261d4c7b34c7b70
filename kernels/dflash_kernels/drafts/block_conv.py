"""A short causal convolution along the rows of each block, with kernels that depend on the row (DFlash 2).

Row p of a block becomes the sum over s of `kernel[s] + dynamic[p, s]` times row p - s. A row before the block counts as
zero: nothing crosses into the context, into another block, or into another request. Sums are in float32 (float64 for
float64 models) and rounded once.
Source: z-lab/dflash 0.1.0 model.py, GroupedDynamicCausalConv.

Both kernels read products in parts and add them up, so no launch does only that. The convolution after a sublayer also
adds the residual and normalises the sum for the next sublayer.

Axis letters: P parts, T rows, N rows of a block, S taps of the kernel, H hidden width, G groups of columns.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl, warps_for
from dflash_kernels.launch_config import ELEMENT_TILE
from dflash_kernels.norms.rope_norm import add_rms_norm_ref, check_parts, sum_parts, sum_parts_ref


def block_conv_ref(hidden: Tensor, kernel: Tensor, dynamic: Tensor, num_rows: int) -> Tensor:
    """Convolve each block of `num_rows` rows.

    hidden   [T, H]         T is a multiple of `num_rows`
    kernel   [S, H]         the same for all rows
    dynamic  [P, T, S, G]   parts of a product that is added to the kernel of a row; each value is for H / G adjacent
                            columns
    Returns [T, H].
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    own = sum_parts_ref(dynamic, hidden.dtype)
    blocks = hidden.to(wide).unflatten(0, (-1, num_rows))  # [T / N, N, H]
    kernels = kernel.to(wide) + own.to(wide).repeat_interleave(hidden.shape[1] // own.shape[2], dim=2)
    kernels = kernels.unflatten(0, (-1, num_rows))  # [T / N, N, S, H]
    total = kernels[:, :, 0] * blocks
    for tap in range(1, min(len(kernel), num_rows)):
        total[:, tap:] += kernels[:, tap:, tap] * blocks[:, :-tap]
    convolved: Tensor = total.view_as(hidden).to(hidden.dtype)
    return convolved


def conv_add_norm_ref(
    parts: Tensor, kernel: Tensor, dynamic: Tensor, num_rows: int, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Convolve a sublayer's output, add it to the residual stream, and normalise the sum for the next sublayer.

    parts              [P, T, H]   the output, as returned by `product_parts_ref`
    kernel, dynamic    see `block_conv_ref`
    residual           [T, H]
    weight             [H]
    Returns the normalised sum and the sum, which is the new residual, both [T, H].
    """
    convolved = block_conv_ref(sum_parts_ref(parts, residual.dtype), kernel, dynamic, num_rows)
    return add_rms_norm_ref(convolved[None], residual, weight, eps)


@jit
def _convolved(
    hidden, kernel, dynamic, row, position, group, is_group, column, is_column,
    hidden_part, hidden_row, dynamic_part, dynamic_row, dynamic_tap,
    WIDTH: tl.constexpr, NUM_TAPS: tl.constexpr, HIDDEN_PARTS: tl.constexpr, DYNAMIC_PARTS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return columns [groups, columns of a group] of one convolved row in float32."""
    total = tl.zeros(column.shape, tl.float32)
    for tap in tl.static_range(NUM_TAPS):
        is_read = is_column & (position >= tap)
        value = sum_parts(hidden, (row - tap) * hidden_row + column, is_read, hidden_part, HIDDEN_PARTS, dtype)
        weight = tl.load(kernel + tap * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
        places = row * dynamic_row + tap * dynamic_tap + group
        own = sum_parts(dynamic, places, is_group, dynamic_part, DYNAMIC_PARTS, dtype).to(tl.float32)
        total += (weight + own[:, None]) * value.to(tl.float32)
    return total


@jit(do_not_specialize=["num_rows"])
def _block_conv_kernel(
    hidden, kernel, dynamic, out, num_rows, hidden_row, dynamic_part, dynamic_row, dynamic_tap,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_TAPS: tl.constexpr, DYNAMIC_PARTS: tl.constexpr,
    TILE_G: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row, position = tl.program_id(0).to(tl.int64), tl.program_id(0) % num_rows
    group, inner = tl.program_id(1) * TILE_G + tl.arange(0, TILE_G), tl.arange(0, TILE_C)
    column = group[:, None] * GROUP + inner[None, :]
    is_group = group * GROUP < WIDTH
    is_column = is_group[:, None] & (inner < GROUP)[None, :]
    dtype = out.dtype.element_ty
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    total = _convolved(
        hidden, kernel, dynamic, row, position, group, is_group, column, is_column,
        0, hidden_row, dynamic_part, dynamic_row, dynamic_tap, WIDTH, NUM_TAPS, 1, DYNAMIC_PARTS, dtype,
    )  # fmt: skip
    tl.store(out + row * WIDTH + column, total.to(dtype), mask=is_column)


@jit(do_not_specialize=["num_rows"])
def _conv_add_norm_kernel(
    parts, kernel, dynamic, residual, weight, normed, summed, num_rows, eps,
    part_stride, hidden_row, dynamic_part, dynamic_row, dynamic_tap, residual_row,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_TAPS: tl.constexpr, HIDDEN_PARTS: tl.constexpr,
    DYNAMIC_PARTS: tl.constexpr, TILE_G: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row, position = tl.program_id(0).to(tl.int64), tl.program_id(0) % num_rows
    group, inner = tl.arange(0, TILE_G), tl.arange(0, TILE_C)
    column = group[:, None] * GROUP + inner[None, :]
    is_group = group * GROUP < WIDTH
    is_column = is_group[:, None] & (inner < GROUP)[None, :]
    dtype = normed.dtype.element_ty
    # Load the weights before the sums, so that all loads wait for memory at the same time.
    weights = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    stream = tl.load(residual + row * residual_row + column, mask=is_column, other=0.0).to(tl.float32)
    total = _convolved(
        parts, kernel, dynamic, row, position, group, is_group, column, is_column,
        part_stride, hidden_row, dynamic_part, dynamic_row, dynamic_tap,
        WIDTH, NUM_TAPS, HIDDEN_PARTS, DYNAMIC_PARTS, dtype,
    )  # fmt: skip
    wide = (total.to(dtype).to(tl.float32) + stream).to(dtype).to(tl.float32)
    tl.store(summed + row * WIDTH + column, wide.to(dtype), mask=is_column)
    scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / WIDTH + eps)
    scaled = (wide * scale).to(dtype).to(tl.float32) * weights
    tl.store(normed + row * WIDTH + column, scaled.to(dtype), mask=is_column)


def block_conv(hidden: Tensor, kernel: Tensor, dynamic: Tensor, num_rows: int) -> Tensor:
    """Compute `block_conv_ref` in one launch."""
    _check(hidden[None], kernel, dynamic, num_rows)
    check_dtypes(hidden, kernel)
    count, width = hidden.shape
    out = torch.empty((count, width), dtype=hidden.dtype, device=hidden.device)
    if count:
        num_parts, _, num_taps, groups = dynamic.shape
        tile_c = power_of_2(width // groups)
        tile_g = max(1, min(ELEMENT_TILE // tile_c, power_of_2(groups)))
        _block_conv_kernel[(count, ceil_div(groups, tile_g))](
            hidden, kernel, dynamic, out, num_rows, hidden.stride(0), *dynamic.stride()[:3],
            WIDTH=width, GROUP=width // groups, NUM_TAPS=num_taps, DYNAMIC_PARTS=num_parts,
            TILE_G=tile_g, TILE_C=tile_c, enable_fp_fusion=False, **early(hidden.device),
        )  # fmt: skip
    return out


def conv_add_norm(
    parts: Tensor, kernel: Tensor, dynamic: Tensor, num_rows: int, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `conv_add_norm_ref` in one launch, one program per row."""
    _check(parts, kernel, dynamic, num_rows)
    check_tensors(parts, residual, weight)
    check_dtypes(kernel, residual, weight)
    check_parts(parts, kernel.dtype)
    hidden_parts, count, width = parts.shape
    require(residual.shape == (count, width) and residual.stride(1) == 1, "residual", "the shape of one part")
    require(weight.shape == (width,) and weight.is_contiguous(), "weight", "one element per column")
    normed, total = (torch.empty((count, width), dtype=kernel.dtype, device=parts.device) for _ in range(2))
    if count:
        num_parts, _, num_taps, groups = dynamic.shape
        tile_g, tile_c = power_of_2(groups), power_of_2(width // groups)
        _conv_add_norm_kernel[(count,)](
            parts, kernel, dynamic, residual, weight, normed, total, num_rows, eps,
            parts.stride(0), parts.stride(1), *dynamic.stride()[:3], residual.stride(0),
            WIDTH=width, GROUP=width // groups, NUM_TAPS=num_taps, HIDDEN_PARTS=hidden_parts, DYNAMIC_PARTS=num_parts,
            TILE_G=tile_g, TILE_C=tile_c, num_warps=warps_for(tile_g * tile_c), enable_fp_fusion=False,
            **early(parts.device),
        )  # fmt: skip
    return normed, total


def _check(parts: Tensor, kernel: Tensor, dynamic: Tensor, num_rows: int) -> None:
    """Check rows in parts [P, T, H] and their kernels."""
    check_tensors(parts, kernel, dynamic)
    check_dtypes(kernel)
    check_parts(dynamic, kernel.dtype)
    (_, count, width), (num_taps, groups) = parts.shape, dynamic.shape[2:]
    require(num_rows > 0 and count % num_rows == 0, "hidden", "whole blocks of rows")
    require(kernel.shape == (num_taps, width) and kernel.is_contiguous(), "kernel", "[taps, width], contiguous")
    require(dynamic.shape[1] == count and groups > 0 and width % groups == 0, "dynamic", "one row per row of hidden")
    require(parts.stride(2) == 1 and dynamic.stride(3) == 1, "hidden, dynamic", "contiguous rows")
