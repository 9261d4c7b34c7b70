"""The norm before a product in FP8. It rounds its rows as the product would, so the product reads a byte per number.

Axis letters: T rows, D width, P parts, G groups of D.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early
from dflash_kernels.fp8.fp8_numbers import as_fp8
from dflash_kernels.fp8.fp8_product import round_group, rows_dtype
from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rounded, round_rows_ref
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl, warps_for
from dflash_kernels.norms.rope_norm import add_rms_norm_ref, check_parts, check_weight, normalised_row


def add_round_norm_ref(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Fp8Weight
) -> tuple[Rounded, Tensor]:
    """Return `add_rms_norm_ref`, with the normalised rows also rounded for a product with `reader` [N, D]."""
    normed, total = add_rms_norm_ref(parts, residual, weight, eps)
    return round_rows_ref(normed, reader), total


@jit(do_not_specialize=["num_rows"])
def _round_norm_kernel(
    parts, residual, weight, fixed, normed, total, rounded, scales, num_rows, parts_row, residual_row, part_stride,
    eps, WIDTH: tl.constexpr, LENGTH: tl.constexpr, IS_FIXED: tl.constexpr, NUM_PARTS: tl.constexpr,
    TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, TILE)
    is_dim = dim < WIDTH
    found = normalised_row(
        parts, residual, weight, total, parts, parts, parts, row, parts_row, residual_row, part_stride, eps,
        normed.dtype.element_ty, WIDTH, True, NUM_PARTS, 0, 1, 0, TILE, IS_EARLY,
    )  # fmt: skip
    tl.store(normed + row * WIDTH + dim, found, mask=is_dim)
    dtype: tl.constexpr = rounded.dtype.element_ty
    if IS_FIXED:
        tl.store(
            rounded + row * WIDTH + dim, as_fp8(found.to(tl.float32) * tl.div_rn(1.0, tl.load(fixed)), dtype), is_dim
        )
    else:
        NUM_GROUPS: tl.constexpr = TILE // LENGTH
        groups, scale = round_group(tl.reshape(found, (NUM_GROUPS, LENGTH)), dtype)
        tl.store(rounded + row * WIDTH + dim, tl.reshape(groups, (TILE,)), mask=is_dim)
        group = tl.arange(0, NUM_GROUPS)
        tl.store(scales + group.to(tl.int64) * num_rows + row, scale, mask=group * LENGTH < WIDTH)


def add_round_norm(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Fp8Weight
) -> tuple[Rounded, Tensor]:
    """Compute `add_round_norm_ref` in one launch, one program per row."""
    check_tensors(parts, residual, weight, reader.values)
    check_dtypes(residual)
    check_weight(weight, residual.dtype)
    check_parts(parts, residual.dtype)
    require(reader.rounding != "none", "reader", "rounded activations")
    require(parts.shape[1:] == residual.shape, "residual", "the shape of one part")
    require(residual.stride(1) == 1 and parts.stride(2) == 1, "parts, residual", "contiguous rows")
    num_parts, num_rows, width = parts.shape
    require(weight.shape == (width,), "weight", "one element per column")
    require(reader.shape[-1] == width, "reader", "one column per element of a row")
    normed, total = (torch.empty((num_rows, width), dtype=residual.dtype, device=parts.device) for _ in range(2))
    rounded = torch.empty((num_rows, width), dtype=rows_dtype(reader, residual.dtype), device=parts.device)
    tile, fixed = power_of_2(width), reader.input_scale
    length = reader.block[1] if reader.has_groups else tile
    scales = fixed
    if scales is None:
        scales = torch.empty((ceil_div(width, length), num_rows), dtype=torch.float32, device=parts.device)
    if num_rows:
        _round_norm_kernel[(num_rows,)](
            parts, residual, weight.contiguous(), scales, normed, total, rounded, scales, num_rows, parts.stride(1),
            residual.stride(0), parts.stride(0), eps, WIDTH=width, LENGTH=length, IS_FIXED=fixed is not None,
            NUM_PARTS=num_parts, TILE=tile, num_warps=warps_for(tile), enable_fp_fusion=False, **early(parts.device),
        )  # fmt: skip
    return Rounded(rounded, scales if fixed is None else fixed.view(1, 1), normed), total
