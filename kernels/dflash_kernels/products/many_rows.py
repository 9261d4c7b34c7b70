"""Products of many rows: gated ones, as in prefill, and the head's, as in steps of many requests.

A library multiplies many rows at full speed, but stores both products of a gate for a second launch that applies it.
Here one accumulator holds a tile of both products, and the gate is applied before it is stored. There is one program
per multiprocessor. Each program computes several tiles, so that loads of the next tile overlap with the current
product. For 480 to 512 rows of a head this is also faster than a library.

Axis letters: T rows, K inner width, N columns, F width of a gated product.
"""

from typing import Any

import torch
from torch import Tensor

from dflash_kernels.launch import TensorDescriptor, ceil_div, check_dtypes, check_tensors, jit, require, tl
from dflash_kernels.launch_config import num_multiprocessors
from dflash_kernels.products.activation import SILU, Gate, gate_options, joined_tiles
from dflash_kernels.products.product_config import ManyRowsShape, head_shape, many_rows_shape
from dflash_kernels.products.tile_loads import DESCRIPTOR_BYTES, can_describe, describe


@jit(do_not_specialize=["num_rows", "tiles_together"])
def _many_rows_kernel(
    hidden, weight, out, num_rows, tiles_together,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, NUM_PROGRAMS: tl.constexpr, IS_GATED: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    NUM_COLUMN_TILES: tl.constexpr = (WIDTH + TILE_C - 1) // TILE_C
    NUM_PRODUCTS: tl.constexpr = 2 if IS_GATED else 1
    num_row_tiles = (num_rows + TILE_R - 1) // TILE_R
    tiles_a_group = tiles_together * NUM_COLUMN_TILES
    for tile in tl.range(tl.program_id(0), num_row_tiles * NUM_COLUMN_TILES, NUM_PROGRAMS, flatten=True):
        # Programs that run together read few rows and few columns of tiles, so these stay in the cache.
        first = tile // tiles_a_group * tiles_together
        group_rows = tl.minimum(num_row_tiles - first, tiles_together)
        row = (first + tile % tiles_a_group % group_rows) * TILE_R
        column = (tile % tiles_a_group // group_rows) * TILE_C
        acc = tl.zeros((TILE_R, NUM_PRODUCTS * TILE_C), tl.float32)
        for inner in tl.range(0, DEPTH, TILE_K, num_stages=NUM_STAGES):
            rows = hidden.load([row, inner])
            if IS_GATED:
                columns = weight.load([0, column, inner]).reshape(2 * TILE_C, TILE_K)
            else:
                columns = weight.load([column, inner])
            acc = tl.dot(rows, tl.trans(columns), acc, input_precision="ieee")
        if IS_GATED:
            gate, up = acc.reshape(TILE_R, 2, TILE_C).permute(0, 2, 1).split()
            acc = joined_tiles(gate.to(out.dtype), up.to(out.dtype), KIND, ALPHA, LIMIT)
        out.store([row, column], acc.to(out.dtype))


def cut_of_many_rows(hidden: Tensor, weight: Tensor) -> ManyRowsShape | None:
    """Return the tiling of a gated product of [T, K] and [2 F, K], or None if it takes two launches."""
    width = len(weight) // 2
    sizes = len(hidden), width, hidden.element_size(), hidden.device
    return many_rows_shape(*sizes) if _is_described(hidden, weight, width) else None


def cut_of_head(hidden: Tensor, weight: Tensor) -> ManyRowsShape | None:
    """Return the tiling of a head's product of [T, K] and [N, K], or None if a library is at least as fast."""
    sizes = len(hidden), len(weight), hidden.element_size(), hidden.device
    return head_shape(*sizes) if _is_described(hidden, weight, len(weight)) else None


def _is_described(hidden: Tensor, weight: Tensor, width: int) -> bool:
    is_aligned = width * hidden.element_size() % DESCRIPTOR_BYTES == 0
    return can_describe(hidden) and can_describe(weight) and is_aligned


def gate_many_rows(hidden: Tensor, weight: Tensor, shape: ManyRowsShape, gate: Gate = SILU) -> Tensor:
    """Compute `gated_product_ref` in one launch: [T, K], [2 F, K] -> [T, F]. All three tensors allow descriptors."""
    depth, width = hidden.shape[1], len(weight) // 2
    require(weight.shape == (2 * width, depth), "weight", "equally many gate rows and up rows, as wide as `hidden`")
    sizes, strides = [2, width, depth], [width * depth, depth, 1]
    both = TensorDescriptor(weight, sizes, strides, [2, shape.columns, shape.depth])
    return _launch(hidden, weight, both, shape, width, gate)


def multiply_many_rows(hidden: Tensor, weight: Tensor, shape: ManyRowsShape) -> Tensor:
    """Compute `product_ref` without a bias: [T, K], [N, K] -> [T, N]. All three tensors allow descriptors."""
    require(weight.dim() == 2 and weight.shape[1] == hidden.shape[1], "weight", "as many columns as `hidden`")
    return _launch(hidden, weight, describe(weight, shape.columns, shape.depth), shape, len(weight), None)


def _launch(
    hidden: Tensor, weight: Tensor, described: Any, shape: ManyRowsShape, width: int, gate: Gate | None
) -> Tensor:
    """Launch the kernel once. Returns [T, width]."""
    check_tensors(hidden, weight)
    check_dtypes(hidden, weight)
    require(weight.is_contiguous() and hidden.stride(1) == 1, "hidden, weight", "contiguous rows")
    num_rows, depth = hidden.shape
    out = torch.empty((num_rows, width), dtype=hidden.dtype, device=hidden.device)
    num_programs = num_multiprocessors(hidden.device)
    num_tiles = ceil_div(num_rows, shape.rows) * ceil_div(width, shape.columns)
    _many_rows_kernel[(min(num_programs, num_tiles),)](
        describe(hidden, shape.rows, shape.depth), described, describe(out, shape.rows, shape.columns),
        num_rows, shape.tiles_together, WIDTH=width, DEPTH=depth, NUM_PROGRAMS=num_programs, IS_GATED=gate is not None,
        TILE_R=shape.rows, TILE_C=shape.columns, TILE_K=shape.depth, NUM_STAGES=shape.num_stages,
        num_warps=shape.num_warps, enable_fp_fusion=False, **gate_options(gate or SILU),
    )  # fmt: skip
    return out
