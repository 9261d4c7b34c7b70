"""Attention of a block of rows over paged context and the block itself.

Prefill, verification and drafting share this definition. Row i of a request has the position `context_len + i`. The
context `[0, context_len)` is read through the page table; the block's own keys and values are dense tensors. Pages are
read only below `context_len`. Therefore rejected rows and mask rows of a draft never affect a result.

The kernel packs the block's rows and the query heads of one KV head into one tile, so keys and values are read once
for all of them. If few requests leave the device idle, it cuts the keys into parts (flash-decoding). Source: Dao et
al. 2023, "Flash-Decoding for long-context inference".

Axis letters: R requests, N rows, P pages, H heads, KV heads of keys and values, D head dim, C context.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_kernels.attention.attention_config import attention_shape, balanced_shape
from dflash_kernels.attention.attention_rows import check_blocks, check_room, flat_blocks, room_for
from dflash_kernels.attention.attention_walk import (
    context_rows,
    mean_of_share,
    rows_of_request,
    rows_of_tile,
    share_of_tiles,
    tiles_in_sight,
)
from dflash_kernels.attention.balanced_attention import launch_balanced
from dflash_kernels.attention.key_parts import combine_parts, parts_in_use, room_for_parts
from dflash_kernels.attention.softmax import PLAIN, Softmax, cap_of_products, factor_of_products
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.kv.kv_format import UNSCALED, KVScales, as_readable
from dflash_kernels.launch import ceil_div, jit, power_of_2, tl
from dflash_kernels.launch_config import MIN_DOT


def block_attention_ref(
    query: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    *,
    is_causal: bool,
    window: int | None,
    softmax: Softmax = PLAIN,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each row to the context and to the block: to the rows up to itself if causal, otherwise to all rows.

    query                     [R, N, H, D]
    block_keys, block_values  [R, N, KV, D]
    key_cache, value_cache    [P, page_size, KV, D], in the dtype of the queries or in FP8
    page_table                [R, C / page_size] int64, wide enough for the longest context
    context_lens              [R] int64
    window                    a row sees keys less than `window` positions away; None is unlimited. Without causality
                              the window bounds both directions.
    softmax                   cap and sinks
    scales                    of keys and values in the caches and in the block, which has the numbers of caches in FP8
    out                       [R, N, H, D], contiguous, written; None allocates it
    Returns [R, N, H, D].
    """
    num_requests, num_rows = query.shape[:2]
    context = torch.arange(page_table.shape[1] * key_cache.shape[1], device=query.device)  # [C]
    is_context = context < context_lens[:, None]  # [R, C]
    rows = torch.arange(num_rows, device=query.device)
    distance = rows[:, None] - rows  # [N, N], from a row to a key of the block
    in_block = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    in_context = is_context[:, None].expand(-1, num_rows, -1)
    if window is not None:
        in_block = in_block & (distance.abs() < window)
        in_context = in_context & ((context_lens[:, None] + rows)[:, :, None] - context < window)
    visible = torch.cat((in_context, in_block.expand(num_requests, -1, -1)), dim=2)  # [R, N, C + N]
    return attend_ref(
        query, block_keys, block_values, key_cache, value_cache, page_table, is_context, visible, softmax, scales, out
    )


def attend_ref(
    query: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    is_context: Tensor,
    visible: Tensor,
    softmax: Softmax,
    scales: KVScales,
    out: Tensor | None,
) -> Tensor:
    """Attend from each row to the context and the block by a mask. The other arguments are as in `block_attention_ref`.

    is_context  [R, C] bool, whether a slot of the pages has context
    visible     [R, N, C + N] bool, the keys that each row sees
    """
    # Slots outside the context may hold NaN. A weight of zero does not remove NaN, so these slots are set to zero.
    hole, pages = ~is_context[:, :, None, None], page_table.flatten()
    keys, values = (
        torch.cat((_read_pages(cache, pages, hole, query.dtype), block), dim=1)
        for cache, block in ((key_cache, block_keys), (value_cache, block_values))
    )
    heads = (query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2))
    scale = scales.key / math.sqrt(query.shape[3])
    if softmax.cap is None and softmax.sinks is None:
        is_grouped = query.shape[2] != keys.shape[2]
        mask = visible[:, None]
        attended = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=is_grouped, scale=scale)
    else:
        attended = _attend_ref(*heads, visible[:, None], softmax, scale)
    if scales.value != 1:
        attended = attended * scales.value
    attended = attended.transpose(1, 2)
    return attended if out is None else out.copy_(attended)


def _read_pages(cache: Tensor, pages: Tensor, hole: Tensor, dtype: torch.dtype) -> Tensor:
    """[P, page_size, KV, D] and pages [R * C / page_size] -> [R, C, KV, D], with zeros where `hole` [R, C, 1, 1] is."""
    rows = cache.index_select(0, pages).to(dtype)
    return rows.view(*hole.shape[:2], *cache.shape[2:]).masked_fill_(hole, 0)


def _attend_ref(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax, scale: float) -> Tensor:
    """[R, H, N, D], [R, KV, M, D] twice, [R, 1, N, M] -> [R, H, N, D], computed in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // keys.shape[1]
    keys, values = (heads.to(wide).repeat_interleave(group, dim=1) for heads in (keys, values))
    scores = query.to(wide) @ keys.transpose(2, 3) * scale
    if softmax.cap is not None:
        scores = torch.tanh(scores / softmax.cap) * softmax.cap
    scores = scores.masked_fill(~visible, -torch.inf)
    if softmax.sinks is not None:
        sinks = softmax.sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=3)
    weights = scores.softmax(dim=3)[..., : keys.shape[2]]
    return (weights @ values).to(query.dtype)


@jit
def _block_attention_kernel(
    query, block_keys, block_values, key_cache, value_cache, page_table, context_lens, firsts, counts, sinks,
    out, part_lses,
    query_row, query_head, keys_row, keys_head, values_row, values_head,
    cache_page, cache_row, cache_head, table_stride,
    num_rows, num_pages, num_out, scale, value_scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NUM_SPLITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    # Start with the last tiles of a causal block, which are the longest. Parts that are not in use come last.
    row_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request = (tl.program_id(1) // NUM_KV).to(tl.int64)
    kv_head = (tl.program_id(1) % NUM_KV).to(tl.int64)
    context_len = tl.load(context_lens + request).to(tl.int32)
    readable_len = tl.minimum(context_len, num_pages * PAGE_SIZE)
    first_row, last_row = rows_of_tile(row_tile, num_rows, GROUP, TILE_M)
    context_tile, num_context, block_tile, block_tile_end = tiles_in_sight(
        context_len, readable_len, first_row, last_row, num_rows, IS_CAUSAL, WINDOW, TILE_N
    )
    num_tiles = num_context + block_tile_end - block_tile
    num_parts = parts_in_use(num_tiles, NUM_SPLITS, TILE_N)
    part = tl.program_id(2)
    begin, end = part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts
    context_begin, context_end, block_begin, block_end, is_last = share_of_tiles(
        begin, end, context_tile, num_context, block_tile, block_tile_end
    )
    table = page_table + request * table_stride
    first = context_begin * TILE_N + tl.arange(0, TILE_N)
    key = context_rows(table, first, readable_len, cache_page, cache_row, PAGE_SIZE)
    # The previous launch may still run until here: it writes neither lengths nor page tables.
    wait_for_launches_before(IS_EARLY)
    if NUM_SPLITS > 1:
        let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    if part >= num_parts:
        return  # the next launch ignores this part
    packed = row_tile * TILE_M + tl.arange(0, TILE_M)
    row = packed // GROUP
    dim = tl.arange(0, TILE_D)
    first_flat, count = rows_of_request(request, num_rows, firsts, counts)
    is_query = (row < count)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + packed % GROUP
    flat_row = first_flat + row
    queries = tl.load(
        query + (flat_row * query_row + head * query_head)[:, None] + dim[None, :], mask=is_query, other=0.0
    )
    if NUM_SPLITS > 1:
        flat_row = request * num_rows + row  # parts have room for whole blocks
    target = flat_row * (NUM_KV * GROUP) + head
    target += part.to(tl.int64) * num_out
    mean, lses = mean_of_share(
        queries, row, dim, head, sinks, key_cache + kv_head * cache_head, value_cache + kv_head * cache_head,
        cache_page, cache_row, table, context_len, readable_len,
        block_keys + first_flat * keys_row + kv_head * keys_head,
        block_values + first_flat * values_row + kv_head * values_head, keys_row, values_row, count,
        context_begin, context_end, block_begin, block_end, is_last, scale, value_scale,
        HEAD_DIM, PAGE_SIZE, IS_CAUSAL, WINDOW, CAP, TILE_M, TILE_N, TILE_D, key,
    )  # fmt: skip
    if NUM_SPLITS > 1:
        tl.store(part_lses + target, lses, mask=row < count)
    tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], mean.to(out.dtype.element_ty), mask=is_query)


def block_attention(
    query: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    *,
    is_causal: bool,
    window: int | None,
    softmax: Softmax = PLAIN,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `block_attention_ref` in one launch, or in two if the keys are cut into parts.

    The number of parts depends on shapes only, so a captured graph serves every context that fits its page table.
    `balanced_attention.py` computes batches of many requests.
    """
    check_blocks(query, block_keys, block_values, key_cache, value_cache, page_table, context_lens, window, softmax)
    out = room_for(query) if out is None else out
    check_room(out, query)
    if out.numel():
        flat, strides = flat_blocks(query, block_keys, block_values, key_cache, value_cache, page_table)
        tensors = (*flat, as_readable(key_cache), as_readable(value_cache))
        launch_blocks(
            tensors, strides, page_table, context_lens, out.flatten(0, 1), query.shape[1],
            is_causal=is_causal, window=window, softmax=softmax, scales=scales,
        )  # fmt: skip
    return out


def launch_blocks(
    tensors: Sequence[Tensor],
    strides: Sequence[int],
    page_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    num_rows: int,
    *,
    is_causal: bool,
    window: int | None,
    softmax: Softmax,
    scales: KVScales,
    firsts: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Write attention of flat rows to `out` [T, H, D], in blocks of `num_rows` rows or with fewer: `rows_of_request`.

    tensors  queries [T, H, D], keys and values of the blocks [T, KV, D], key cache, value cache
    strides  as `strides_of` returns them
    """
    query, block_keys, _, key_cache, _ = tensors
    num_requests, (num_kv, head_dim), page_size = len(context_lens), block_keys.shape[1:], key_cache.shape[1]
    group, itemsizes = query.shape[1] // num_kv, (query.element_size(), key_cache.element_size())
    context_lens, cap = context_lens.contiguous(), cap_of_products(softmax, head_dim, scales)
    packed = num_rows * group, head_dim, itemsizes[0], query.device, itemsizes[1]
    balanced = balanced_shape(num_requests, num_kv, *packed)
    if balanced is not None:
        launch_balanced(
            tensors, page_table, context_lens, firsts, counts, softmax.sinks, out, balanced, strides, num_rows,
            page_size=page_size, is_causal=is_causal, window=window, cap=cap,
            scale=factor_of_products(head_dim, scales), value_scale=scales.value,
        )  # fmt: skip
        return
    shape, num_out = attention_shape(num_requests * num_kv, *packed), num_requests * num_rows * query.shape[1]
    num_row_tiles = ceil_div(num_rows * group, shape.rows)
    max_tiles = ceil_div(page_table.shape[1] * page_size, shape.keys) + ceil_div(num_rows, shape.keys)
    num_splits = min(shape.num_splits, max_tiles)
    parts, part_lses = room_for_parts(num_splits, num_out, out)
    cut: dict[str, Any] = {
        "NUM_KV": num_kv, "GROUP": group, "HEAD_DIM": head_dim, "PAGE_SIZE": page_size,
        "IS_CAUSAL": is_causal, "WINDOW": window or 0, "NUM_SPLITS": num_splits, "TILE_M": shape.rows,
        "TILE_N": shape.keys, "TILE_D": max(power_of_2(head_dim), MIN_DOT), **early(query.device),
    }  # fmt: skip
    _block_attention_kernel[(num_row_tiles, num_requests * num_kv, num_splits)](
        *tensors, page_table, context_lens, firsts, counts, softmax.sinks, parts, part_lses, *strides,
        num_rows, page_table.shape[1], num_out, factor_of_products(head_dim, scales), scales.value,
        CAP=cap, **cut, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        combine_parts(parts, part_lses, context_lens, out, num_rows, page_table.shape[1], cut, firsts, counts)
