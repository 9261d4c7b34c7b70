"""How one attention program walks over its keys: which tiles are its own, and what it makes of each.

Device functions of `block_attention.py` and `ragged_attention.py`. A program holds TILE_M packed rows of one KV head of
one request and keeps a running softmax over tiles of TILE_N keys (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax").
"""

import math

from dflash_kernels.launch_config import constexpr, jit, tl

_TL_LOG2E = constexpr(math.log2(math.e))


@jit
def begin_softmax(sinks, head, is_last, TILE_M: tl.constexpr, TILE_D: tl.constexpr):
    """A running softmax before any key: weighted values, highest score and sum of weights of each row.

    Sinks have weight and no value. The last part of the keys is the one that counts them.
    """
    row_max = tl.full((TILE_M,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((TILE_M,), tl.float32)
    if sinks is not None:
        row_max = tl.where(is_last, tl.load(sinks + head).to(tl.float32) * _TL_LOG2E, row_max)
        weight_sum = tl.where(is_last, 1.0, weight_sum)
    return tl.zeros((TILE_M, TILE_D), tl.float32), row_max, weight_sum


@jit
def _cap_scores(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP): near zero by its series, since exponentials there leave few digits."""
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
    """Add one tile of keys to a running softmax, in base 2. Rows that have seen no key yet keep `row_max` at -inf."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if CAP is not None:
        scores = _cap_scores(scores, CAP)
    if not IS_FULL:
        scores = tl.where(is_visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - shift[:, None])  # one operation an element: scaling is left for here
    rescale = tl.exp2(row_max - shift)
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, weight_sum * rescale + tl.sum(weights, 1)


@jit
def rows_of_tile(row_tile, num_rows, GROUP: tl.constexpr, TILE_M: tl.constexpr):
    """The first and the last row of a tile of packed rows."""
    return row_tile * TILE_M // GROUP, tl.minimum((row_tile * TILE_M + TILE_M - 1) // GROUP, num_rows - 1)


@jit
def tiles_in_sight(
    context_len, readable_len, first_row, last_row, num_rows,
    IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The tiles of keys that some of these rows can see: the first of the context and how many, the first of the block
    and the end of those. Lengths may be one request's or a vector of many.
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
    """Which tiles of the context and of the block the tiles `[begin, end)` in sight are, two intervals `[begin, end)`;
    and whether the last one in sight is among them.
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
    """Where rows of positions in a request's context begin in its caches, through its row of the page table; past the
    context's end, any.
    """
    page = tl.load(page_table + position // PAGE_SIZE, mask=position < readable_len, other=0).to(tl.int64)
    return page * page_stride + (position % PAGE_SIZE).to(tl.int64) * row_stride


@jit
def _load_keys(source, begin, dim, is_key, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, IS_FULL: tl.constexpr):
    """[TILE_N, TILE_D] of keys or values, from where each begins. Rows past the last key may be NaN in memory and are
    returned as zero.
    """
    address = source + begin[:, None] + dim[None, :]
    if IS_FULL and HEAD_DIM == TILE_D:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=is_key[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    return tile


@jit
def walk_context(
    queries, row, dim, keys, values, page_stride, row_stride, page_table, context_len, readable_len, begin, end,
    acc, row_max, weight_sum, scale,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_FULL: tl.constexpr, key=None,
):  # fmt: skip
    """Walk tiles `[begin, end)` of what lies in pages. IS_FULL says that every row sees every key of them.

    IS_CAUSAL is for keys of rows themselves that lie there too, behind the context. `key` is where the keys of the
    first tile begin, for who has looked them up.
    """
    if key is None:
        first = begin * TILE_N + tl.arange(0, TILE_N)
        key = context_rows(page_table, first, readable_len, page_stride, row_stride, PAGE_SIZE)
    for step in range(begin, end):
        position = step * TILE_N + tl.arange(0, TILE_N)
        is_key = position < readable_len
        # Pages are looked up a tile ahead: keys whose address waits for a load would not be fetched ahead of their use.
        next_key = context_rows(page_table, position + TILE_N, readable_len, page_stride, row_stride, PAGE_SIZE)
        key_tile = _load_keys(keys, key, dim, is_key, HEAD_DIM, TILE_D, IS_FULL)
        value_tile = _load_keys(values, key, dim, is_key, HEAD_DIM, TILE_D, IS_FULL)
        key = next_key
        is_visible = is_key[None, :]
        if IS_CAUSAL:
            is_visible = is_visible & (position[None, :] <= context_len + row[:, None])
        if WINDOW:
            is_visible = is_visible & (context_len + row[:, None] - position[None, :] < WINDOW)
        acc, row_max, weight_sum = _attend(
            queries, key_tile, value_tile, is_visible, acc, row_max, weight_sum, scale, CAP, IS_FULL
        )
    return acc, row_max, weight_sum


@jit
def walk_block(
    queries, row, dim, keys, values, keys_row, values_row, num_rows, begin, end, acc, row_max, weight_sum, scale,
    HEAD_DIM: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_N: tl.constexpr, TILE_D: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Walk tiles `[begin, end)` of the block's own keys. IS_FULL says that every row sees every key of them."""
    for step in range(begin, end):
        position = step * TILE_N + tl.arange(0, TILE_N)
        is_key = position < num_rows
        key_tile = _load_keys(keys, position.to(tl.int64) * keys_row, dim, is_key, HEAD_DIM, TILE_D, IS_FULL)
        value_tile = _load_keys(values, position.to(tl.int64) * values_row, dim, is_key, HEAD_DIM, TILE_D, IS_FULL)
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
def mean_of_share(
    queries, row, dim, head, sinks, keys, values, page_stride, row_stride, page_table, context_len, readable_len,
    block_keys, block_values, block_keys_row, block_values_row, num_rows,
    context_begin, context_end, block_begin, block_end, is_last, scale,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, key=None,
):  # fmt: skip
    """Walk these tiles of a request's context and of its block -> weighted mean of the values, [TILE_M, TILE_D], and
    the base 2 logarithm of the sum of weights, [TILE_M]: -inf for rows that see nothing here. `key` as in a context.
    """
    acc, row_max, weight_sum = begin_softmax(sinks, head, is_last, TILE_M, TILE_D)
    acc, row_max, weight_sum = walk_context(
        queries, row, dim, keys, values, page_stride, row_stride, page_table, context_len, readable_len,
        context_begin, context_end, acc, row_max, weight_sum, scale,
        HEAD_DIM, PAGE_SIZE, False, WINDOW, CAP, TILE_N, TILE_D, False, key,
    )  # fmt: skip
    acc, row_max, weight_sum = walk_block(
        queries, row, dim, block_keys, block_values, block_keys_row, block_values_row, num_rows,
        block_begin, block_end, acc, row_max, weight_sum, scale,
        HEAD_DIM, IS_CAUSAL, WINDOW, CAP, TILE_N, TILE_D, False,
    )  # fmt: skip
    weight_sum = tl.where(weight_sum > 0, weight_sum, 1.0)
    return acc / weight_sum[:, None], row_max + tl.log2(weight_sum)


@jit
def walk_rows(
    queries, row, dim, head, sinks, key_cache, value_cache, cache_page, cache_row, table,
    keys, values, keys_row, values_row, key_tiles, value_tiles, tiles_row, tiles_dim,
    context_len, num_rows, first_row, last_row, part, num_parts, scale,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Walk a part of the context in its pages, and of the segment's own keys as they came -> a running softmax.

    `key_tiles` and `value_tiles` are descriptors of those, which begin at `tiles_row` and `tiles_dim` there; or None.
    """
    context_tile, num_context, block_tile, block_tile_end = tiles_in_sight(
        context_len, context_len, first_row, last_row, num_rows, True, WINDOW, TILE_N
    )
    num_tiles = num_context + block_tile_end - block_tile
    context_begin, context_end, block_begin, block_end, is_last = share_of_tiles(
        part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts,
        context_tile, num_context, block_tile, block_tile_end,
    )  # fmt: skip
    # Tiles that all rows see whole come first, and need no mask; with a window there may be none.
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
