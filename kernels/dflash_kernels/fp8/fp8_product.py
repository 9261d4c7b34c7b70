"""Products of rows with weights in FP8. Weights stay FP8 in memory, and tensor cores multiply them in FP8.

Activations are rounded as the format of the weight says (`fp8_weight.py`). Each step of the inner sum covers columns
with one scale. Its sum is multiplied by both scales and added in float32, because tensor cores sum FP8 in few bits.

- Rows may come rounded from the norm before (`fp8_norm.py`).
- For few other rows, each program rounds the activations that it reads. This saves a launch.
- GPUs without products in FP8, and the interpreter, multiply the same numbers in the dtype of the activations. They
  read weights as bytes. The results are equal except for the order of sums.

Axis letters: T rows, K inner width, N columns, P parts, F width of a gated product, G groups of K.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.fp8.fp8_config import MIN_FP8_DEPTH, Fp8Shape, fp8_product_shape, has_fp8
from dflash_kernels.fp8.fp8_library import library_multiplies, library_product
from dflash_kernels.fp8.fp8_numbers import LARGEST, as_fp8, from_bytes
from dflash_kernels.fp8.fp8_weight import FP8, Fp8Weight, Rounded, Rows, plain_rows, rounded_ref
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.products.activation import gate_tiles, silu_mul, silu_mul_ref
from dflash_kernels.products.tile_loads import can_describe, describe

GROUP_ELEMENTS = 2048
"""Activations per program that rounds groups."""


def fp8_product_ref(hidden: Rows, weight: Fp8Weight) -> Tensor:
    """Return the product of rounded activations with a weight: [T, K], [N, K] -> [T, N] in the dtype of the rows."""
    rows = rounded_ref(hidden, weight)
    return functional.linear(rows, weight.dequantised(rows.dtype)).to(plain_rows(hidden).dtype)


def fp8_product_parts_ref(hidden: Rows, weight: Fp8Weight) -> Tensor:
    """Return `fp8_product_ref` as parts [P, T, N]; see `product_parts_ref`."""
    return fp8_product_ref(hidden, weight)[None]


def fp8_gated_product_ref(hidden: Rows, weight: Fp8Weight) -> Tensor:
    """Return silu(gate) * up of a product with gate rows, then up rows: [T, K], [2 F, K] -> [T, F]."""
    return silu_mul_ref(fp8_product_ref(hidden, weight))


PEAK_FLOOR = constexpr(1e-10)
"""`LEAST_PEAK` for kernels."""


@jit
def round_group(rows, dtype: tl.constexpr):
    """Round each row of a tile with its own scale: rows in `dtype`, and scales [TILE_R]."""
    wide = rows.to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(wide), 1), PEAK_FLOOR)
    largest = tl.zeros_like(peak) + LARGEST
    return as_fp8(wide * tl.div_rn(largest, peak)[:, None], dtype), tl.div_rn(peak, largest)


@jit(do_not_specialize=["num_rows"])
def _round_rows_kernel(
    hidden, rounded, scales, fixed, num_rows, hidden_row,
    DEPTH: tl.constexpr, LENGTH: tl.constexpr, IS_FIXED: tl.constexpr, TILE_G: tl.constexpr, TILE_L: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    group, inner = tl.program_id(1) * TILE_G + tl.arange(0, TILE_G), tl.arange(0, TILE_L)
    column = group[:, None] * LENGTH + inner[None, :]
    is_element = (inner < LENGTH)[None, :] & (column < DEPTH)
    numbers = tl.load(hidden + row * hidden_row + column, mask=is_element, other=0.0)
    dtype = rounded.dtype.element_ty
    if IS_FIXED:
        found = as_fp8(numbers.to(tl.float32) * tl.div_rn(1.0, tl.load(fixed)), dtype)
    else:
        found, scale = round_group(numbers, dtype)
        tl.store(scales + group.to(tl.int64) * num_rows + row, scale, mask=group * LENGTH < DEPTH)
    tl.store(rounded + row * DEPTH + column, found, mask=is_element)


def round_rows(hidden: Tensor, weight: Fp8Weight) -> Rounded:
    """Compute `round_rows_ref` in one launch."""
    check_tensors(hidden, weight.values)
    check_dtypes(hidden)
    num_rows, depth = hidden.shape
    require(weight.rounding != "none", "weight", "rounded activations")
    require(hidden.stride(1) == 1, "hidden", "contiguous rows")
    length = weight.block[1] if weight.has_groups else depth
    count, fixed = ceil_div(depth, length), weight.input_scale
    rounded = torch.empty((num_rows, depth), dtype=rows_dtype(weight, hidden.dtype), device=hidden.device)
    scales = torch.empty((count, num_rows), dtype=torch.float32, device=hidden.device) if fixed is None else fixed
    padded = power_of_2(length)
    tile = min(power_of_2(count), max(GROUP_ELEMENTS // padded, 1))
    if num_rows:
        _round_rows_kernel[(num_rows, ceil_div(count, tile))](
            hidden, rounded, scales, scales, num_rows, hidden.stride(0),
            DEPTH=depth, LENGTH=length, IS_FIXED=fixed is not None, TILE_G=tile, TILE_L=padded,
            num_warps=min(max(tile * padded // 512, 1), 16), enable_fp_fusion=False, **early(hidden.device),
        )  # fmt: skip
    return Rounded(rounded, scales if fixed is None else fixed.view(1, 1), hidden)


def rows_dtype(weight: Fp8Weight, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of rounded rows for a product with the weight. `dtype` is the model's."""
    return FP8 if uses_fp8(weight) else dtype


def uses_fp8(weight: Fp8Weight) -> bool:
    """Return whether tensor cores multiply this weight in FP8."""
    return weight.rounding != "none" and weight.block[1] >= MIN_FP8_DEPTH and has_fp8(weight.device)


@jit
def pick(values, index, wanted):
    """Return the value of the values [n] whose index is `wanted`."""
    return tl.sum(tl.where(index == wanted, values, 0.0), 0)


@jit
def block_scales(
    scales, first_tile, row,
    NUM_TILES: tl.constexpr, TILE_K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SCALES: tl.constexpr,
):  # fmt: skip
    """Return the scales of one row of blocks for tiles from `first_tile` on, and their indices."""
    tile = tl.arange(0, NUM_TILES)
    column = (first_tile + tile) * TILE_K // BLOCK_K
    return tl.load(scales + row * NUM_SCALES + column, mask=column < NUM_SCALES, other=0.0), tile


@jit
def fixed_scale(row_scales, ROUNDING: tl.constexpr):
    """Return the fixed scale of activations, or 1 if they have other scales."""
    return tl.load(row_scales) if ROUNDING == "static" or ROUNDING == "fixed" else 1.0


@jit
def scales_of_rows(
    row_scales, first, row, num_rows, is_row, fixed, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SCALES: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Return the scales of rows [TILE_R] from the column `first` on, or the fixed scale if steps have none."""
    if ROUNDING == "before" and NUM_SCALES > 1:
        found = tl.load(row_scales + first // BLOCK_K * num_rows + row, mask=is_row & (first < DEPTH), other=0.0)
    else:
        found = fixed
    return found


@jit
def round_tile(rows, row_scale, fixed, ROUNDING: tl.constexpr, dtype: tl.constexpr):
    """Return a tile of activations in `dtype` and its scales, which are other ones if the tile gets rounded here."""
    if ROUNDING == "group":
        rows, row_scale = round_group(rows, dtype)
    elif ROUNDING == "static":
        rows = as_fp8(rows.to(tl.float32) * tl.div_rn(1.0, fixed), dtype)
    return rows, row_scale


@jit
def load_once(weight_tile, is_weight):
    """Load a tile of a weight. Each weight is read once per step, so it should not displace other data in the cache."""
    return tl.load(weight_tile, mask=is_weight, other=0.0, eviction_policy="evict_first")


@jit
def _weight_tile(weight, first_row, first, offsets, is_weight, HAS_DESCRIPTORS: tl.constexpr):
    """Load the tile of a weight from a row and column on. `weight` is a descriptor, or a pointer for `offsets`."""
    return weight.load([first_row, first]) if HAS_DESCRIPTORS else load_once(weight + offsets + first, is_weight)


@jit
def product_step(loaded, turned, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """Multiply a tile of a weight with turned activations [TILE_K, TILE_R]: float32 [TILE_C, TILE_R]."""
    numbers = loaded if IS_FP8 else from_bytes(loaded).to(dtype)
    return tl.dot(numbers, turned, input_precision="ieee")


@jit
def scaled_step(
    part, scales, row_scale, even_scales, tiles, tile, scale_row, group, is_column,
    NUM_SCALES: tl.constexpr, IS_EVEN: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Multiply one step of the inner sum with its scales, if steps have scales."""
    if NUM_SCALES > 1:
        if IS_EVEN:
            part *= pick(even_scales, tiles, tile)
        else:
            mask = is_column & (group < NUM_SCALES)
            part *= tl.load(scales + scale_row * NUM_SCALES + group, mask=mask, other=0.0)[:, None]
        if ROUNDING == "group" or ROUNDING == "before":
            part *= row_scale[None, :]
    return part


@jit
def scaled_sum(
    acc, scales, scale_row, is_column, row_scales, place, is_row, fixed,
    NUM_SCALES: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Multiply a whole sum with the scales that all of its steps share."""
    if NUM_SCALES == 1:
        acc *= tl.load(scales + scale_row, mask=is_column, other=0.0)[:, None]
        if ROUNDING == "before":
            acc *= tl.load(row_scales + place, mask=is_row, other=0.0)[None, :]
    return acc * fixed


@jit(do_not_specialize=["num_rows"])
def _fp8_product_kernel(
    hidden, row_scales, weight, scales, out, num_rows, hidden_row,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, NUM_PARTS: tl.constexpr, HAS_PARTS: tl.constexpr,
    IS_GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SCALES: tl.constexpr,
    ROUNDING: tl.constexpr, IS_FP8: tl.constexpr, HAS_DESCRIPTORS: tl.constexpr, PADDED_TILES: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    first_row, first_column, part = tl.program_id(0) * TILE_R, tl.program_id(1) * TILE_C, tl.program_id(2)
    row, column, inner = first_row + tl.arange(0, TILE_R), first_column + tl.arange(0, TILE_C), tl.arange(0, TILE_K)
    is_row, is_column = row < num_rows, column < NUM_COLUMNS
    NUM_TILES: tl.constexpr = ((DEPTH + TILE_K - 1) // TILE_K + NUM_PARTS - 1) // NUM_PARTS
    # A tile with one scale per step picks it from registers. The scales are read before the wait: nothing writes them.
    IS_EVEN: tl.constexpr = BLOCK_N % TILE_C == 0 and (not IS_GATED or NUM_COLUMNS % BLOCK_N == 0)
    gate_scales, tiles = block_scales(
        scales, part * NUM_TILES, first_column // BLOCK_N, PADDED_TILES, TILE_K, BLOCK_K, NUM_SCALES
    )
    up_scales, up_column = gate_scales, column
    if IS_GATED:
        up_column = column + NUM_COLUMNS
        up_scales, _ = block_scales(
            scales, part * NUM_TILES, (first_column + NUM_COLUMNS) // BLOCK_N, PADDED_TILES, TILE_K, BLOCK_K, NUM_SCALES
        )
    wait_for_launches_before(IS_EARLY)
    if HAS_PARTS:
        let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    hidden_tile = hidden + row[:, None].to(tl.int64) * hidden_row + inner[None, :]
    offsets = column[:, None].to(tl.int64) * DEPTH + inner[None, :]
    dtype: tl.constexpr = tl.float8e4nv if IS_FP8 else hidden.dtype.element_ty
    acc, up = tl.zeros((TILE_C, TILE_R), tl.float32), tl.zeros((TILE_C, TILE_R), tl.float32)
    fixed = fixed_scale(row_scales, ROUNDING)
    # Scales of rows are read one step ahead, so that no step waits for them.
    begin = part * NUM_TILES * TILE_K
    ahead = scales_of_rows(row_scales, begin, row, num_rows, is_row, fixed, DEPTH, BLOCK_K, NUM_SCALES, ROUNDING)
    for tile in range(NUM_TILES):
        first = begin + tile * TILE_K
        group, is_row_element, is_weight = first // BLOCK_K, is_row[:, None], is_column[:, None]
        if NUM_TILES * NUM_PARTS * TILE_K != DEPTH:
            is_row_element = is_row_element & (first + inner < DEPTH)[None, :]
            is_weight = is_weight & (first + inner < DEPTH)[None, :]
        rows = tl.load(hidden_tile + first, mask=is_row_element, other=0.0)
        rows, row_scale = round_tile(rows, ahead, fixed, ROUNDING, dtype)
        ahead = scales_of_rows(
            row_scales, first + TILE_K, row, num_rows, is_row, fixed, DEPTH, BLOCK_K, NUM_SCALES, ROUNDING
        )
        turned = tl.trans(rows)
        loaded = _weight_tile(weight, first_column, first, offsets, is_weight, HAS_DESCRIPTORS)
        acc += scaled_step(
            product_step(loaded, turned, IS_FP8, dtype),
            scales, row_scale, gate_scales, tiles, tile, column // BLOCK_N, group, is_column,
            NUM_SCALES, IS_EVEN, ROUNDING,
        )  # fmt: skip
        if IS_GATED:
            loaded = _weight_tile(
                weight, first_column + NUM_COLUMNS, first, offsets + NUM_COLUMNS * DEPTH, is_weight, HAS_DESCRIPTORS
            )
            up += scaled_step(
                product_step(loaded, turned, IS_FP8, dtype),
                scales, row_scale, up_scales, tiles, tile, up_column // BLOCK_N, group, is_column,
                NUM_SCALES, IS_EVEN, ROUNDING,
            )  # fmt: skip
    acc = scaled_sum(
        acc, scales, column // BLOCK_N, is_column, row_scales, row, is_row, fixed, NUM_SCALES, ROUNDING
    )  # fmt: skip
    if IS_GATED:
        up = scaled_sum(
            up, scales, up_column // BLOCK_N, is_column, row_scales, row, is_row, fixed, NUM_SCALES, ROUNDING
        )  # fmt: skip
        acc = gate_tiles(acc.to(out.dtype.element_ty), up.to(out.dtype.element_ty)).to(tl.float32)
    place = (part.to(tl.int64) * num_rows + row[None, :]) * NUM_COLUMNS + column[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def fp8_product(hidden: Rows, weight: Fp8Weight) -> Tensor:
    """Compute `fp8_product_ref`, by a library if it is faster."""
    if _is_for_library(hidden, weight):
        return library_product(_rounded_by_launch(hidden, weight), weight)
    return launch_product(hidden, weight, _shape_of(hidden, weight))[0]


def fp8_product_parts(hidden: Rows, weight: Fp8Weight) -> Tensor:
    """Compute `fp8_product_parts_ref`, with enough parts to fill the device, or in one part by a library."""
    if _is_for_library(hidden, weight):
        return fp8_product(hidden, weight)[None]
    return launch_product(hidden, weight, _shape_of(hidden, weight, has_parts=True), has_parts=True)


def fp8_gated_product(hidden: Rows, weight: Fp8Weight) -> Tensor:
    """Compute `fp8_gated_product_ref`, in two launches if a library is faster."""
    if _is_for_library(hidden, weight):
        return silu_mul(fp8_product(hidden, weight))
    return launch_product(hidden, weight, _shape_of(hidden, weight, is_gated=True), is_gated=True)[0]


def _is_for_library(hidden: Rows, weight: Fp8Weight) -> bool:
    return uses_fp8(weight) and library_multiplies(plain_rows(hidden), weight)


def _rounded_by_launch(hidden: Rows, weight: Fp8Weight) -> Rounded:
    return hidden if isinstance(hidden, Rounded) else round_rows(hidden, weight)


def _shape_of(hidden: Rows, weight: Fp8Weight, *, has_parts: bool = False, is_gated: bool = False) -> Fp8Shape:
    num_columns, plain = len(weight) // 2 if is_gated else len(weight), plain_rows(hidden)
    return fp8_product_shape(
        len(plain), num_columns, plain.shape[1], weight.block[1], plain.element_size(), plain.device,
        has_parts=has_parts, is_gated=is_gated, is_rounded=isinstance(hidden, Rounded),
    )  # fmt: skip


def launch_product(
    hidden: Rows, weight: Fp8Weight, shape: Fp8Shape, *, has_parts: bool = False, is_gated: bool = False
) -> Tensor:
    """Launch the kernel, after a launch that rounds the rows if nothing did. Returns [P, T, N], or [1, T, F]."""
    plain = plain_rows(hidden)
    check_tensors(plain, weight.values, weight.scales)
    check_dtypes(plain)
    num_rows, depth = plain.shape
    require(weight.values.dim() == 2 and weight.shape[1] == depth, "weight", "as many columns as `hidden`")
    require(weight.values.is_contiguous() and weight.scales.is_contiguous(), "weight", "contiguous memory")
    require(plain.stride(1) == 1, "hidden", "contiguous rows")
    require(not is_gated or len(weight) % 2 == 0, "weight", "equally many gate rows and up rows")
    num_columns = len(weight) // 2 if is_gated else len(weight)
    # Parts have the model's dtype: rounding them loses as much as rounding their sum does, and FP8 loses far more.
    out = torch.empty((shape.num_parts, num_rows, num_columns), dtype=plain.dtype, device=plain.device)
    if not num_rows:
        return out.zero_()
    rounding, (rows, row_scales, _) = _rounded(hidden, weight, shape)
    is_fp8, num_tiles = uses_fp8(weight), ceil_div(ceil_div(depth, shape.depth), shape.num_parts)
    (height, width), num_scales = weight.block, weight.scales.shape[1]
    values = weight.values if is_fp8 else weight.values.view(torch.uint8)
    has_descriptors = shape.has_descriptors and can_describe(values)
    _fp8_product_kernel[(ceil_div(num_rows, shape.rows), ceil_div(num_columns, shape.columns), shape.num_parts)](
        rows, row_scales, describe(values, shape.columns, shape.depth) if has_descriptors else values, weight.scales,
        out, num_rows, rows.stride(0), NUM_COLUMNS=num_columns, DEPTH=depth, NUM_PARTS=shape.num_parts,
        HAS_PARTS=has_parts, IS_GATED=is_gated, BLOCK_N=height, BLOCK_K=width, NUM_SCALES=num_scales,
        ROUNDING=rounding, IS_FP8=is_fp8, HAS_DESCRIPTORS=has_descriptors, PADDED_TILES=power_of_2(num_tiles),
        TILE_R=shape.rows, TILE_C=shape.columns, TILE_K=shape.depth,
        num_warps=shape.num_warps, num_stages=shape.num_stages, enable_fp_fusion=False, **early(plain.device),
    )  # fmt: skip
    return out


def _rounded(hidden: Rows, weight: Fp8Weight, shape: Fp8Shape) -> tuple[str, Rounded]:
    """Return how the kernel gets rounded rows, the rows it reads, and their scales."""
    if isinstance(hidden, Rounded):
        num_scales = weight.scales.shape[1] if weight.rounding == "dynamic" else 1
        is_for_weight = weight.rounding != "none" and len(hidden.scales) == num_scales and hidden.scales.is_contiguous()
        require(is_for_weight, "hidden", "rows rounded for the weight")
    else:
        if weight.rounding == "none":
            return "none", Rounded(hidden, weight.scales, hidden)
        if shape.rounds_in_place and weight.input_scale is not None:
            return "static", Rounded(hidden, weight.input_scale, hidden)
        if shape.rounds_in_place and weight.has_groups and weight.block[1] == shape.depth:
            return "group", Rounded(hidden, weight.scales, hidden)
    return ("before" if weight.input_scale is None else "fixed"), _rounded_by_launch(hidden, weight)
