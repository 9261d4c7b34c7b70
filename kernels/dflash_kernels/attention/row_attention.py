"""Attention of one new row per request, from the projection to the result, in one launch: as in plain decoding.

Between the products of a plain step there is little work, and each launch costs more than its work. This launch
replaces three: it adds up the parts of the projection, normalises and rotates heads, stores the new key and value,
attends, and adds up the parts of the keys. Of a KV head, each part of the context has a program, and so has the new
row. The last one to finish adds up what all of them found.

A program loads its first tile of keys and values before it waits for the projection. The next launch, the output
projection, begins after this wait and loads its weights meanwhile.

Axis letters: R requests, P parts of the projection, S parts of the keys, H query heads, KV heads of keys and values, D
head dim, C context.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_kernels.attention.attention_config import AttentionShape, row_attention_shape
from dflash_kernels.attention.attention_walk import begin_softmax, cap_scores, context_rows, load_rows, walk_context
from dflash_kernels.attention.block_attention import block_attention, block_attention_ref
from dflash_kernels.attention.softmax import PLAIN, Softmax, cap_of_products, check_softmax, factor_of_products
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.kv.kv_store import row_of_slot, strides_of_caches
from dflash_kernels.kv.rope_store import HALVES, KVPlace, Turn, rope_store, rope_store_ref
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.launch_config import MIN_DOT
from dflash_kernels.norms.rope_norm import (
    check_parts,
    check_weight,
    norm_half_tiles,
    rotate_half_tiles,
    sum_parts,
)

_TL_LOG2E = constexpr(math.log2(math.e))


class RowContext(NamedTuple):
    """Where the new row of each request is stored, and the context that it attends to."""

    place: KVPlace
    page_table: Tensor
    """[R, C / page_size] int64"""
    context_lens: Tensor
    """[R] int64"""
    window: int | None
    """As in `block_attention_ref`."""
    arrivals: Tensor
    """int32 zeros, in which a launch counts its programs. It sets them back. With fewer than R * KV, it needs none."""


def row_attention_ref(
    parts: Tensor,
    head_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    num_kv: int,
    context: RowContext,
    turn: Turn = HALVES,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Store the key and value of one new row per request, and attend from it to its context and to itself.

    The arguments but `context` are as in `rope_store_ref`, with R rows, and as in `block_attention_ref`.
    Returns [R, H, D].
    """
    return attend_in_turn(
        rope_store_ref, block_attention_ref, parts, head_norms, eps, cos, sin, num_kv, context, turn, softmax
    )


def attend_in_turn(store: Callable[..., Tensor], attend: Callable[..., Tensor], *given: Any) -> Tensor:
    """Compute `row_attention_ref` by a function that stores keys and values, and one that attends. `given`: all of its
    arguments.
    """
    *projection, num_kv, context, turn, softmax = given
    place = context.place
    rows = store(*projection, num_kv, place, turn)[:, None]
    heads = rows.split((rows.shape[2] - 2 * num_kv, num_kv, num_kv), dim=2)
    return attend(
        *heads, place.key_cache, place.value_cache, context.page_table, context.context_lens,
        is_causal=True, window=context.window, softmax=softmax, scales=place.scales,
    )[:, 0]  # fmt: skip


@jit
def _halves(source, is_element, HALF: tl.constexpr):
    """Load both halves of heads from pointers to their first halves."""
    return tl.load(source, mask=is_element, other=0.0), tl.load(source + HALF, mask=is_element, other=0.0)


@jit
def _summed_halves(
    parts, source, is_element, part_stride, HALF: tl.constexpr, NUM_PARTS: tl.constexpr, dtype: tl.constexpr
):
    """Add up both halves of heads over the parts of the projection."""
    first = sum_parts(parts, source, is_element, part_stride, NUM_PARTS, dtype)
    return first, sum_parts(parts, source + HALF, is_element, part_stride, NUM_PARTS, dtype)


@jit
def _turned(halves, norms, cos, sin, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return both halves of heads after norm and rotation, rounded as `rope_store` does. All arguments are pairs."""
    first, second = halves[0], halves[1]
    if HAS_NORM:
        first, second = norm_half_tiles(first, second, norms[0], norms[1], eps, HEAD_DIM)
    return rotate_half_tiles(first, second, cos[0], cos[1], sin[0], sin[1])


@jit
def _normed_value(value, norm, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return the value of a new row [D] after its norm, rounded as `rope_store` does."""
    if HAS_NORM:
        wide = value.to(tl.float32)
        scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / HEAD_DIM + eps)
        value = (scaled.to(norm.dtype).to(tl.float32) * norm.to(tl.float32)).to(value.dtype)
    return value


@jit
def _context_part(
    projection, query, norms, cos, sin, is_query, keys, values, table, context_len, readable_len, begin, end,
    means, lses, first_place, part_stride, cache_page, cache_row, eps, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    NUM_PARTS: tl.constexpr, HAS_NORM: tl.constexpr, dtype: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_G: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles `[begin, end)` of the context, and write the mean and the logarithm of the weights."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dim, position = tl.arange(0, HEAD_DIM), begin * TILE_N + tl.arange(0, TILE_N)
    key = context_rows(table, position, readable_len, cache_page, cache_row, PAGE_SIZE)
    first_keys = load_rows(keys, key, dim, position < readable_len, HEAD_DIM, HEAD_DIM, False)
    first_values = load_rows(values, key, dim, position < readable_len, HEAD_DIM, HEAD_DIM, False)
    key = context_rows(table, position + TILE_N, readable_len, cache_page, cache_row, PAGE_SIZE)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch is a product, which loads its weights
    halves = _summed_halves(projection, query, is_query, part_stride, HALF, NUM_PARTS, dtype)
    first, second = _turned(halves, norms, cos, sin, eps, HEAD_DIM, HAS_NORM)
    queries = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (TILE_G, HEAD_DIM))
    # Tensor cores take TILE_M rows: repeat the query heads.
    queries = tl.reshape(tl.broadcast_to(queries[None], (TILE_M // TILE_G, TILE_G, HEAD_DIM)), (TILE_M, HEAD_DIM))
    row = tl.arange(0, TILE_M)
    acc, row_max, weight_sum = begin_softmax(None, row, False, TILE_M, HEAD_DIM)
    acc, row_max, weight_sum = walk_context(
        queries, row * 0, dim, keys, values, cache_page, cache_row, table, context_len, readable_len, begin, end,
        acc, row_max, weight_sum, scale,
        HEAD_DIM, PAGE_SIZE, False, WINDOW, CAP, TILE_N, HEAD_DIM, False, key, first_keys, first_values,
    )  # fmt: skip
    weight_sum = tl.where(weight_sum > 0, weight_sum, 1.0)  # the window may hide all of these keys
    place, is_row = first_place + row, row < GROUP
    tl.store(lses + place, row_max + tl.log2(weight_sum), mask=is_row)
    tl.store(means + place[:, None] * HEAD_DIM + dim[None, :], acc / weight_sum[:, None], mask=is_row[:, None])


@jit
def _new_row_part(
    projection, query, own_key, own_value, norms, key_norms, value_norms, cos, sin, is_query, keys, values, slot, sinks,
    means, lses, first_place, part_stride, cache_page, cache_row, eps, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, CAP: tl.constexpr,
    NUM_PARTS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_VALUE_NORM: tl.constexpr, dtype: tl.constexpr,
    TILE_G: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Store the new key and value, and write their part of attention, which has the sinks."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dim, half_dim, group = tl.arange(0, HEAD_DIM), tl.arange(0, HALF)[None, :], tl.arange(0, TILE_G)
    is_half, is_head = half_dim < HALF, group < GROUP
    key_norm, value_norm = norms, dim
    if HAS_NORM:
        key_norm = _halves(key_norms + half_dim, is_half, HALF)
    if HAS_VALUE_NORM:
        value_norm = tl.load(value_norms + dim)
    if sinks is not None:
        sink = tl.load(sinks + group, mask=is_head, other=0.0).to(tl.float32) * _TL_LOG2E
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    halves = _summed_halves(projection, query, is_query, part_stride, HALF, NUM_PARTS, dtype)
    key_halves = _summed_halves(projection, own_key + half_dim, is_half, part_stride, HALF, NUM_PARTS, dtype)
    value = sum_parts(projection, own_value + dim, dim < HEAD_DIM, part_stride, NUM_PARTS, dtype)
    key_first, key_second = _turned(key_halves, key_norm, cos, sin, eps, HEAD_DIM, HAS_NORM)
    first, second = _turned(halves, norms, cos, sin, eps, HEAD_DIM, HAS_NORM)
    value = _normed_value(value, value_norm, eps, HEAD_DIM, HAS_VALUE_NORM)
    stored = row_of_slot(slot, cache_page, cache_row, PAGE_SIZE)
    tl.store(keys + stored + half_dim, key_first, mask=is_half & (slot >= 0))
    tl.store(keys + stored + half_dim + HALF, key_second, mask=is_half & (slot >= 0))
    tl.store(values + stored + dim, value, mask=(dim < HEAD_DIM) & (slot >= 0))
    products = first.to(tl.float32) * key_first.to(tl.float32) + second.to(tl.float32) * key_second.to(tl.float32)
    lse = tl.sum(products, 1)
    if CAP is not None:
        lse = cap_scores(lse, CAP)
    lse *= scale
    mean = tl.broadcast_to(value.to(tl.float32)[None, :], (TILE_G, HEAD_DIM))
    if sinks is not None:
        highest = tl.maximum(lse, sink)
        weight = tl.exp2(lse - highest)
        weight_sum = weight + tl.exp2(sink - highest)
        mean, lse = mean * (weight / weight_sum)[:, None], highest + tl.log2(weight_sum)
    tl.store(lses + first_place + group, lse, mask=is_head)
    tl.store(means + (first_place + group)[:, None] * HEAD_DIM + dim[None, :], mean, mask=is_head[:, None])


@jit
def _add_parts(
    means, lses, out, place, is_row, num_parts, num_out,
    HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, TILE_G: tl.constexpr,
):  # fmt: skip
    """Write the weighted mean of all parts of the rows at `place` [TILE_G]. L1 may lack what other programs wrote."""
    dim = tl.arange(0, HEAD_DIM)
    part_lses, part_means = (), ()
    for part in tl.static_range(NUM_SPLITS + 1):
        is_part, at = is_row & ((part < num_parts) | (part == NUM_SPLITS)), part * num_out + place
        element = at[:, None] * HEAD_DIM + dim[None, :]
        part_lses += (tl.load(lses + at, mask=is_part, other=float("-inf"), cache_modifier=".cg"),)  # type: ignore[assignment]
        part_means += (tl.load(means + element, mask=is_part[:, None], other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    max_lse = tl.full((TILE_G,), float("-inf"), tl.float32)
    for part in tl.static_range(NUM_SPLITS + 1):
        max_lse = tl.maximum(max_lse, part_lses[part])
    max_lse = tl.where(is_row, max_lse, 0.0)
    acc, weight_sum = tl.zeros((TILE_G, HEAD_DIM), tl.float32), tl.zeros((TILE_G,), tl.float32)
    for part in tl.static_range(NUM_SPLITS + 1):
        weight = tl.exp2(part_lses[part] - max_lse)
        acc += part_means[part] * weight[:, None]
        weight_sum += weight
    combined = acc / tl.where(is_row, weight_sum, 1.0)[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + dim[None, :], combined.to(out.dtype.element_ty), mask=is_row[:, None])


@jit
def _row_attention_kernel(
    projection, weight, cos, sin, key_cache, value_cache, slots, page_table, context_lens, sinks,
    means, lses, arrivals, out,
    projection_row, part_stride, cos_row, sin_row, cache_page, cache_row, cache_head, table_stride,
    num_pages, num_out, eps, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, NUM_PARTS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_VALUE_NORM: tl.constexpr,
    HAS_EQUAL_KV: tl.constexpr, NUM_SPLITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_G: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out.dtype.element_ty
    request, kv_head, part = (tl.program_id(0) // NUM_KV).to(tl.int64), tl.program_id(0) % NUM_KV, tl.program_id(1)
    # Until the wait: the previous launch writes neither lengths, nor page tables, nor rows of the context.
    context_len = tl.load(context_lens + request).to(tl.int32)
    readable_len = tl.minimum(context_len, num_pages * PAGE_SIZE)
    first_tile = context_len * 0
    if WINDOW:
        first_tile = tl.maximum(context_len - WINDOW + 1, 0) // TILE_N
    num_tiles = tl.maximum(tl.cdiv(readable_len, TILE_N) - first_tile, 0)
    num_parts = tl.minimum(num_tiles, NUM_SPLITS)
    if (part >= num_parts) & (part < NUM_SPLITS):
        return  # the program of the new row waits for the launches before
    half_dim, group = tl.arange(0, HALF)[None, :], tl.arange(0, TILE_G)
    first_head = kv_head * GROUP
    head, is_query = first_head + group[:, None], (group < GROUP)[:, None] & (half_dim < HALF)
    turn_cos = _halves(cos + request * cos_row + half_dim, half_dim < HALF, HALF)
    turn_sin = _halves(sin + request * sin_row + half_dim, half_dim < HALF, HALF)
    norms = turn_cos
    if HAS_NORM:
        norms = _halves(weight + head * HEAD_DIM + half_dim, is_query, HALF)
    own = request * projection_row
    query = own + head * HEAD_DIM + half_dim
    keys, values = key_cache + kv_head * cache_head, value_cache + kv_head * cache_head
    first_place = request * NUM_KV * GROUP + first_head
    if part < NUM_SPLITS:
        begin, end = first_tile + part * num_tiles // num_parts, first_tile + (part + 1) * num_tiles // num_parts
        _context_part(
            projection, query, norms, turn_cos, turn_sin, is_query, keys, values, page_table + request * table_stride,
            context_len, readable_len, begin, end, means, lses, part * num_out + first_place,
            part_stride, cache_page, cache_row, eps, scale,
            GROUP, HEAD_DIM, PAGE_SIZE, WINDOW, CAP, NUM_PARTS, HAS_NORM, dtype, TILE_M, TILE_N, TILE_G, IS_EARLY,
        )  # fmt: skip
    else:
        key_head = NUM_KV * GROUP + kv_head
        value_head = key_head if HAS_EQUAL_KV else key_head + NUM_KV
        _new_row_part(
            projection, query, own + key_head * HEAD_DIM, own + value_head * HEAD_DIM,
            norms, weight + key_head * HEAD_DIM, weight + (key_head + NUM_KV) * HEAD_DIM, turn_cos, turn_sin, is_query,
            keys, values, tl.load(slots + request).to(tl.int64), None if sinks is None else sinks + first_head,
            means, lses, part * num_out + first_place, part_stride, cache_page, cache_row, eps, scale,
            GROUP, HEAD_DIM, PAGE_SIZE, CAP, NUM_PARTS, HAS_NORM, HAS_VALUE_NORM, dtype, TILE_G, IS_EARLY,
        )  # fmt: skip
    tl.debug_barrier()  # all threads have written
    if tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel") == num_parts:
        tl.store(arrivals + tl.program_id(0), 0)
        _add_parts(
            means, lses, out, first_place + group, group < GROUP, num_parts, num_out, HEAD_DIM, NUM_SPLITS, TILE_G
        )


def row_attention(
    parts: Tensor,
    head_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    num_kv: int,
    context: RowContext,
    turn: Turn = HALVES,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """Compute `row_attention_ref` in one launch, or in two or three if one does not suit these heads or requests."""
    num_heads = _query_heads(parts, head_norms, cos, num_kv)
    shape = _shape_of(parts, cos, num_heads, num_kv, context, turn)
    if shape is None:
        return attend_in_turn(
            rope_store, block_attention, parts, head_norms, eps, cos, sin, num_kv, context, turn, softmax
        )  # fmt: skip
    place, page_table, context_lens, window, arrivals = context
    caches, norms = (place.key_cache, place.value_cache), () if head_norms is None else (head_norms,)
    check_tensors(parts, cos, sin, *caches, place.slots, page_table, context_lens, arrivals, *norms)
    check_dtypes(cos, sin, *caches)
    check_parts(parts, cos.dtype)
    for norm in norms:
        check_weight(norm, cos.dtype)
    (num_parts, num_requests, _), head_dim, page_size = parts.shape, cos.shape[1], place.key_cache.shape[1]
    require(num_heads > 0 and num_heads % num_kv == 0, "parts", "a number of heads that is a multiple of the KV heads")
    num_norms = 0 if head_norms is None else len(head_norms)
    require(
        num_norms in (0, num_heads + num_kv, num_heads + 2 * num_kv), "head_norms", "one norm per query and key head"
    )
    require(cos.shape == sin.shape == (num_requests, head_dim), "cos, sin", "one row per row of the projection")
    require(parts.stride(2) == cos.stride(1) == sin.stride(1) == 1, "parts, cos, sin", "contiguous rows")
    require(place.key_cache.shape[2:] == (num_kv, head_dim), "caches", "the KV heads of the projection")
    is_per_request = place.slots.numel() == len(page_table) == len(context_lens) == num_requests
    require(is_per_request and page_table.stride(1) == 1, "context", "one slot, length and row of pages per request")
    out = torch.empty((num_requests, num_heads, head_dim), dtype=cos.dtype, device=cos.device)
    check_softmax(softmax, out)
    num_splits = min(shape.num_splits, max(1, ceil_div(page_table.shape[1] * page_size, shape.keys)))
    num_out = num_requests * num_heads
    means = torch.empty((num_splits + 1, num_out, head_dim), dtype=torch.float32, device=cos.device)
    lses = torch.empty((num_splits + 1, num_out), dtype=torch.float32, device=cos.device)
    _row_attention_kernel[(num_requests * num_kv, num_splits + 1)](
        parts, cos if head_norms is None else head_norms.contiguous(), cos, sin, *caches, place.slots.contiguous(),
        page_table, context_lens.contiguous(), softmax.sinks, means, lses, arrivals, out,
        parts.stride(1), parts.stride(0), cos.stride(0), sin.stride(0), *strides_of_caches(*caches),
        page_table.stride(0), page_table.shape[1], num_out, eps, factor_of_products(head_dim, place.scales),
        NUM_KV=num_kv, GROUP=num_heads // num_kv, HEAD_DIM=head_dim, PAGE_SIZE=page_size, WINDOW=window or 0,
        CAP=cap_of_products(softmax, head_dim, place.scales), NUM_PARTS=num_parts, HAS_NORM=num_norms > 0,
        HAS_VALUE_NORM=num_norms == num_heads + 2 * num_kv,
        HAS_EQUAL_KV=num_heads + num_kv == parts.shape[2] // head_dim, NUM_SPLITS=num_splits,
        TILE_M=MIN_DOT, TILE_N=shape.keys, TILE_G=power_of_2(num_heads // num_kv),
        num_warps=shape.num_warps, num_stages=shape.num_stages, enable_fp_fusion=False, **early(cos.device),
    )  # fmt: skip
    return out


def _query_heads(parts: Tensor, head_norms: Tensor | None, cos: Tensor, num_kv: int) -> int:
    """Return the number of query heads of a projection with rope over whole heads. Values may be keys."""
    num_heads = parts.shape[2] // cos.shape[1]
    has_equal_kv = head_norms is not None and len(head_norms) == num_heads + num_kv
    return num_heads - (1 if has_equal_kv else 2) * num_kv


def _shape_of(
    parts: Tensor, cos: Tensor, num_heads: int, num_kv: int, context: RowContext, turn: Turn
) -> AttentionShape | None:
    """Return the tiling of one launch, or None if it computes something else or is slower than several."""
    num_groups, cache = parts.shape[1] * num_kv, context.place.key_cache
    has_whole_rope = turn.head_dim in (None, cos.shape[1]) and turn._replace(head_dim=None) == HALVES
    if not has_whole_rope or cache.dtype != cos.dtype or not 0 < num_groups <= context.arrivals.numel():
        return None
    return row_attention_shape(num_groups, num_heads // num_kv, cos.shape[1], cos.element_size(), cos.device)
