"""Tiling of attention of blocks and trees: tiles of rows and keys, and parts of the keys."""

from dataclasses import dataclass, replace

import torch

from dflash_kernels.launch import ceil_div, constexpr, power_of_2
from dflash_kernels.launch_config import MIN_DOT, fitting_stages, has_tile_loads, num_multiprocessors

COMBINE_TILE = 4
"""Rows per program that adds up parts, one warp per row."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Tiling of attention: packed rows (query heads x block rows) and keys per tile, and number of parts of keys."""

    rows: int
    keys: int
    num_splits: int
    num_stages: int
    num_warps: int = 4


MAX_SPLITS = 16
"""Most parts of the keys: adding up more parts takes longer than they save."""

FEW_KEYS = constexpr(256)
"""If parts have fewer keys, half as many parts are faster: one program per multiprocessor instead of two."""


def attention_shape(
    num_groups: int, num_packed: int, head_dim: int, itemsize: int, device: torch.device, kv_itemsize: int = 2
) -> AttentionShape:
    """Return the tiling for `num_groups` KV heads of all requests with `num_packed` rows each.

    A cache in FP8 has a `kv_itemsize` of 1, and few rows read it in larger tiles.

    The tiling depends on shapes only, not on lengths, so a captured graph serves every context. On the device, the
    parts share the key tiles of the true length evenly. Tiles fit in shared memory. If few programs must fill the
    device, small tiles let four programs with few rows share a multiprocessor.
    """
    row_bytes = power_of_2(head_dim) * itemsize
    rows = _packed_rows(num_packed, row_bytes, itemsize, device)
    num_programs = num_groups * ceil_div(num_packed, rows)
    is_light = rows == MIN_DOT and row_bytes <= 256
    num_splits = _num_splits(num_programs, 4 if is_light else 2, device)
    num_warps = 8 if row_bytes > 512 and rows == 64 else 4
    if row_bytes > 256:
        fill_device = num_programs * num_splits > num_multiprocessors(device)
        keys, num_stages = _wide_keys(rows, row_bytes, itemsize, fill_device=fill_device)
    elif is_light and kv_itemsize == 1:
        keys, num_stages = 128, 3
    else:
        keys, num_stages = 32 if is_light and num_splits > 1 else 64, 3
    num_stages = fitting_stages(num_stages, 2 * keys * row_bytes, rows * row_bytes, device)
    return AttentionShape(rows, keys, num_splits, num_stages, num_warps)


def _wide_keys(rows: int, row_bytes: int, itemsize: int, *, fill_device: bool) -> tuple[int, int]:
    """Return keys and stages of tiles with more than 256 bytes per row.

    With three stages, a tile of 64 rows has a multiprocessor for itself. In float32 other tiles were not measured.
    """
    if itemsize == 4:
        return 16 if row_bytes > 512 else 32, 2
    return 32, 2 if rows == 64 and (fill_device or row_bytes > 512) else 3


def _packed_rows(num_packed: int, row_bytes: int, itemsize: int, device: torch.device) -> int:
    """Return the packed rows per tile. On Hopper, 64 rows are faster than 32 even if half of them are empty."""
    if (row_bytes > 512 and itemsize == 4) or num_packed <= MIN_DOT:
        return MIN_DOT
    if itemsize == 2 and row_bytes <= 256 and has_tile_loads(device):
        return 64
    return min(power_of_2(num_packed), 64)


def _num_splits(num_programs: int, most_together: int, device: torch.device) -> int:
    """Return the number of parts that fills the device with `most_together` programs per multiprocessor.

    If that gives fewer than four parts, count two programs per multiprocessor: the kernel never halves so few parts.
    """
    num_splits = most_together * num_multiprocessors(device) // num_programs
    if num_splits < 4:
        num_splits = 2 * num_multiprocessors(device) // num_programs
    return min(max(num_splits, 1), MAX_SPLITS)


@dataclass(frozen=True, slots=True)
class BalancedShape:
    """Tiling of attention of many requests: as `AttentionShape`, with the number of programs per KV head and row tile.

    combined_rows  rows per program that adds up parts
    num_whole      whole requests per program if lengths are similar; 0 if this would leave the device idle
    """

    rows: int
    keys: int
    num_programs: int
    num_stages: int
    combined_rows: int = 16
    num_whole: int = 0
    num_warps: int = 4


LEAST_SHARE = constexpr(4)
"""Fewest tiles of keys in a share: adding up smaller parts takes longer than they save."""


def balanced_shape(
    num_requests: int,
    num_kv: int,
    num_packed: int,
    head_dim: int,
    itemsize: int,
    device: torch.device,
    kv_itemsize: int = 2,
) -> BalancedShape | None:
    """Return the tiling for requests with `num_packed` rows per KV head, or None if they do not fill the device.

    Measured on an H200 against one program per request and KV head (`docs/measurements/attention.md`).
    """
    shape = attention_shape(num_requests * num_kv, num_packed, head_dim, itemsize, device, kv_itemsize)
    num_row_tiles, num_places = ceil_div(num_packed, shape.rows), num_multiprocessors(device)
    is_light = shape.rows == MIN_DOT and power_of_2(head_dim) * itemsize <= 256
    num_programs = (3 if is_light else 2) * num_places // (num_kv * num_row_tiles)
    if num_programs < 2 or num_requests * num_kv * num_row_tiles <= num_places:
        return None
    num_whole = ceil_div(num_requests, num_programs)
    fills_device = 10 * ceil_div(num_requests, num_whole) * num_kv * num_row_tiles >= 9 * 2 * num_places
    return BalancedShape(
        shape.rows, shape.keys, num_programs, shape.num_stages, num_whole=num_whole if fills_device else 0,
        num_warps=shape.num_warps,
    )  # fmt: skip


MOST_ROW_GROUPS = 16
"""Most KV heads of all requests for which one launch computes attention of one row (`row_attention.py`).

With 64, three launches take as long (docs/measurements/attention.md).
"""


def row_attention_shape(
    num_groups: int, group: int, head_dim: int, itemsize: int, device: torch.device
) -> AttentionShape | None:
    """Return the tiling of attention of one row in one launch, or None if other kernels compute it.

    num_groups  KV heads of all requests
    group       query heads of a KV head

    A program loads its first tile before queries exist. Short contexts have about one tile for each program. Heads of
    512 would take more registers than there are.
    """
    if head_dim > 256 or head_dim != power_of_2(head_dim) or group > MIN_DOT or num_groups > MOST_ROW_GROUPS:
        return None
    shape = attention_shape(num_groups, MIN_DOT, head_dim, itemsize, device)
    if itemsize > 2:
        return shape
    return replace(shape, keys=64, num_warps=4 if head_dim == 128 else 8, num_stages=2 if head_dim > 128 else 3)
