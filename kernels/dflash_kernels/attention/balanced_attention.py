"""Block attention of many requests with different lengths: all programs of a launch get equal work.

The key tiles of all requests form one sequence, which is cut into equal shares, one per program. A share may begin or
end inside a request; a second launch adds up the parts of such a request. If the requests have similar lengths and
whole requests fill the device, the sequence is cut between requests. `block_attention.py` chooses this kernel. Source:
Osama et al. 2023, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU".

Axis letters: R requests, N rows, H heads, KV heads of keys and values, D head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_kernels.attention.attention_config import LEAST_SHARE, BalancedShape
from dflash_kernels.attention.attention_walk import (
    mean_of_share,
    rows_of_request,
    rows_of_tile,
    share_of_tiles,
    tiles_in_sight,
)
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, jit, power_of_2, tl
from dflash_kernels.launch_config import MIN_DOT


@jit
def _share(
    context_lens, num_requests, max_len, first_row, last_row, num_rows, num_programs, num_whole,
    IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TILE_B: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Return the number of key tiles that these rows see per request, [TILE_B], and the number of tiles in a share.

    Also returns whether each program takes `num_whole` whole requests instead of a share, because lengths are similar.
    """
    request = tl.arange(0, TILE_B)
    context_len = tl.load(context_lens + request, mask=request < num_requests, other=0).to(tl.int32)
    _, num_context, block_tile, block_tile_end = tiles_in_sight(
        context_len, tl.minimum(context_len, max_len), first_row, last_row, num_rows, IS_CAUSAL, WINDOW, TILE_N
    )
    num_tiles = tl.where(request < num_requests, num_context + block_tile_end - block_tile, 0)
    total = tl.sum(num_tiles, 0)
    # Similar: the longest request has at most 1.5 times the mean number of tiles.
    are_alike = 2 * tl.max(num_tiles, 0) * num_requests <= 3 * total
    return num_tiles, tl.maximum(tl.cdiv(total, num_programs), LEAST_SHARE), (num_whole > 0) & are_alike


@jit
def _own_tiles(num_tiles, share, is_whole, num_whole, program, TILE_B: tl.constexpr):
    """Return a program's tiles `[begin, end)` in the sequence of the tiles of all requests."""
    begin = program * share
    end = tl.minimum(begin + share, tl.sum(num_tiles, 0))
    if is_whole:
        owner = tl.arange(0, TILE_B) // num_whole
        begin = tl.sum(tl.where(owner < program, num_tiles, 0), 0)
        end = tl.sum(tl.where(owner <= program, num_tiles, 0), 0)
    return begin, end


@jit(do_not_specialize=["num_whole"])
def _balanced_attention_kernel(
    query, block_keys, block_values, key_cache, value_cache, page_table, context_lens, firsts, counts, sinks,
    out, parts, part_lses,
    query_row, query_head, keys_row, keys_head, values_row, values_head,
    cache_page, cache_row, cache_head, table_stride,
    num_requests, num_rows, num_pages, num_whole, scale, value_scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_B: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row_tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    program = tl.program_id(2).to(tl.int64)
    max_len = num_pages * PAGE_SIZE
    first_row, last_row = rows_of_tile(row_tile, num_rows, GROUP, TILE_M)
    num_tiles, share, is_whole = _share(
        context_lens, num_requests, max_len, first_row, last_row, num_rows, tl.num_programs(2), num_whole,
        IS_CAUSAL, WINDOW, TILE_B, TILE_N,
    )  # fmt: skip
    begin, end = _own_tiles(num_tiles, share, is_whole, num_whole, tl.program_id(2), TILE_B)
    tiles_until = tl.cumsum(num_tiles, 0)
    first_request = tl.sum((tiles_until <= begin).to(tl.int32), 0).to(tl.int64)
    last_request = tl.sum((tiles_until < end).to(tl.int32), 0).to(tl.int64)
    passed = tl.sum(tl.where(tiles_until <= begin, num_tiles, 0), 0)  # tiles of earlier requests
    # The previous launch may still run until here: it does not write the lengths.
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts

    packed = row_tile * TILE_M + tl.arange(0, TILE_M)
    row = packed // GROUP
    dim = tl.arange(0, TILE_D)
    head = kv_head * GROUP + packed % GROUP
    # No hoisting out of the loop: values kept over all requests would take too many registers.
    for request in tl.range(first_request, last_request + 1, disable_licm=True):
        first_flat, count = rows_of_request(request, num_rows, firsts, counts)
        is_query = (row < count)[:, None] & (dim < HEAD_DIM)[None, :]
        flat_row = first_flat + row
        queries = tl.load(
            query + (flat_row * query_row + head * query_head)[:, None] + dim[None, :], mask=is_query, other=0.0
        )
        context_len = tl.load(context_lens + request).to(tl.int32)
        readable_len = tl.minimum(context_len, max_len)
        context_tile, num_context, block_tile, block_tile_end = tiles_in_sight(
            context_len, readable_len, first_row, last_row, num_rows, IS_CAUSAL, WINDOW, TILE_N
        )
        passed_then = passed + num_context + block_tile_end - block_tile
        context_begin, context_end, block_begin, block_end, is_last = share_of_tiles(
            begin - passed, tl.minimum(end, passed_then) - passed, context_tile, num_context, block_tile, block_tile_end
        )
        mean, lses = mean_of_share(
            queries, row, dim, head, sinks, key_cache + kv_head * cache_head, value_cache + kv_head * cache_head,
            cache_page, cache_row, page_table + request * table_stride, context_len, readable_len,
            block_keys + first_flat * keys_row + kv_head * keys_head,
            block_values + first_flat * values_row + kv_head * values_head, keys_row, values_row, count,
            context_begin, context_end, block_begin, block_end, is_last, scale, value_scale,
            HEAD_DIM, PAGE_SIZE, IS_CAUSAL, WINDOW, CAP, TILE_M, TILE_N, TILE_D,
        )  # fmt: skip
        is_first = begin == passed
        if is_first & is_last:
            target = (flat_row * (NUM_KV * GROUP) + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out + target, mean.to(out.dtype.element_ty), mask=is_query)
        else:
            # A program has at most two parts: the end of one request and the beginning of another.
            place = (2 * program + is_first.to(tl.int64)) * tl.num_programs(0) + row_tile
            place = (place * NUM_KV + kv_head) * TILE_M + tl.arange(0, TILE_M)
            tl.store(part_lses + place, lses, mask=row < count)
            tl.store(parts + place[:, None] * HEAD_DIM + dim[None, :], mean, mask=is_query)
        passed = passed_then
        begin = passed_then


@jit(do_not_specialize=["num_whole"])
def _combine_shares_kernel(
    context_lens, firsts, counts, parts, part_lses, out,
    num_requests, num_rows, max_len, num_programs, num_whole, num_row_tiles,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TILE_B: tl.constexpr, TILE_C: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
    TOGETHER: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    first_packed = tl.program_id(0) * TILE_C
    row_tile = first_packed // TILE_M
    kv_head = tl.program_id(1).to(tl.int64)
    first_row, last_row = rows_of_tile(row_tile, num_rows, GROUP, TILE_M)
    num_tiles, share, is_whole = _share(
        context_lens, num_requests, max_len, first_row, last_row, num_rows, num_programs, num_whole,
        IS_CAUSAL, WINDOW, TILE_B, TILE_N,
    )  # fmt: skip
    # The previous launch may still run until here: it does not write the lengths.
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    request = tl.arange(0, TILE_B)
    passed = tl.sum(tl.where(request < tl.program_id(2), num_tiles, 0), 0)
    own = tl.sum(tl.where(request == tl.program_id(2), num_tiles, 0), 0)
    first, last = passed // share, (passed + own - 1) // share
    if (first < last) & ~is_whole:  # otherwise one program has computed the whole request
        packed = first_packed + tl.arange(0, TILE_C)
        row = packed // GROUP
        dim = tl.arange(0, TILE_D)
        first_flat, count = rows_of_request(tl.program_id(2).to(tl.int64), num_rows, firsts, counts)
        is_row = row < count
        is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]
        acc = tl.zeros((TILE_C, TILE_D), tl.float32)
        max_lse = tl.full((TILE_C,), float("-inf"), tl.float32)
        weight_sum = tl.zeros((TILE_C,), tl.float32)
        for step in range(first, last + 1, TOGETHER):
            for offset in tl.static_range(TOGETHER):
                program = step + offset
                is_part = program <= last
                place = (2 * program + (program == first).to(tl.int64)) * num_row_tiles + row_tile
                place = (place * NUM_KV + kv_head) * TILE_M + packed % TILE_M
                lse = tl.load(part_lses + place, mask=is_row & is_part, other=float("-inf"))
                mean = tl.load(parts + place[:, None] * HEAD_DIM + dim[None, :], mask=is_element & is_part, other=0.0)
                new_max = tl.maximum(max_lse, lse)
                shift = tl.where(new_max == float("-inf"), 0.0, new_max)
                rescale, weight = tl.exp2(max_lse - shift), tl.exp2(lse - shift)
                acc = acc * rescale[:, None] + mean * weight[:, None]
                weight_sum = weight_sum * rescale + weight
                max_lse = new_max
        target = (first_flat + row) * (NUM_KV * GROUP) + kv_head * GROUP + packed % GROUP
        combined = acc / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
        tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], combined.to(out.dtype.element_ty), mask=is_element)


def launch_balanced(
    tensors: Sequence[Tensor],
    page_table: Tensor,
    context_lens: Tensor,
    firsts: Tensor | None,
    counts: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    shape: BalancedShape,
    strides: Sequence[int],
    num_rows: int,
    *,
    page_size: int,
    is_causal: bool,
    window: int | None,
    cap: float | None,
    scale: float,
    value_scale: float,
) -> None:
    """Write block attention to `out` [T, H, D] in two launches. The arguments are as in `launch_blocks`, and checked.

    strides  row and head of each of the first three tensors; page, row and head of the caches; row of the page table
    cap      limit of the products of queries and keys
    scale    factor of these products; `value_scale` is the factor of the values
    """
    num_requests, (_, num_heads, head_dim), num_kv = len(context_lens), out.shape, tensors[1].shape[1]
    num_packed = num_rows * num_heads // num_kv
    num_row_tiles = ceil_div(num_packed, shape.rows)
    num_places = 2 * shape.num_programs * num_row_tiles * num_kv * shape.rows
    parts = torch.empty((num_places, head_dim), dtype=torch.float32, device=out.device)
    part_lses = torch.empty(num_places, dtype=torch.float32, device=out.device)
    cut: dict[str, Any] = {
        "NUM_KV": num_kv, "GROUP": num_heads // num_kv, "HEAD_DIM": head_dim,
        "IS_CAUSAL": is_causal, "WINDOW": window or 0,
        "TILE_B": power_of_2(num_requests), "TILE_M": shape.rows, "TILE_N": shape.keys,
        "TILE_D": max(power_of_2(head_dim), MIN_DOT), **early(out.device),
    }  # fmt: skip
    _balanced_attention_kernel[(num_row_tiles, num_kv, shape.num_programs)](
        *tensors, page_table, context_lens, firsts, counts, sinks, out, parts, part_lses, *strides,
        num_requests, num_rows, page_table.shape[1], shape.num_whole, scale, value_scale,
        PAGE_SIZE=page_size, CAP=cap, **cut, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    tile = min(shape.rows, shape.combined_rows)
    _combine_shares_kernel[(ceil_div(num_packed, tile), num_kv, num_requests)](
        context_lens, firsts, counts, parts, part_lses, out, num_requests, num_rows, page_table.shape[1] * page_size,
        shape.num_programs, shape.num_whole, num_row_tiles, TILE_C=tile, TOGETHER=4, **cut, num_warps=4,
    )  # fmt: skip
