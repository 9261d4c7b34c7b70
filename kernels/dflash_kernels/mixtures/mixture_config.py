"""Tiling of the products of experts, with weights in 16 bits, in FP8, and packed."""

from dataclasses import dataclass, replace

import torch

from dflash_kernels.fp8.fp8_config import tile_depth
from dflash_kernels.launch import power_of_2
from dflash_kernels.launch_config import LEAST_ROWS, MIN_DOT, fitting_stages, has_tile_loads
from dflash_kernels.products.product_config import MOST_ROW_TILES, ROW_DEPTH, RowShape

ROUTED_ROWS = 4
"""Rows per program that chooses experts, one warp per row."""

MAX_EXPERT_ROWS = 256
"""Most rows for which our expert kernels run. With more rows, torch's grouped products are as fast."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Tiling of the expert products: rows, columns and inner width of a tile.

    sought_rows    number of rows in which a program searches for its expert, padded
    is_by_route    one program per route (row and chosen expert) instead of one per expert
    num_programs   most programs that share the rows of an expert, per tile of columns
    max_registers  most registers of a thread; None for no limit
    """

    rows: int
    columns: int
    depth: int
    num_stages: int
    sought_rows: int
    is_by_route: bool
    num_warps: int = 4
    num_programs: int = 1
    max_registers: int | None = None


def experts_shape(
    num_rows: int, num_chosen: int, num_experts: int, itemsize: int, device: torch.device
) -> ExpertsShape:
    """Return the tiling for rows with `num_chosen` experts each. It changes only at powers of two of the rows.

    Two programs fit on a multiprocessor: while one searches for its rows, the other one reads weights.
    """
    sought_rows = 1 if num_rows == 1 else max(power_of_2(num_rows), MIN_DOT)
    is_by_route = power_of_2(num_rows) * num_chosen <= num_experts
    rows = MIN_DOT if sought_rows <= 64 else 32
    columns, depth = 64 if num_rows == 1 else 128, 64
    num_stages = fitting_stages(5, (columns + rows) * depth * itemsize, 0, device)
    return ExpertsShape(rows, columns, depth, num_stages, sought_rows, is_by_route)


ROW_EXPERTS = RowShape(weight_rows=32, num_parts=1, tiles_ahead=4, max_registers=80)
"""Tiling of the experts of one row. Three programs share a multiprocessor."""


def takes_row(num_rows: int, sizes: tuple[int, int], device: torch.device) -> bool:
    """Return whether `row_experts.py` computes experts with these two inner sums. The code has each tile once."""
    return num_rows == 1 and has_tile_loads(device) and max(sizes) <= MOST_ROW_TILES * ROW_DEPTH


PACKED_TILES = (
    (16, LEAST_ROWS, 64, 2),
    (64, 16, 128, 4),
    (256, 32, 128, 4),
)
"""Most rows, and rows, columns and warps of a tile of packed experts.

Up to 16 rows, 8 usually hold all rows of an expert. If an expert has more, a program reads its weights again. From 65
rows on, another program reads them.
"""

THREE_TOGETHER = 168
"""Registers per thread with which three programs of four warps fit on a multiprocessor."""


JOINT_ROWS = range(5, 33)
"""Numbers of rows for which one launch computes both products of packed experts (`joint_experts.py`)."""


@dataclass(frozen=True, slots=True)
class FewPackedShape:
    """Warps of a program of gate and up, and warps and groups of 32 columns of a program of `down`."""

    gate_warps: int
    down_warps: int
    down_groups: int


FEW_PACKED = ((1, FewPackedShape(4, 4, 1)), (2, FewPackedShape(2, 4, 2)), (4, FewPackedShape(1, 2, 2)))
"""Most rows, and the tiling of packed experts in which each warp multiplies by itself (`few_packed_rows.py`)."""

MAX_FEW_PACKED = FEW_PACKED[-1][0]


def few_packed_shape(num_rows: int) -> FewPackedShape:
    """Return the tiling of up to MAX_FEW_PACKED rows."""
    return next(shape for most, shape in FEW_PACKED if num_rows <= most)


WARPGROUP_ROWS = range(33, 129)
"""Numbers of rows for which tensor cores multiply packed experts while warps unpack (`warpgroup_experts.py`)."""

WARPGROUP_TILE, WARPGROUP_STAGES = 24, 2
"""Rows of a tile, a multiple of 8 up to 32, and stages of its loop. Four programs fit on a multiprocessor."""


def packed_experts_shape(
    num_rows: int, num_chosen: int, num_experts: int, itemsize: int, device: torch.device
) -> ExpertsShape:
    """As `experts_shape`, for packed weights, in tiles of 128 numbers of each row."""
    if num_rows > MAX_EXPERT_ROWS:
        num_stages = fitting_stages(3, (128 * 2 + 64 * 4 * itemsize) * 32, 0, device)
        return ExpertsShape(64, 128, 128, num_stages, MIN_DOT, is_by_route=False)
    plain = experts_shape(num_rows, num_chosen, num_experts, itemsize, device)
    rows, columns, num_warps = next(tile for most, *tile in PACKED_TILES if num_rows <= most)
    num_stages = fitting_stages(4, (columns * 2 + rows * 4 * itemsize) * 32, 0, device)
    return replace(
        plain, rows=rows, columns=columns, depth=128, num_stages=num_stages, num_warps=num_warps,
        num_programs=2 if num_rows > 64 else 1, max_registers=THREE_TOGETHER if num_warps == 4 else None,
    )  # fmt: skip


def fp8_experts_shape(
    num_rows: int, num_chosen: int, num_experts: int, block: tuple[int, int], itemsize: int, device: torch.device
) -> ExpertsShape:
    """Return the tiling of experts in FP8; see `experts_shape`. A `block` of a weight has one scale."""
    shape, inner = experts_shape(num_rows, num_chosen, num_experts, itemsize, device), tile_depth(block[1])
    stage_bytes = (shape.columns + shape.rows * itemsize) * inner
    return replace(shape, depth=inner, num_stages=fitting_stages(4, stage_bytes, shape.rows * inner, device))
