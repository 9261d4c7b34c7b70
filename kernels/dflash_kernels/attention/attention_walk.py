"""Device functions of the attention kernels: which tiles of keys a program reads, and the running softmax over them.

Used by `block_attention.py`, `balanced_attention.py`, `ragged_attention.py` and `tree_attention.py`. A program holds
TILE_M packed rows of one KV head of one request. It keeps a running softmax over tiles of TILE_N keys. Source: Milakov
and Gimelshein 2018, "Online normalizer calculation for softmax".
"""

import math

from dflash_kernels.kv.kv_format import beside_cache, from_cache
from dflash_kernels.launch import constexpr, jit, tl

_TL_LOG2E = constexpr(math.log2(math.e))


@jit
def begin_softmax(sinks, head, is_last, TILE_M: tl.constexpr, TILE_D: tl.constexpr):
    """Return an empty running softmax: weighted values, highest score and sum of weights of each row.

    A sink has a weight but no value. If the keys are cut into parts, only the last part counts the sink.
    """
    row_max = tl.full((TILE_M,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((TILE_M,), tl.float32)
    if sinks is not None:
        row_max = tl.where(is_last, tl.load(sinks + head).to(tl.float32) * _TL_LOG2E, row_max)
        weight_sum = tl.where(is_last, 1.0, weight_sum)
    return tl.zeros((TILE_M, TILE_D), tl.float32), row_max, weight_sum


@jit
def cap_scores(scores, CAP: tl.constexpr):
    """Return CAP * tanh(scores / CAP). Near zero it uses the series, because exponentials would lose most digits."""
    ratio = scores * (1.0 / CAP)
    square = ratio * ratio
    series = ratio * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    power = tl.exp2(tl.abs(ratio) * (-2.0 * _TL_LOG2E))
    quotient = (1.0 - power) / (1.0 + power)
    return CAP * tl.where(square < 1 / 16, series, tl.where(ratio < 0, -quotient, quotient))


@jit
def _attend(
    queries, keys, values, is_visible, acc, row_max, weight_sum, scale, CAP: tl.constexpr, IS_FULL: tl.constexpr
):
    """Add one tile of keys to a running softmax in base 2. `row_max` is -inf for rows without a visible key so far."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if CAP is not None:
        scores = cap_scores(scores, CAP)
    if not IS_FULL:
        scores = tl.where(is_visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])  # scaling costs nothing here
    rescale = tl.exp2(row_max - shift)
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, weight_sum * rescale + tl.sum(weights, 1)


@jit
def rows_of_tile(row_tile, num_rows, GROUP: tl.constexpr, TILE_M: tl.constexpr):
    """Return the first and the last row of a tile of packed rows."""
    return row_tile * TILE_M // GROUP, tl.minimum((row_tile * TILE_M + TILE_M - 1) // GROUP, num_rows - 1)


@jit
def rows_of_request(request, num_rows, firsts, counts):
    """Return a request's first flat row and its number of rows.

    Every request has `num_rows` rows, one after another. With `counts` it has the first of them only, from the flat row
    on that `firsts` has for its row 0.
    """
    if counts is None:
        first, count = request * num_rows, num_rows
    else:
        first, count = tl.load(firsts + request * num_rows), tl.load(counts + request).to(tl.int32)
    return first, count


@jit
def tiles_in_sight(
    context_len, readable_len, first_row, last_row, num_rows,
    IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Return the tiles of keys that the rows `first_row` to `last_row` can see.

    Returns the first context tile, the number of context tiles, the first block tile and the end of the block tiles.
    Lengths are scalars of one request or vectors of several.
    """
    context_start, block_start, block_end = context_len * 0, 0, num_rows
    if IS_CAUSAL:
        block_end = last_row + 1
    if WINDOW:
        context_start = tl.maximum(context_len + first_row - WINDOW + 1, 0)
        block_start = tl.maximum(first_row - WINDOW + 1, 0)
        if not IS_CAUSAL:
            block_end = tl.minimum(last_row + WINDOW, num_rows)
    context_tile = context_start // TILE_N
    num_context = tl.maximum(tl.cdiv(readable_len, TILE_N) - context_tile, 0)
    return context_tile, num_context, block_start // TILE_N, tl.cdiv(block_end, TILE_N)


@jit
def share_of_tiles(begin, end, context_tile, num_context, block_tile, block_tile_end):
    """Split the visible tiles `[begin, end)` into an interval of context tiles and an interval of block tiles.

    Also returns whether `[begin, end)` contains the last visible tile.
    """
    return (
        context_tile + tl.minimum(begin, num_context),
        context_tile + tl.minimum(end, num_context),
        block_tile + tl.maximum(begin - num_context, 0),
        block_tile + tl.maximum(end - num_context, 0),
        (begin < end) & (end == num_context + block_tile_end - block_tile),
    )


@jit
def context_rows(page_table, position, readable_len, page_stride, row_stride, PAGE_SIZE: tl.constexpr):
    """Return the offsets of context positions in the caches, from the request's row of the page table.

    Offsets of positions at or after `readable_len` are arbitrary.
    """
    page = tl.load(page_table + position // PAGE_SIZE, mask=position < readable_len, other=0).to(tl.int64)
    return page * page_stride + (position % PAGE_SIZE).to(tl.int64) * row_stride


@jit
def load_rows(source, begin, dim, is_key, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, IS_FULL: tl.constexpr):
    """Load a tile of keys or values, [TILE_N, TILE_D], at the offsets `begin`.

    Memory after the last key may hold NaN; these rows are loaded as zero.
    """
    address = source + begin[:, None] + dim[None, :]
    if IS_FULL and HEAD_DIM == TILE_D:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=is_key[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    return tile


@jit
def _load_keys(
    source, begin, dim, is_key, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, IS_FULL: tl.constexpr, ARE_VALUES: tl.constexpr = False,
):  # fmt: skip
    """As `load_rows`, converted to a dtype."""
    return from_cache(load_rows(source, begin, dim, is_key, HEAD_DIM, TILE_D, IS_FULL), dtype, ARE_VALUES)


@jit
def _is_seen(position, row, context_len, readable_len, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return which rows see the context keys at some positions, [1 or TILE_M, TILE_N]."""
    is_seen = (position < readable_len)[None, :]
    if IS_CAUSAL:
        is_seen = is_seen & (position[None, :] <= context_len + row[:, None])
    if WINDOW:
        is_seen = is_seen & (context_len + row[:, None] - position[None, :] < WINDOW)
    return is_seen


@jit
def walk_context(
    queries, row, dim, keys, values, page_stride, row_stride, page_table, context_len, readable_len, begin, end,
    acc, row_max, weight_sum, scale,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_FULL: tl.constexpr, key=None, first_keys=None, first_values=None,
):  # fmt: skip
    """Add the tiles `[begin, end)` of the paged keys to a running softmax.

    IS_FULL: every row sees every key, so no mask is needed. IS_CAUSAL: the pages also hold the rows' own keys, after
    the context. `key`: offsets of the first tile's keys, if the caller has already computed them. `first_keys` and
    `first_values`: the first tile, if there is one and the caller has already loaded it. Then `key` belongs to the
    second tile, and the first tile is added last.
    """
    queries = beside_cache(queries, keys.dtype.element_ty)
    if key is None:
        first = begin * TILE_N + tl.arange(0, TILE_N)
        key = context_rows(page_table, first, readable_len, page_stride, row_stride, PAGE_SIZE)
    for step in range(begin if first_keys is None else begin + 1, end):
        position = step * TILE_N + tl.arange(0, TILE_N)
        is_key = position < readable_len
        # Look up the pages of the next tile now: a load is not prefetched if its address comes from a load.
        next_key = context_rows(page_table, position + TILE_N, readable_len, page_stride, row_stride, PAGE_SIZE)
        key_tile = _load_keys(keys, key, dim, is_key, queries.dtype, HEAD_DIM, TILE_D, IS_FULL)
        value_tile = _load_keys(values, key, dim, is_key, queries.dtype, HEAD_DIM, TILE_D, IS_FULL, True)
        key = next_key
        is_seen = _is_seen(position, row, context_len, readable_len, IS_CAUSAL, WINDOW)
        acc, row_max, weight_sum = _attend(
            queries, key_tile, value_tile, is_seen, acc, row_max, weight_sum, scale, CAP, IS_FULL
        )
    if first_keys is not None:
        position = begin * TILE_N + tl.arange(0, TILE_N)
        is_seen = _is_seen(position, row, context_len, readable_len, IS_CAUSAL, WINDOW)
        acc, row_max, weight_sum = _attend(
            queries, from_cache(first_keys, queries.dtype), from_cache(first_values, queries.dtype), is_seen,
            acc, row_max, weight_sum, scale, CAP, IS_FULL,
        )  # fmt: skip
    return acc, row_max, weight_sum


@jit
def walk_block(
    queries, row, dim, keys, values, keys_row, values_row, num_rows, begin, end, acc, row_max, weight_sum, scale,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_FULL: tl.constexpr, NUM_STAGES: tl.constexpr = None,
):  # fmt: skip
    """Add the tiles `[begin, end)` of the block's keys to a running softmax. IS_FULL: every row sees every key.

    NUM_STAGES: tiles in flight; None for the number that the launch states.
    """
    for step in tl.range(begin, end, num_stages=NUM_STAGES):
        position = step * TILE_N + tl.arange(0, TILE_N)
        is_key = position < num_rows
        at = position.to(tl.int64)
        key_tile = _load_keys(keys, at * keys_row, dim, is_key, queries.dtype, HEAD_DIM, TILE_D, IS_FULL)
        value_tile = _load_keys(values, at * values_row, dim, is_key, queries.dtype, HEAD_DIM, TILE_D, IS_FULL, True)
        is_visible = is_key[None, :]
        if IS_CAUSAL:
            is_visible = is_visible & (position[None, :] <= row[:, None])
        if WINDOW:
            distance = row[:, None] - position[None, :]
            is_visible = is_visible & (distance < WINDOW) & (distance > -WINDOW)
        acc, row_max, weight_sum = _attend(
            queries, key_tile, value_tile, is_visible, acc, row_max, weight_sum, scale, CAP, IS_FULL
        )
    return acc, row_max, weight_sum


@jit
def walk_tree(
    queries, depth, dim, depths, word, words, is_row, keys, values, keys_row, values_row, num_rows, begin, end,
    acc, row_max, weight_sum, scale,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
    NUM_WORDS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Add the tiles `[begin, end)` of a tree's keys to a running softmax. The bits of `words` say what a row sees.

    A tile of keys needs one word per row, because 64 is a multiple of TILE_N. `NUM_STAGES` is as in `walk_block`.

    depth   [TILE_M] depth of each query row
    depths  depths of the tree's rows
    word    [TILE_M] first word of each query row
    words   [TILE_M] addresses of the first word of each query row
    """
    tl.static_assert(64 % TILE_N == 0)
    for step in tl.range(begin, end, num_stages=NUM_STAGES):
        other = step * TILE_N + tl.arange(0, TILE_N)
        is_key = other < num_rows
        if NUM_WORDS > 1:
            word = tl.load(words + step * TILE_N // 64, mask=is_row, other=0)
        at = other.to(tl.int64)
        key_tile = _load_keys(keys, at * keys_row, dim, is_key, queries.dtype, HEAD_DIM, TILE_D, False)
        value_tile = _load_keys(values, at * values_row, dim, is_key, queries.dtype, HEAD_DIM, TILE_D, False, True)
        is_visible = is_key[None, :] & (((word[:, None] >> (at % 64)[None, :]) & 1) != 0)
        if WINDOW:
            other_depth = tl.load(depths + other, mask=is_key, other=0).to(tl.int32)
            is_visible = is_visible & (depth[:, None] - other_depth[None, :] < WINDOW)
        acc, row_max, weight_sum = _attend(
            queries, key_tile, value_tile, is_visible, acc, row_max, weight_sum, scale, CAP, False
        )
    return acc, row_max, weight_sum


@jit
def mean_of_share(
    queries, row, dim, head, sinks, keys, values, page_stride, row_stride, page_table, context_len, readable_len,
    block_keys, block_values, block_keys_row, block_values_row, num_rows,
    context_begin, context_end, block_begin, block_end, is_last, scale, value_scale,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, key=None,
):  # fmt: skip
    """Attend to some tiles of a request's context and of its block.

    `scale` multiplies the products of queries and keys, and `value_scale` the values. Returns the weighted mean of the
    values, [TILE_M, TILE_D], and the base 2 logarithm of the sum of weights, [TILE_M]. The logarithm is -inf for
    rows that see none of these keys. `key` is as in `walk_context`.
    """
    acc, row_max, weight_sum = begin_softmax(sinks, head, is_last, TILE_M, TILE_D)
    acc, row_max, weight_sum = walk_context(
        queries, row, dim, keys, values, page_stride, row_stride, page_table, context_len, readable_len,
        context_begin, context_end, acc, row_max, weight_sum, scale,
        HEAD_DIM, PAGE_SIZE, False, WINDOW, CAP, TILE_N, TILE_D, False, key,
    )  # fmt: skip
    # Few rows have one tile of keys. Room for more would take shared memory from tiles of an FP8 context.
    BLOCK_STAGES: tl.constexpr = 1 if TILE_M <= 16 else None
    acc, row_max, weight_sum = walk_block(
        queries, row, dim, block_keys, block_values, block_keys_row, block_values_row, num_rows,
        block_begin, block_end, acc, row_max, weight_sum, scale,
        HEAD_DIM, IS_CAUSAL, WINDOW, CAP, TILE_N, TILE_D, False, BLOCK_STAGES,
    )  # fmt: skip
    weight_sum = tl.where(weight_sum > 0, weight_sum, 1.0)
    return acc * value_scale / weight_sum[:, None], row_max + tl.log2(weight_sum)


@jit
def walk_rows(
    queries, row, dim, head, sinks, key_cache, value_cache, cache_page, cache_row, table,
    keys, values, keys_row, values_row, key_tiles, value_tiles, tiles_row, tiles_dim,
    context_len, num_rows, first_row, last_row, part, num_parts, scale,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Return the running softmax over one part of a segment's keys: the paged context, then the segment's own keys.

    `key_tiles` and `value_tiles` are descriptors of the segment's own keys and values, or None. In these tensors the
    segment begins at row `tiles_row` and column `tiles_dim`.
    """
    context_tile, num_context, block_tile, block_tile_end = tiles_in_sight(
        context_len, context_len, first_row, last_row, num_rows, True, WINDOW, TILE_N
    )
    num_tiles = num_context + block_tile_end - block_tile
    context_begin, context_end, block_begin, block_end, is_last = share_of_tiles(
        part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts,
        context_tile, num_context, block_tile, block_tile_end,
    )  # fmt: skip
    # Tiles that all rows see completely come first and need no mask. With a window there may be no such tile.
    full_context, full_block = context_begin, block_begin
    if not WINDOW:
        full_context = tl.minimum(tl.maximum(context_len // TILE_N, context_begin), context_end)
        full_block = tl.minimum(tl.maximum((first_row + 1) // TILE_N, block_begin), block_end)
    acc, row_max, weight_sum = begin_softmax(sinks, head, is_last, TILE_M, TILE_D)
    if not WINDOW:
        acc, row_max, weight_sum = walk_context(
            queries, row, dim, key_cache, value_cache, cache_page, cache_row, table, context_len, context_len,
            context_begin, full_context, acc, row_max, weight_sum, scale,
            HEAD_DIM, PAGE_SIZE, False, WINDOW, CAP, TILE_N, TILE_D, True,
        )  # fmt: skip
        if key_tiles is None:
            acc, row_max, weight_sum = walk_block(
                queries, row, dim, keys, values, keys_row, values_row, num_rows, block_begin, full_block,
                acc, row_max, weight_sum, scale, HEAD_DIM, True, WINDOW, CAP, TILE_N, TILE_D, True,
            )  # fmt: skip
        else:
            for step in range(block_begin, full_block):
                key_tile = key_tiles.load([tiles_row + step * TILE_N, tiles_dim])
                value_tile = value_tiles.load([tiles_row + step * TILE_N, tiles_dim])
                acc, row_max, weight_sum = _attend(
                    queries, key_tile, value_tile, None, acc, row_max, weight_sum, scale, CAP, True
                )
    acc, row_max, weight_sum = walk_context(
        queries, row, dim, key_cache, value_cache, cache_page, cache_row, table, context_len, context_len,
        full_context, context_end, acc, row_max, weight_sum, scale,
        HEAD_DIM, PAGE_SIZE, False, WINDOW, CAP, TILE_N, TILE_D, False,
    )  # fmt: skip
    return walk_block(
        queries, row, dim, keys, values, keys_row, values_row, num_rows, full_block, block_end,
        acc, row_max, weight_sum, scale, HEAD_DIM, True, WINDOW, CAP, TILE_N, TILE_D, False,
    )  # fmt: skip
