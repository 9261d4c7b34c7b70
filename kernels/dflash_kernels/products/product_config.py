"""Tiling of matrix products, and the choice between our kernel and a library.

Measured on an H200 (`docs/measurements/products.md`).
"""

from dataclasses import dataclass

import torch

from dflash_kernels.launch import IS_INTERPRETED, ceil_div, power_of_2
from dflash_kernels.launch_config import MIN_DOT, fitting_stages, has_tile_loads, num_multiprocessors

MAX_PRODUCT_ROWS = 32
"""Most rows for which our kernel computes all products on any GPU. With more rows, a library is at least as fast."""

WIDE_PRODUCT_ROWS = 128
"""Most rows for which our kernel computes gated products and products in parts, if descriptors can load tiles."""

GATED_ROWS = 1024
"""Fewest rows for which `many_rows.py` computes gated products, if they fill the device."""

HEAD_ROWS = range(480, 513)
"""Numbers of rows for which `many_rows.py` computes the product of a head with MANY_COLUMNS or more."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Tiling of a product: rows, columns and inner width of a tile, and the number of parts of the inner sum.

    has_descriptors  whether tiles are loaded by descriptors (TMA) instead of pointers
    """

    rows: int
    columns: int
    depth: int
    num_parts: int
    num_stages: int
    num_warps: int = 4
    has_descriptors: bool = False


MAX_PARTS = 8
"""Most parts of the inner sum: adding up more parts takes longer than they save."""

MANY_COLUMNS = 65_536
"""Fewest columns for wide tiles, such as a head's: programs run in many rounds, and wide tiles read the rows less."""


def product_shape(
    num_rows: int,
    num_columns: int,
    depth: int,
    itemsize: int,
    device: torch.device,
    *,
    has_parts: bool = False,
    is_gated: bool = False,
) -> ProductShape | None:
    """Return the tiling of a product, or None if a library is faster. The tiling depends on shapes only.

    With `has_parts`, the sum over `depth` is cut into parts. There are as many parts as fit on the device at the same
    time: 60% of the multiprocessors read at full speed, and a second round of a few programs takes as long as a full
    one. A program that has a multiprocessor for itself gets more pipeline stages.
    """
    if num_rows > MAX_PRODUCT_ROWS:
        is_asked = has_parts or is_gated
        return _wide_shape(num_rows, num_columns, depth, itemsize, device, is_gated=is_gated) if is_asked else None
    rows = max(power_of_2(num_rows), MIN_DOT)
    if is_gated and has_tile_loads(device) and 10 * ceil_div(num_columns, 128) >= 7 * num_multiprocessors(device):
        inner = 128 if itemsize == 2 else 64
        num_stages = fitting_stages(3, (2 * 128 + rows) * inner * itemsize, 0, device)
        return ProductShape(rows, 128, inner, 1, num_stages, num_warps=8, has_descriptors=True)
    columns = 128 if num_columns >= MANY_COLUMNS else 64
    is_wide = itemsize > 2 or (is_gated and rows > MIN_DOT)
    inner = 64 if is_wide else 128
    num_tiles, num_places = ceil_div(num_columns, columns), num_multiprocessors(device)
    num_parts = max(min(num_places // num_tiles, depth // (4 * inner), MAX_PARTS), 1) if has_parts else 1
    stage_bytes = (columns * (2 if is_gated else 1) + rows) * inner * itemsize
    if is_gated:
        num_stages = fitting_stages(4 if is_wide else 3, stage_bytes, 0, device)
    elif num_tiles * num_parts <= num_places:
        num_stages = fitting_stages(6, stage_bytes, 0, device)
    else:
        together = 2 if has_parts else 1
        num_stages = fitting_stages(3 + together, together * stage_bytes, 0, device)
    return ProductShape(rows, columns, inner, num_parts, num_stages)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Tiling of the product of one row: weight rows of a tile, number of parts of the inner sum, and tiles ahead.

    tiles_ahead  tiles of the weight that are loaded at the same time, in registers
    """

    weight_rows: int
    num_parts: int
    tiles_ahead: int
    num_warps: int = 8
    max_registers: int = 128


ROW_DEPTH = 128
"""Inner width of a tile of one row's product."""

MOST_ROW_TILES = 32
"""Most tiles of a part of one row's product: the code has each tile once."""


def row_shape(num_columns: int, depth: int, device: torch.device, *, is_gated: bool = False) -> RowShape | None:
    """Return the tiling of one row's product, or None if it is not used. Two programs share a multiprocessor.

    A wide gated product has tiles enough for tensor cores.
    """
    weight_rows, num_places = 32, 2 * num_multiprocessors(device)
    num_tiles = ceil_div(num_columns, weight_rows // 2 if is_gated else weight_rows)
    if not has_tile_loads(device) or num_columns >= MANY_COLUMNS or (is_gated and num_tiles > num_places):
        return None
    num_parts = 1 if is_gated else max(min(num_places // num_tiles, depth // (4 * ROW_DEPTH), MAX_PARTS), 1)
    if ceil_div(ceil_div(depth, ROW_DEPTH), num_parts) > MOST_ROW_TILES:
        return None
    return RowShape(weight_rows, num_parts, tiles_ahead=6)


def _wide_shape(
    num_rows: int, num_columns: int, depth: int, itemsize: int, device: torch.device, *, is_gated: bool
) -> ProductShape | None:
    """Return the tiling of a product of 33 to 128 rows, or None if a library computes it.

    Our kernel computes the product if the programs fill the device nearly as well as in the measured shapes.
    """
    if num_rows > WIDE_PRODUCT_ROWS or not has_tile_loads(device) or (itemsize > 2 and not IS_INTERPRETED):
        return None
    rows, columns, inner, num_parts = 64 if num_rows <= 64 else 128, 64, 64 if is_gated else 128, 1
    num_programs = ceil_div(num_columns, columns)
    num_places = (2 if is_gated else 1) * num_multiprocessors(device)
    if not is_gated:
        num_parts = max(1, min(num_places // num_programs, MAX_PARTS, depth // (4 * inner)))
        num_programs *= num_parts
    num_rounds = ceil_div(num_programs, num_places)
    fills = num_programs / (num_places * num_rounds)
    if not is_gated and rows == 128 and (num_rounds > 1 or fills < 0.9):
        long = _long_sum_shape(num_columns, depth, itemsize, device)
        if long is not None:
            return long
    if fills < (0.9 if num_rounds > 1 and not is_gated else 0.7):
        return None
    stage_bytes = (columns * (2 if is_gated else 1) + rows) * inner * itemsize
    num_stages = fitting_stages(3 if is_gated else 4, stage_bytes, 0, device)
    return ProductShape(rows, columns, inner, num_parts, num_stages, has_descriptors=True)


LONG_SUM = 4096
"""Shortest inner sum of a part for tiles of 128 rows and 128 columns."""


def _long_sum_shape(num_columns: int, depth: int, itemsize: int, device: torch.device) -> ProductShape | None:
    """Return the tiling of 65 to 128 rows in square tiles, or None unless long sums fill the device in one round."""
    columns, inner, num_places = 128, 64, num_multiprocessors(device)
    num_tiles = ceil_div(num_columns, columns)
    num_parts = min(num_places // num_tiles, MAX_PARTS, depth // LONG_SUM)
    num_stages = fitting_stages(5, 2 * columns * inner * itemsize, 0, device)
    if 10 * num_tiles * num_parts < 9 * num_places or num_stages < 5:
        return None
    return ProductShape(128, columns, inner, num_parts, num_stages, has_descriptors=True)


@dataclass(frozen=True, slots=True)
class ManyRowsShape:
    """Tiling of a product of many rows: rows, columns and inner width of a tile, and launch options.

    tiles_together  rows of tiles in a group; a group is computed column by column
    """

    rows: int
    columns: int
    depth: int
    tiles_together: int
    num_stages: int
    num_warps: int


def many_rows_shape(num_rows: int, width: int, itemsize: int, device: torch.device) -> ManyRowsShape | None:
    """Return the tiling of a gated product of many rows, or None if a library's product and a gate launch are faster.

    Two launches are faster if part of the device would idle, in the last round of tiles or for padded rows. This is
    also assumed for GPUs with less shared memory than an H200.
    """
    if num_rows < GATED_ROWS or not has_tile_loads(device) or (itemsize > 2 and not IS_INTERPRETED):
        return None
    rows, columns, depth, num_stages = 128, 128, 64, 3
    stage_bytes = (rows + 2 * columns) * depth * itemsize
    if fitting_stages(num_stages, stage_bytes, rows * columns * itemsize, device) < num_stages:
        return None
    num_places, num_row_tiles = num_multiprocessors(device), ceil_div(num_rows, rows)
    num_rounds = ceil_div(num_row_tiles * ceil_div(width, columns), num_places)
    if 100 * num_rows * width < 94 * rows * columns * num_places * num_rounds:
        return None
    num_groups = max(1, round(num_row_tiles / 16))
    return ManyRowsShape(rows, columns, depth, ceil_div(num_row_tiles, num_groups), num_stages, num_warps=8)


def head_shape(num_rows: int, num_columns: int, itemsize: int, device: torch.device) -> ManyRowsShape | None:
    """Return the tiling of a head's product, or None if a library is at least as fast.

    A row of tiles takes as long if it is not full, so the number of rows decides.
    """
    is_right_dtype = itemsize == 2 or IS_INTERPRETED
    if num_rows not in HEAD_ROWS or num_columns < MANY_COLUMNS or not has_tile_loads(device) or not is_right_dtype:
        return None
    rows, columns, depth, num_stages = 128, 256, 64, 3
    stage_bytes = (rows + columns) * depth * itemsize
    if fitting_stages(num_stages, stage_bytes, rows * columns * itemsize, device) < num_stages:
        return None
    return ManyRowsShape(rows, columns, depth, ceil_div(num_rows, rows), num_stages, num_warps=8)
