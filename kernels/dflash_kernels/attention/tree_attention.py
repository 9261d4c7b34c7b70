"""Attention of a tree's rows over paged context and over each row's own ancestors.

It differs from `block_attention.py` in the block: a row sees only the rows of its path, and its position is
`context_len + depth`. All rows of a tree are verified in one forward, although several rows have one position.

The kernel packs rows and query heads into tiles as `block_attention.py` does. If few requests leave the device idle, it
also cuts the keys into parts (`key_parts.py`). Every row sees the whole context, so only tiles of the tree's own keys
need the ancestors.

Axis letters: R requests, M rows of a tree, P pages, H heads, KV heads of keys and values, D head dim, S words.
"""

from typing import Any

import torch
from torch import Tensor

from dflash_kernels.attention.attention_config import attention_shape
from dflash_kernels.attention.attention_rows import check_blocks, check_room, flat_blocks, room_for
from dflash_kernels.attention.attention_walk import (
    begin_softmax,
    context_rows,
    share_of_tiles,
    tiles_in_sight,
    walk_context,
    walk_tree,
)
from dflash_kernels.attention.block_attention import attend_ref
from dflash_kernels.attention.key_parts import combine_parts, parts_in_use, room_for_parts
from dflash_kernels.attention.softmax import PLAIN, Softmax, cap_of_products, factor_of_products
from dflash_kernels.drafts.draft_tree import TreeRows, is_ancestor
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.kv.kv_format import UNSCALED, KVScales, as_readable
from dflash_kernels.launch import ceil_div, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.launch_config import MIN_DOT


def tree_attention_ref(
    query: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    tree: TreeRows,
    *,
    window: int | None,
    softmax: Softmax = PLAIN,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each row to the context and to its ancestors, itself included.

    Tensors are as in `block_attention_ref`, with M rows in each block. A window counts positions, so it depends on the
    depths of rows, not on their order. Returns [R, M, H, D].
    """
    num_rows, num_keys = query.shape[1], page_table.shape[1] * key_cache.shape[1]
    context = torch.arange(num_keys, device=query.device)
    positions = context_lens[:, None] + tree.depths
    is_context = context < context_lens[:, None]
    visible = torch.cat((is_context[:, None].expand(-1, num_rows, -1), is_ancestor(tree.words)), dim=2)
    if window is not None:
        key_positions = torch.cat((context.expand(len(positions), -1), positions), dim=1)
        visible = visible & (positions[:, :, None] - key_positions[:, None] < window)
    return attend_ref(
        query, block_keys, block_values, key_cache, value_cache, page_table, is_context, visible, softmax, scales, out
    )


@jit
def _tree_attention_kernel(
    query, block_keys, block_values, key_cache, value_cache, page_table, context_lens, depths, words, sinks,
    out, part_lses, query_row, query_head, keys_row, keys_head, values_row, values_head,
    cache_page, cache_row, cache_head, table_stride,
    num_rows, num_pages, num_out, scale, value_scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, NUM_WORDS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    request = (tl.program_id(1) // NUM_KV).to(tl.int64)
    kv_head = (tl.program_id(1) % NUM_KV).to(tl.int64)
    context_len = tl.load(context_lens + request).to(tl.int32)
    readable_len = tl.minimum(context_len, num_pages * PAGE_SIZE)
    # The anchor is the row that sees the farthest back, so all row tiles see the same keys.
    context_tile, num_context, block_tile, block_tile_end = tiles_in_sight(
        context_len, readable_len, 0, num_rows - 1, num_rows, True, WINDOW, TILE_N
    )
    num_tiles = num_context + block_tile_end - block_tile
    num_parts = parts_in_use(num_tiles, NUM_SPLITS, TILE_N)
    part = tl.program_id(2)
    context_begin, context_end, block_begin, block_end, is_last = share_of_tiles(
        part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts,
        context_tile, num_context, block_tile, block_tile_end,
    )  # fmt: skip
    table = page_table + request * table_stride
    first = context_begin * TILE_N + tl.arange(0, TILE_N)
    key = context_rows(table, first, readable_len, cache_page, cache_row, PAGE_SIZE)
    # The previous launch may still run until here: it writes neither lengths nor page tables.
    wait_for_launches_before(IS_EARLY)
    if NUM_SPLITS > 1:
        let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    if part >= num_parts:
        return  # the next launch ignores this part
    packed = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    row, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    is_row = row < num_rows
    dim = tl.arange(0, TILE_D)
    is_query = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    flat_row = request * num_rows + row
    queries = tl.load(
        query + (flat_row * query_row + head * query_head)[:, None] + dim[None, :], mask=is_query, other=0.0
    )
    depth = tl.load(depths + flat_row, mask=is_row, other=0).to(tl.int32)
    word = tl.load(words + flat_row * NUM_WORDS, mask=is_row, other=0)
    acc, row_max, weight_sum = begin_softmax(sinks, head, is_last, TILE_M, TILE_D)
    acc, row_max, weight_sum = walk_context(
        queries, depth, dim, key_cache + kv_head * cache_head, value_cache + kv_head * cache_head, cache_page,
        cache_row, table, context_len, readable_len, context_begin, context_end, acc, row_max, weight_sum, scale,
        HEAD_DIM, PAGE_SIZE, False, WINDOW, CAP, TILE_N, TILE_D, False, key,
    )  # fmt: skip
    TREE_STAGES: tl.constexpr = 1 if TILE_M <= 16 else None  # as in `mean_of_share`
    acc, row_max, weight_sum = walk_tree(
        queries, depth, dim, depths + request * num_rows, word, words + flat_row * NUM_WORDS, is_row,
        block_keys + request * num_rows * keys_row + kv_head * keys_head,
        block_values + request * num_rows * values_row + kv_head * values_head, keys_row, values_row, num_rows,
        block_begin, block_end, acc, row_max, weight_sum, scale,
        HEAD_DIM, WINDOW, CAP, TILE_N, TILE_D, NUM_WORDS, TREE_STAGES,
    )  # fmt: skip
    weight_sum = tl.where(weight_sum > 0, weight_sum, 1.0)
    mean = acc * value_scale / weight_sum[:, None]
    target = flat_row * (NUM_KV * GROUP) + head + part.to(tl.int64) * num_out
    if NUM_SPLITS > 1:
        tl.store(part_lses + target, row_max + tl.log2(weight_sum), mask=is_row)
    tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], mean.to(out.dtype.element_ty), mask=is_query)


def tree_attention(
    query: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    tree: TreeRows,
    *,
    window: int | None,
    softmax: Softmax = PLAIN,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `tree_attention_ref` in one launch, or in two if the keys are cut into parts.

    The number of parts depends on shapes only, so a captured graph serves every context that fits its page table.
    """
    check_blocks(query, block_keys, block_values, key_cache, value_cache, page_table, context_lens, window, softmax)
    check_tensors(query, *tree)
    (num_requests, num_rows, num_heads, head_dim), num_kv = query.shape, block_keys.shape[2]
    require(tree.depths.shape == tree.words.shape[:2] == (num_requests, num_rows), "tree", "one entry per query row")
    out = room_for(query) if out is None else out
    check_room(out, query)
    if not out.numel():
        return out
    flat, strides = flat_blocks(query, block_keys, block_values, key_cache, value_cache, page_table)
    group, page_size, num_pages = num_heads // num_kv, key_cache.shape[1], page_table.shape[1]
    num_packed, num_out = num_rows * group, num_requests * num_rows * num_heads
    shape = attention_shape(num_requests * num_kv, num_packed, head_dim, query.element_size(), query.device)
    max_tiles = ceil_div(num_pages * page_size, shape.keys) + ceil_div(num_rows, shape.keys)
    num_splits, context_lens = min(shape.num_splits, max_tiles), context_lens.contiguous()
    parts, part_lses = room_for_parts(num_splits, num_out, out)
    cut: dict[str, Any] = {
        "NUM_KV": num_kv, "GROUP": group, "HEAD_DIM": head_dim, "PAGE_SIZE": page_size, "WINDOW": window or 0,
        "NUM_SPLITS": num_splits, "TILE_N": shape.keys, "TILE_D": max(power_of_2(head_dim), MIN_DOT),
        **early(query.device),
    }  # fmt: skip
    _tree_attention_kernel[(ceil_div(num_packed, shape.rows), num_requests * num_kv, num_splits)](
        *flat, as_readable(key_cache), as_readable(value_cache), page_table, context_lens,
        tree.depths.contiguous(), tree.words.contiguous(), softmax.sinks, parts, part_lses, *strides,
        num_rows, num_pages, num_out, factor_of_products(head_dim, scales), scales.value,
        CAP=cap_of_products(softmax, head_dim, scales), NUM_WORDS=tree.words.shape[2], TILE_M=shape.rows, **cut,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        # In one tile of all packed rows, every row sees the keys that the anchor and the last row see.
        whole = {**cut, "IS_CAUSAL": True, "TILE_M": power_of_2(num_packed)}
        combine_parts(parts, part_lses, context_lens, out.flatten(0, 1), num_rows, num_pages, whole)
    return out
