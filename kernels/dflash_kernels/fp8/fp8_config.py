"""Tiling of products in FP8, and which GPUs have them. `examples/benchmarks/fp8_products.py` compares other tilings."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from dflash_kernels.launch import ceil_div, power_of_2
from dflash_kernels.launch_config import LEAST_ROWS, MIN_DOT, fitting_stages, has_tile_loads, num_multiprocessors
from dflash_kernels.products.product_config import MAX_PARTS

TILE_DEPTH = 128
"""Inner width of a tile, unless blocks of scales are narrower. Tensor cores sum FP8 in few bits, and no further."""

MIN_FP8_DEPTH = 32
"""Least inner width of `tl.dot` in FP8."""

ROUNDED_IN_PLACE = 16
"""Most rows that each program rounds itself. More rows are rounded once, by a launch before the product."""

LEAST_TILES = 4
"""Fewest tiles of a part of the inner sum. The next launch adds up parts."""


@lru_cache
def has_fp8(device: torch.device) -> bool:
    """Return whether tensor cores of the device multiply FP8. Others multiply the same numbers in 16 bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True, slots=True)
class Fp8Shape:
    """Tiling of a product: rows, columns and inner width of a tile, the number of parts, and launch options.

    rounds_in_place  whether programs round their rows, instead of a launch before
    has_descriptors  whether tiles of the weight are loaded by descriptors (TMA) instead of pointers
    """

    rows: int
    columns: int
    depth: int
    num_parts: int
    num_stages: int
    num_warps: int = 4
    rounds_in_place: bool = False
    has_descriptors: bool = False


def fp8_product_shape(
    num_rows: int,
    num_columns: int,
    depth: int,
    block_depth: int,
    itemsize: int,
    device: torch.device,
    *,
    has_parts: bool = False,
    is_gated: bool = False,
    is_rounded: bool = False,
) -> Fp8Shape:
    """Return the tiling of a product. `block_depth` columns of a weight share a scale; `itemsize` is the rows'.

    Few rows of a gated product that are rounded already take tiles of 16 x 64: tensor cores read both factors in FP8
    from shared memory, and two programs share a multiprocessor. A program of a product in parts that has a
    multiprocessor for itself gets more stages.
    """
    inner, is_light = tile_depth(block_depth), is_gated and is_rounded and num_rows <= MIN_DOT
    # A gated tile of 128 rows would need more registers than there are.
    rows = min(max(power_of_2(num_rows), MIN_DOT if is_light else LEAST_ROWS), 64 if is_gated else 128)
    if num_rows > 2 * MIN_DOT or is_light:
        columns, num_warps = 64, 8 if rows == 128 else 4
    else:
        columns, num_warps = 128, 8 if is_gated else 4
    num_tiles = ceil_div(num_columns, columns) * ceil_div(num_rows, rows)
    num_parts = _num_parts(num_tiles, depth, inner, device) if has_parts else 1
    stage_bytes = (columns * (2 if is_gated else 1) + rows * itemsize) * inner
    is_alone = num_parts > 1 and num_tiles * num_parts <= num_multiprocessors(device)
    num_stages = fitting_stages(8 if is_alone else 4, stage_bytes, rows * inner, device)
    in_place = num_rows <= ROUNDED_IN_PLACE
    return Fp8Shape(
        rows, columns, inner, num_parts, num_stages, num_warps,
        rounds_in_place=in_place, has_descriptors=has_tile_loads(device),
    )  # fmt: skip


def _num_parts(num_tiles: int, depth: int, inner: int, device: torch.device) -> int:
    """Return the number of parts of the inner sum. All parts run at the same time, two on each multiprocessor."""
    num_parts, most = 1, 2 * num_multiprocessors(device)
    while num_parts < MAX_PARTS and 2 * num_parts * num_tiles <= most and 2 * num_parts * LEAST_TILES * inner <= depth:
        num_parts *= 2
    return num_parts


def tile_depth(block_depth: int) -> int:
    """Return the inner width of a tile: a step of the inner sum covers columns with one scale."""
    return min(max(power_of_2(block_depth), MIN_DOT), TILE_DEPTH)
