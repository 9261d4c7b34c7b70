"""Gated products of many rows, as in prefill: one launch computes both products and applies the gate.

A library multiplies many rows at full speed, but stores both products for a second launch that applies the gate. Here
one accumulator holds a tile of both products, and the gate is applied before it is stored. There is one program per
multiprocessor. Each program computes several tiles, so that loads of the next tile overlap with the current product.

Axis letters: T rows, K inner width, F width of a gated product.
"""

import torch
from torch import Tensor

from dflash_kernels.activation import SILU, Gate, gate_options, joined_tiles
from dflash_kernels.launch_config import (
    TensorDescriptor,
    ceil_div,
    check_dtypes,
    check_tensors,
    jit,
    num_multiprocessors,
    require,
    tl,
)
from dflash_kernels.product_config import ManyRowsShape, many_rows_shape
from dflash_kernels.tile_loads import DESCRIPTOR_BYTES, can_describe, describe


@jit(do_not_specialize=["num_rows", "tiles_together"])
def _gate_many_rows_kernel(
    hidden, gate_up, out, num_rows, tiles_together,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    NUM_COLUMN_TILES: tl.constexpr = (WIDTH + TILE_C - 1) // TILE_C
    num_row_tiles = (num_rows + TILE_R - 1) // TILE_R
    tiles_a_group = tiles_together * NUM_COLUMN_TILES
    for tile in tl.range(tl.program_id(0), num_row_tiles * NUM_COLUMN_TILES, NUM_PROGRAMS, flatten=True):
        # Programs that run together read few rows and few columns of tiles, so these stay in the cache.
        first = tile // tiles_a_group * tiles_together
        group_rows = tl.minimum(num_row_tiles - first, tiles_together)
        row = (first + tile % tiles_a_group % group_rows) * TILE_R
        column = (tile % tiles_a_group // group_rows) * TILE_C
        acc = tl.zeros((TILE_R, 2 * TILE_C), tl.float32)
        for inner in tl.range(0, DEPTH, TILE_K, num_stages=NUM_STAGES):
            rows = hidden.load([row, inner])
            both = gate_up.load([0, column, inner]).reshape(2 * TILE_C, TILE_K)
            acc = tl.dot(rows, tl.trans(both), acc, input_precision="ieee")
        gate, up = acc.reshape(TILE_R, 2, TILE_C).permute(0, 2, 1).split()
        out.store([row, column], joined_tiles(gate.to(out.dtype), up.to(out.dtype), KIND, ALPHA, LIMIT))


def cut_of_many_rows(hidden: Tensor, weight: Tensor) -> ManyRowsShape | None:
    """Return the tiling of a gated product of [T, K] and [2 F, K], or None if it takes two launches."""
    itemsize, width = hidden.element_size(), len(weight) // 2
    is_described = can_describe(hidden) and can_describe(weight) and width * itemsize % DESCRIPTOR_BYTES == 0
    return many_rows_shape(len(hidden), width, itemsize, hidden.device) if is_described else None


def gate_many_rows(hidden: Tensor, weight: Tensor, shape: ManyRowsShape, gate: Gate = SILU) -> Tensor:
    """Compute `gated_product_ref` in one launch: [T, K], [2 F, K] -> [T, F]. All three tensors allow descriptors."""
    check_tensors(hidden, weight)
    check_dtypes(hidden, weight)
    (num_rows, depth), width = hidden.shape, len(weight) // 2
    require(weight.shape == (2 * width, depth), "weight", "equally many gate rows and up rows, as wide as `hidden`")
    require(weight.is_contiguous() and hidden.stride(1) == 1, "hidden, weight", "contiguous rows")
    out = torch.empty((num_rows, width), dtype=hidden.dtype, device=hidden.device)
    sizes, strides = [2, width, depth], [width * depth, depth, 1]
    both = TensorDescriptor(weight, sizes, strides, [2, shape.columns, shape.depth])
    num_programs = num_multiprocessors(hidden.device)
    num_tiles = ceil_div(num_rows, shape.rows) * ceil_div(width, shape.columns)
    _gate_many_rows_kernel[(min(num_programs, num_tiles),)](
        describe(hidden, shape.rows, shape.depth), both, describe(out, shape.rows, shape.columns),
        num_rows, shape.tiles_together, WIDTH=width, DEPTH=depth, NUM_PROGRAMS=num_programs,
        TILE_R=shape.rows, TILE_C=shape.columns, TILE_K=shape.depth, NUM_STAGES=shape.num_stages,
        num_warps=shape.num_warps, enable_fp_fusion=False, **gate_options(gate),
    )  # fmt: skip
    return out
