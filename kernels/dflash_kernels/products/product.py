"""Products of few rows with a weight, as in decode steps: read the weight once, at the speed of memory.

Libraries are made for many rows. With 16 to 128 rows, a product takes as long as reading its weight. Libraries lose
time when a product does not fill the device, and in extra passes that add up partial sums or apply the gate. Here:

- The kernel cuts a long sum into parts (split-K). The next norm adds up the parts while it reads them.
- One program computes both products of a feed-forward layer and applies the gate.
- From 33 rows on, descriptors load the tiles. This leaves more of the multiprocessor to the tensor cores.
- One row needs no tensor cores (`row_product.py`).

`product_config.py` decides which products torch computes instead. The weight is the side of the tile that tensor cores
read from shared memory, so that few rows do not leave them idle.

Axis letters: T rows, K inner width, N columns, P parts, F width of a gated product.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import IS_INTERPRETED, ceil_div, check_dtypes, check_tensors, jit, require, tl
from dflash_kernels.products.activation import SILU, Gate, gate_options, gate_ref, joined_tiles, silu_mul
from dflash_kernels.products.many_rows import cut_of_head, cut_of_many_rows, gate_many_rows, multiply_many_rows
from dflash_kernels.products.product_config import MAX_PRODUCT_ROWS, ProductShape, product_shape
from dflash_kernels.products.row_product import cut_of_row, row_product
from dflash_kernels.products.tile_loads import can_describe, describe


def product_ref(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `hidden @ weight.T + bias`: [T, K], [N, K], [N] -> [T, N]."""
    return functional.linear(hidden, weight, bias)


def product_parts_ref(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `product_ref` as parts [P, T, N] that the caller must add up and round to the model's dtype.

    Each implementation decides the number of parts and their dtype: float32 or the model's dtype.
    """
    return functional.linear(hidden, weight, bias)[None]


def gated_product_ref(hidden: Tensor, weight: Tensor, gate: Gate = SILU) -> Tensor:
    """Return the gate of a product with gate rows, then up rows: [T, K], [2 F, K] -> [T, F]."""
    return gate_ref(functional.linear(hidden, weight), gate)


@jit(do_not_specialize=["num_rows"])
def _product_kernel(
    hidden, weight, bias, out, num_rows, hidden_row,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, NUM_PARTS: tl.constexpr, HAS_PARTS: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_DESCRIPTORS: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    if HAS_PARTS:
        let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    # Programs with the same weight tile have adjacent ids, so they run together.
    first_row, first_column, part = tl.program_id(0) * TILE_R, tl.program_id(1) * TILE_C, tl.program_id(2)
    row = first_row + tl.arange(0, TILE_R)
    column = first_column + tl.arange(0, TILE_C)
    inner = tl.arange(0, TILE_K)
    is_row, is_column = row < num_rows, column < NUM_COLUMNS
    if not HAS_DESCRIPTORS:
        hidden_tile = hidden + row[:, None].to(tl.int64) * hidden_row + inner[None, :]
        weight_tile = weight + column[:, None].to(tl.int64) * DEPTH + inner[None, :]
    acc = tl.zeros((TILE_C, TILE_R), tl.float32)
    up = tl.zeros((TILE_C, TILE_R), tl.float32)
    # Equal numbers of tiles per part, known to the compiler. Tiles of the last part after the end are zeros.
    NUM_TILES: tl.constexpr = ((DEPTH + TILE_K - 1) // TILE_K + NUM_PARTS - 1) // NUM_PARTS
    for tile in range(NUM_TILES):
        first = (part * NUM_TILES + tile) * TILE_K
        if HAS_DESCRIPTORS:
            rows, loaded = hidden.load([first_row, first]), weight.load([first_column, first])
        else:
            is_row_element, is_weight = is_row[:, None], is_column[:, None]
            if NUM_TILES * NUM_PARTS * TILE_K != DEPTH:
                is_row_element = is_row_element & (first + inner < DEPTH)[None, :]
                is_weight = is_weight & (first + inner < DEPTH)[None, :]
            rows = tl.load(hidden_tile + first, mask=is_row_element, other=0.0)
            # Each weight is read once per step, so it should not displace other data in the cache.
            loaded = tl.load(weight_tile + first, mask=is_weight, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(loaded, tl.trans(rows), acc, input_precision="ieee")
        if IS_GATED:
            if HAS_DESCRIPTORS:
                loaded = weight.load([first_column + NUM_COLUMNS, first])
            else:
                loaded = tl.load(
                    weight_tile + first + NUM_COLUMNS * DEPTH, mask=is_weight, other=0.0, eviction_policy="evict_first"
                )
            up = tl.dot(loaded, tl.trans(rows), up, input_precision="ieee")
    if IS_GATED:
        dtype = out.dtype.element_ty
        acc = joined_tiles(acc.to(dtype), up.to(dtype), KIND, ALPHA, LIMIT).to(tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + column, mask=is_column & (part == 0), other=0.0)
        acc += added.to(tl.float32)[:, None]
    place = (part.to(tl.int64) * num_rows + row[None, :]) * NUM_COLUMNS + column[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `product_ref` in one launch."""
    shape = _shape_of(hidden, weight)
    if shape is not None:
        return _launch(hidden, weight, shape, bias=bias)[0]
    cut = cut_of_head(hidden, weight) if bias is None and hidden.dim() == 2 else None
    return functional.linear(hidden, weight, bias) if cut is None else multiply_many_rows(hidden, weight, cut)


def product_parts(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `product_parts_ref` in one launch, with enough parts to fill the device. The first part has the bias."""
    cut = cut_of_row(hidden, weight)
    if cut is not None:
        return row_product(hidden, weight, cut, bias=bias)
    shape = _shape_of(hidden, weight, has_parts=True)
    if shape is None:
        return functional.linear(hidden, weight, bias)[None]
    return _launch(hidden, weight, shape, bias=bias, has_parts=True)


def gated_product(hidden: Tensor, weight: Tensor, gate: Gate = SILU) -> Tensor:
    """Compute `gated_product_ref` in one launch, or in two if a library is faster."""
    row = cut_of_row(hidden, weight, is_gated=True)
    if row is not None:
        return row_product(hidden, weight, row, gate=gate, lets_next_begin=False)[0]
    shape = _shape_of(hidden, weight, is_gated=True)
    if shape is None:
        cut = cut_of_many_rows(hidden, weight)
        if cut is not None:
            return gate_many_rows(hidden, weight, cut, gate)
        return silu_mul(functional.linear(hidden, weight), gate)
    return _launch(hidden, weight, shape, gate=gate)[0]


def _shape_of(
    hidden: Tensor, weight: Tensor, *, has_parts: bool = False, is_gated: bool = False
) -> ProductShape | None:
    """Return the tiling of a product, or None if the library computes it.

    These kernels use no tensor cores for float32, so on a GPU the library computes float32. Tests use float32 in the
    interpreter.
    """
    itemsize = hidden.element_size()
    if hidden.dim() != 2 or not len(hidden) or not (itemsize == 2 or IS_INTERPRETED):
        return None
    num_columns = len(weight) // 2 if is_gated else len(weight)
    shape = product_shape(
        len(hidden), num_columns, hidden.shape[1], itemsize, hidden.device, has_parts=has_parts, is_gated=is_gated
    )
    if shape is None or not shape.has_descriptors or (can_describe(hidden) and can_describe(weight)):
        return shape
    return None if len(hidden) > MAX_PRODUCT_ROWS else replace(shape, has_descriptors=False)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    shape: ProductShape,
    *,
    bias: Tensor | None = None,
    has_parts: bool = False,
    gate: Gate | None = None,
) -> Tensor:
    """Launch the kernel once. Returns [P, T, N], or [1, T, F] with a gate."""
    biases, is_gated = () if bias is None else (bias,), gate is not None
    check_tensors(hidden, weight, *biases)
    check_dtypes(hidden, weight, *biases)
    num_rows, depth = hidden.shape
    require(weight.dim() == 2 and weight.shape[1] == depth, "weight", "as many columns as `hidden`")
    require(weight.is_contiguous() and hidden.stride(1) == 1, "hidden, weight", "contiguous rows")
    require(not is_gated or len(weight) % 2 == 0, "weight", "equally many gate rows and up rows")
    require(bias is None or bias.shape == (len(weight),), "bias", "one number per row of `weight`")
    num_columns = len(weight) // 2 if is_gated else len(weight)
    dtype = torch.float32 if shape.num_parts > 1 else hidden.dtype
    out = torch.empty((shape.num_parts, num_rows, num_columns), dtype=dtype, device=hidden.device)
    factors = (hidden, weight)
    if shape.has_descriptors:
        factors = (describe(hidden, shape.rows, shape.depth), describe(weight, shape.columns, shape.depth))
    _product_kernel[(ceil_div(num_rows, shape.rows), ceil_div(num_columns, shape.columns), shape.num_parts)](
        *factors, out if bias is None else bias.contiguous(), out, num_rows, hidden.stride(0),
        NUM_COLUMNS=num_columns, DEPTH=depth, NUM_PARTS=shape.num_parts, HAS_PARTS=has_parts,
        IS_GATED=is_gated, HAS_DESCRIPTORS=shape.has_descriptors, HAS_BIAS=bias is not None,
        TILE_R=shape.rows, TILE_C=shape.columns, TILE_K=shape.depth,
        num_warps=shape.num_warps, num_stages=shape.num_stages, enable_fp_fusion=False,
        **gate_options(gate or SILU), **early(hidden.device),
    )  # fmt: skip
    return out
