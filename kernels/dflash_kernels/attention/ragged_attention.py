"""Causal attention of the concatenated rows of several requests: prefill in one launch.

The definition equals `block_attention` with blocks of different lengths, called segments. Row i of a segment has the
position `context_len + i`. The context `[0, context_len)` is read through the request's row of the page table. The
segments' own keys and values are dense tensors.

The host knows all lengths. It cuts the rows into tiles, once for all layers of a forward. It cuts the keys of the
longest tiles into parts (flash-decoding; see `block_attention`). The kernel reads this plan from one tensor. No
compile-time argument depends on lengths, so new lengths never cause a compilation.

Axis letters: T flat rows, B rows of the page table, P pages, H heads, KV heads of keys and values, D head dim,
M tiles, C tiles with several parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_kernels.attention.attention_config import COMBINE_TILE, MAX_SPLITS
from dflash_kernels.attention.attention_rows import check_room, room_for
from dflash_kernels.attention.attention_walk import begin_softmax, tiles_in_sight, walk_context, walk_rows
from dflash_kernels.attention.block_attention import block_attention_ref
from dflash_kernels.attention.ragged_config import RaggedShape
from dflash_kernels.attention.softmax import PLAIN, Softmax, cap_of_products, check_softmax, factor_of_products
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.kv.kv_format import UNSCALED, KVScales, as_readable, check_formats
from dflash_kernels.kv.kv_store import strides_of_caches
from dflash_kernels.launch import ceil_div, check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.launch_config import MAX_GRID, MIN_DOT, num_multiprocessors
from dflash_kernels.products.tile_loads import can_describe, describe

TILE_FIELDS = 8
"""First row, rows, context length and table row of the segment; first packed row; part; parts; index of the part."""

SUM_FIELDS = 6
"""First row and rows of the segment; first packed row; index of the first part; parts; unused."""

_TL_TILE_FIELDS, _TL_SUM_FIELDS = constexpr(TILE_FIELDS), constexpr(SUM_FIELDS)

NO_TILE, NO_SUM = (0, 0, 0, 0, 0, 0, 1, -1), (0, 0, 0, 0, 0, 0)
"""Padding: programs of a tile or sum without rows write nothing."""

PLAN_THAT_FITS = "tiles, sums and parts that fit into the captured plan"

MIN_PART = 4
"""Fewest tiles of keys in a part: adding up smaller parts takes longer than they save."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Flat rows of one request: `num_rows` rows from `first_row` on. The pages already hold their context."""

    first_row: int
    num_rows: int
    context_len: int
    table_row: int


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """Tiling of the rows of a forward. `tiles` and `sums` are rows of integers for the kernels.

    With `is_paged`, the kernel reads the segments' own keys and values from pages, as it reads contexts. This is faster
    for few rows and slower for many.
    """

    segments: tuple[Segment, ...]
    tiles: tuple[tuple[int, ...], ...]  # [M, TILE_FIELDS]
    sums: tuple[tuple[int, ...], ...]  # [C, SUM_FIELDS]
    num_parts: int  # of all tiles with several parts
    shape: RaggedShape
    is_paged: bool = False

    @property
    def ints(self) -> list[int]:
        """Integers that the kernels read, to be copied to the device: tiles, then sums."""
        return [value for row in (*self.tiles, *self.sums) for value in row]

    def padded(self, room: "RaggedPlan") -> "RaggedPlan":
        """Return this plan padded to the size of a larger plan, for a launch that was captured with the larger plan.

        Raises:
            ValueError: this plan does not fit into the larger plan.
        """
        require(self.shape == room.shape and self.num_parts <= room.num_parts, "plan", PLAN_THAT_FITS)
        tiles = (*self.tiles, *[NO_TILE] * (len(room.tiles) - len(self.tiles)))
        sums = (*self.sums, *[NO_SUM] * (len(room.sums) - len(self.sums)))
        require((len(tiles), len(sums)) == (len(room.tiles), len(room.sums)), "plan", PLAN_THAT_FITS)
        return replace(self, tiles=tiles, sums=sums, num_parts=room.num_parts)


def room_for_plans(
    num_rows: int, num_segments: int, num_heads: int, num_kv: int, shape: RaggedShape, device: torch.device
) -> RaggedPlan:
    """Return an empty plan with room for every plan of up to `num_segments` segments and `num_rows` rows in total."""
    num_cut = ceil_div(num_rows * (num_heads // num_kv), shape.rows) + num_segments
    num_tiles = num_cut + _num_programs(num_kv, shape, device)  # each further part of a tile is one more tile
    rows = (Segment(0, num_rows, 0, 0),)
    return RaggedPlan(rows, (NO_TILE,) * num_tiles, (NO_SUM,) * num_cut, num_tiles, shape, is_paged=True)


def _num_programs(num_kv: int, shape: RaggedShape, device: torch.device) -> int:
    """Return the number of programs per KV head that run at once."""
    return max(1, shape.num_together * num_multiprocessors(device) // num_kv)


def plan_ragged(
    segments: Sequence[Segment], num_heads: int, num_kv: int, shape: RaggedShape, device: torch.device
) -> RaggedPlan:
    """Cut flat rows into tiles, longest first. If there are few tiles, cut the keys of the longest into parts.

    A part has at least an equal share of the work of all programs that run at once.
    """
    group = num_heads // num_kv
    cut = []
    for segment in segments:
        for first in range(0, segment.num_rows * group, shape.rows):
            last_row = min((first + shape.rows - 1) // group, segment.num_rows - 1)
            cut.append((ceil_div(segment.context_len, shape.keys) + last_row // shape.keys + 1, segment, first))
    cut.sort(key=lambda item: -item[0])
    share = max(MIN_PART, ceil_div(sum(num_tiles for num_tiles, _, _ in cut), _num_programs(num_kv, shape, device)))
    tiles, sums, num_parts = [], [], 0
    for num_tiles, segment, first in cut:
        parts = min(ceil_div(num_tiles, share), MAX_SPLITS)
        where = (segment.first_row, segment.num_rows, segment.context_len, segment.table_row, first)
        if parts == 1:
            tiles.append((*where, 0, 1, -1))
            continue
        tiles += [(*where, part, parts, num_parts + part) for part in range(parts)]
        sums.append((segment.first_row, segment.num_rows, first, num_parts, parts, 0))
        num_parts += parts
    return RaggedPlan(tuple(segments), tuple(tiles), tuple(sums), num_parts, shape)


def ragged_attention_ref(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    plan: RaggedPlan,
    placed: Tensor,
    *,
    window: int | None,
    softmax: Softmax = PLAIN,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each row to its request's context and to the rows of its segment up to itself.

    query                   [T, H, D]
    keys, values            [T, KV, D]
    key_cache, value_cache  [P, page_size, KV, D], in the dtype of the queries or in FP8
    page_table              [B, pages of a request] int64, wide enough for every segment and its context
    plan                    the segments cover all rows
    placed                  `plan.ints` on the device, int64; the reference reads the segments instead
    window                  a row sees keys less than `window` positions before it; None is unlimited
    softmax                 cap and sinks
    scales                  as in `block_attention_ref`
    out                     [T, H, D], contiguous, written; None allocates it
    Returns [T, H, D].
    """
    out = room_for(query) if out is None else out
    for segment in plan.segments:
        rows = slice(segment.first_row, segment.first_row + segment.num_rows)
        num_pages = ceil_div(segment.context_len + segment.num_rows, key_cache.shape[1])
        table = page_table[segment.table_row : segment.table_row + 1, :num_pages]
        context_lens = table.new_full((1,), segment.context_len)
        block_attention_ref(
            query[None, rows], keys[None, rows], values[None, rows], key_cache, value_cache, table, context_lens,
            is_causal=True, window=window, softmax=softmax, scales=scales, out=out[None, rows],
        )  # fmt: skip
    return out


@jit
def _load_tile(tiles):
    """Load the fields of this program's tile. Fields that index rows of tensors are 64-bit integers."""
    tile = tiles + tl.program_id(0).to(tl.int64) * _TL_TILE_FIELDS
    return (
        tl.load(tile), tl.load(tile + 1).to(tl.int32), tl.load(tile + 2).to(tl.int32), tl.load(tile + 3),
        tl.load(tile + 4).to(tl.int32), tl.load(tile + 5).to(tl.int32), tl.load(tile + 6).to(tl.int32),
        tl.load(tile + 7),
    )  # fmt: skip


@jit
def _ragged_attention_kernel(
    query, keys, values, key_tiles, value_tiles, key_cache, value_cache, page_table, tiles, sinks,
    out, parts, part_lses,
    query_row, query_head, keys_row, keys_head, values_row, values_head,
    cache_page, cache_row, cache_head, table_stride, scale, value_scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, IS_PAGED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    kv_head = tl.program_id(1).to(tl.int64)
    first_row, num_rows, context_len, table_row, first_packed, part, num_parts, place = _load_tile(tiles)
    packed = first_packed + tl.arange(0, TILE_M)
    row = packed // GROUP
    dim = tl.arange(0, TILE_D)
    is_query = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + packed % GROUP
    flat_row = first_row + row
    queries = tl.load(
        query + (flat_row * query_row + head * query_head)[:, None] + dim[None, :], mask=is_query, other=0.0
    )
    table = page_table + table_row * table_stride
    key_cache += kv_head * cache_head
    value_cache += kv_head * cache_head
    last_row = tl.minimum((first_packed + TILE_M - 1) // GROUP, num_rows - 1)
    if IS_PAGED:
        # One loop for few keys: each further loop would start with an empty pipeline of loads.
        num_keys = context_len + last_row + 1
        first_tile, num_tiles, _, _ = tiles_in_sight(
            context_len, num_keys, first_packed // GROUP, -1, 0, True, WINDOW, TILE_N
        )
        begin, end = part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts
        acc, row_max, weight_sum = begin_softmax(sinks, head, part + 1 == num_parts, TILE_M, TILE_D)
        acc, row_max, weight_sum = walk_context(
            queries, row, dim, key_cache, value_cache, cache_page, cache_row, table, context_len, num_keys,
            first_tile + begin, first_tile + end, acc, row_max, weight_sum, scale,
            HEAD_DIM, PAGE_SIZE, True, WINDOW, CAP, TILE_N, TILE_D, False,
        )  # fmt: skip
    else:
        acc, row_max, weight_sum = walk_rows(
            queries, row, dim, head, sinks, key_cache, value_cache, cache_page, cache_row, table,
            keys + first_row * keys_row + kv_head * keys_head, values + first_row * values_row + kv_head * values_head,
            keys_row, values_row, key_tiles, value_tiles, first_row.to(tl.int32), (kv_head * HEAD_DIM).to(tl.int32),
            context_len, num_rows, first_packed // GROUP, last_row, part, num_parts, scale,
            HEAD_DIM, PAGE_SIZE, WINDOW, CAP, TILE_M, TILE_N, TILE_D,
        )  # fmt: skip
    # A row that sees no key in this part has the mean 0, and its weight in the sum of parts is 2**-inf.
    weight_sum = tl.where(weight_sum > 0, weight_sum, 1.0)
    mean = acc * value_scale / weight_sum[:, None]
    if place < 0:
        target = flat_row * (NUM_KV * GROUP) + head
        tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], mean.to(out.dtype.element_ty), mask=is_query)
    else:
        target = (place * NUM_KV + kv_head) * TILE_M + tl.arange(0, TILE_M)
        tl.store(part_lses + target, row_max + tl.log2(weight_sum), mask=row < num_rows)
        tl.store(parts + target[:, None] * HEAD_DIM + dim[None, :], mean, mask=is_query)


@jit
def _sum_parts_kernel(
    sums, parts, part_lses, out,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr,
    TILE_R: tl.constexpr, TILE_S: tl.constexpr, TILE_D: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    item = sums + tl.program_id(0).to(tl.int64) * _TL_SUM_FIELDS
    kv_head = tl.program_id(1).to(tl.int64)
    first_row = tl.load(item)
    num_rows = tl.load(item + 1)
    first_packed = tl.load(item + 2)
    first_part = tl.load(item + 3)
    num_parts = tl.load(item + 4).to(tl.int32)
    place = tl.program_id(2) * TILE_R + tl.arange(0, TILE_R)  # packed rows of the tile
    packed = first_packed + place
    row = packed // GROUP
    is_row = row < num_rows
    part = tl.arange(0, TILE_S)
    dim = tl.arange(0, TILE_D)
    part_rows = ((first_part + part)[None, :] * NUM_KV + kv_head) * TILE_M + place[:, None]
    is_part = is_row[:, None] & (part < num_parts)[None, :]
    lses = tl.load(part_lses + part_rows, mask=is_part, other=float("-inf"))
    max_lse = tl.where(is_row, tl.max(lses, 1), 0.0)
    is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.zeros((TILE_R, TILE_D), tl.float32)
    weight_sum = tl.zeros((TILE_R,), tl.float32)
    for step in range(num_parts):
        source = ((first_part + step) * NUM_KV + kv_head) * TILE_M + place
        weight = tl.exp2(tl.load(part_lses + source, mask=is_row, other=0.0) - max_lse)
        mean = tl.load(parts + source[:, None] * HEAD_DIM + dim[None, :], mask=is_element, other=0.0)
        acc += mean * weight[:, None]
        weight_sum += weight
    target = (first_row + row) * (NUM_KV * GROUP) + kv_head * GROUP + packed % GROUP
    summed = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]  # 0 for padding
    tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], summed.to(out.dtype.element_ty), mask=is_element)


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    plan: RaggedPlan,
    placed: Tensor,
    *,
    window: int | None,
    softmax: Softmax = PLAIN,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `ragged_attention_ref` in one launch, or in two if keys are cut into parts."""
    check_tensors(query, keys, values, key_cache, value_cache, page_table, placed)
    check_formats(key_cache, value_cache, query, keys, values)
    num_rows, num_heads, head_dim = query.shape
    num_kv = keys.shape[1]
    require(num_heads % num_kv == 0, "query", "a number of heads that is a multiple of the KV heads")
    require(keys.shape == values.shape == (num_rows, num_kv, head_dim), "keys, values", "one row per query row")
    require(key_cache.shape[2:] == (num_kv, head_dim), "caches", "the heads of the keys")
    require(page_table.stride(1) == 1, "page_table", "contiguous rows")
    require(placed.is_contiguous(), "placed", "contiguous integers")
    require(window is None or window > 0, "window", "at least 1")
    check_softmax(softmax, query)
    require(num_kv <= MAX_GRID, "keys", f"at most {MAX_GRID} KV heads")
    require(sum(segment.num_rows for segment in plan.segments) == num_rows, "plan", "segments that cover all rows")
    out = room_for(query) if out is None else out
    check_room(out, query)
    if not out.numel():
        return out
    flat = (query, keys, values)
    require(all(tensor.stride(2) == 1 for tensor in flat), "query, keys, values", "contiguous heads")
    shape, group, tile_dim = plan.shape, num_heads // num_kv, max(power_of_2(head_dim), MIN_DOT)
    # Parts are float32 tensors also if they are empty, so that one compiled kernel serves both cases.
    part_lses = torch.empty((plan.num_parts, num_kv, shape.rows), dtype=torch.float32, device=query.device)
    parts = torch.empty((*part_lses.shape, head_dim), dtype=torch.float32, device=query.device)
    launching = early(query.device) if plan.is_paged else {"IS_EARLY": False}
    _ragged_attention_kernel[(len(plan.tiles), num_kv)](
        *flat, *_tiles_of(keys, values, plan, window), as_readable(key_cache), as_readable(value_cache),
        page_table, placed, softmax.sinks, out, parts, part_lses,
        *(stride for tensor in flat for stride in tensor.stride()[:2]),
        *strides_of_caches(key_cache, value_cache), page_table.stride(0),
        factor_of_products(head_dim, scales), scales.value,
        NUM_KV=num_kv, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=key_cache.shape[1], WINDOW=window or 0,
        CAP=cap_of_products(softmax, head_dim, scales), IS_PAGED=plan.is_paged,
        TILE_M=shape.rows, TILE_N=shape.keys, TILE_D=tile_dim,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **launching,
    )  # fmt: skip
    if plan.sums:
        sums = placed[len(plan.tiles) * TILE_FIELDS :]
        _sum_parts_kernel[(len(plan.sums), num_kv, ceil_div(shape.rows, COMBINE_TILE))](
            sums, parts, part_lses, out, NUM_KV=num_kv, GROUP=group, HEAD_DIM=head_dim, TILE_M=shape.rows,
            TILE_R=COMBINE_TILE, TILE_S=power_of_2(MAX_SPLITS), TILE_D=tile_dim, num_warps=COMBINE_TILE, **launching,
        )  # fmt: skip
    return out


def _tiles_of(keys: Tensor, values: Tensor, plan: RaggedPlan, window: int | None) -> tuple[Any, Any]:
    """Return descriptors of keys and values [T, KV, D] with adjacent heads, or None if the kernel uses pointers."""
    head_dim = keys.shape[2]
    if not plan.shape.has_descriptors or plan.is_paged or window is not None or head_dim != power_of_2(head_dim):
        return None, None
    sides = [tensor.flatten(1) for tensor in (keys, values) if tensor.stride(1) == head_dim and can_describe(tensor)]
    if len(sides) < 2:
        return None, None
    key_tiles, value_tiles = (describe(side, plan.shape.keys, head_dim) for side in sides)
    return key_tiles, value_tiles
