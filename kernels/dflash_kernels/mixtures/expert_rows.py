"""The rows of one expert and their products in one program, for the kernels of experts.

A program computes an expert's rows in one tile of columns: gate and up with the gate, or `down` with the score.

Axis letters: T rows, E experts, C chosen experts per row, R rows of a tile.
"""

from dflash_kernels.launch import jit, tl
from dflash_kernels.mixtures.mxfp4 import packed_product_tile
from dflash_kernels.products.activation import joined_tiles


@jit
def all_routes(num_rows, NUM_CHOSEN: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr):
    """Return the index of each route, [TILE_T, TILE_P], and a mask of the existing routes."""
    row, place = tl.arange(0, TILE_T)[:, None], tl.arange(0, TILE_P)[None, :]
    return row * NUM_CHOSEN + place, (row < num_rows) & (place < NUM_CHOSEN)


@jit
def find_rows(chosen, index, num_rows, NUM_CHOSEN: tl.constexpr, IS_BY_ROUTE: tl.constexpr, TILE_T: tl.constexpr,
                TILE_P: tl.constexpr):  # fmt: skip
    """Return a program's expert, the number of rows that chose it, and each row's rank among them and its route.

    Rows that did not choose the expert have the rank -1. With one program per route, only the program of an expert's
    first route has rows.
    """
    route, is_route = all_routes(num_rows, NUM_CHOSEN, TILE_T, TILE_P)
    ids = tl.load(chosen + route, mask=is_route, other=-1).to(tl.int32)
    expert = index
    if IS_BY_ROUTE:
        expert = tl.load(chosen + index).to(tl.int32)
    its_route = tl.max(tl.where(ids == expert, route, -1), 1)  # a row chooses an expert at most once
    is_its = (its_route >= 0).to(tl.int32)
    count = tl.sum(is_its, 0)
    if IS_BY_ROUTE:
        first = tl.min(tl.where(its_route >= 0, its_route, TILE_T * NUM_CHOSEN), 0)
        count = tl.where(first == index, count, 0)
    rank = tl.where(its_route >= 0, tl.cumsum(is_its, 0) - 1, -1)
    return expert, count, rank, its_route


@jit
def find_scored_rows(chosen, scores, index, num_rows, NUM_CHOSEN: tl.constexpr, IS_BY_ROUTE: tl.constexpr,
                       TILE_T: tl.constexpr, TILE_P: tl.constexpr):  # fmt: skip
    """As `find_rows`, and each row's score for the expert. Scores and routes are read at the same time."""
    routes, is_route = all_routes(num_rows, NUM_CHOSEN, TILE_T, TILE_P)
    score_tile = tl.load(scores + routes, mask=is_route, other=0.0).to(tl.float32)
    expert, count, rank, its_route = find_rows(chosen, index, num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P)
    its_score = tl.sum(tl.where(routes == its_route[:, None], score_tile, 0.0), 1)
    return expert, count, rank, its_route, its_score


@jit
def find_tile(ends, index, NUM_EXPERTS: tl.constexpr, TILE_E: tl.constexpr, TILE_R: tl.constexpr):
    """Return the expert of a tile of sorted routes, and the first route and the end of the tile.

    The tiles of an expert begin at its first route. Programs after the last tile get an empty one.
    """
    expert = tl.arange(0, TILE_E)
    end = tl.load(ends + expert, mask=expert < NUM_EXPERTS, other=0)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < NUM_EXPERTS), other=0)
    tiles = (end - begin + TILE_R - 1) // TILE_R
    tiles = tl.where(expert < NUM_EXPERTS, tiles, 0)
    upto = tl.cumsum(tiles, 0)
    is_its = (upto > index) & (upto - tiles <= index)
    first = tl.sum(tl.where(is_its, begin + (index - upto + tiles) * TILE_R, 0), 0)
    last = tl.sum(tl.where(is_its, end, 0), 0)
    return tl.sum(tl.where(is_its, expert, 0), 0), first, tl.minimum(last, first + TILE_R)


@jit
def at_ranks(values, rank, first, TILE_R: tl.constexpr):
    """Return the values [TILE_R] of the rows with the ranks from `first` on. Ranks without a row give 0."""
    is_at = rank[None, :] == (first + tl.arange(0, TILE_R))[:, None]
    return tl.sum(tl.where(is_at, values[None, :], 0), 1)


@jit
def _plain_product_tile(
    weight_rows, hidden_rows, is_column, is_row,
    DEPTH: tl.constexpr, TILE_C: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Multiply weight rows with hidden rows, given as pointers to their first elements: float32 [TILE_C, TILE_R]."""
    inner = tl.arange(0, TILE_K)
    acc = tl.zeros((TILE_C, TILE_R), tl.float32)
    for tile in range((DEPTH + TILE_K - 1) // TILE_K):
        begin = tile * TILE_K
        is_element, is_weight = is_row[:, None], is_column[:, None]
        if DEPTH % TILE_K:
            is_element = is_element & (begin + inner < DEPTH)[None, :]
            is_weight = is_weight & (begin + inner < DEPTH)[None, :]
        rows = tl.trans(tl.load(hidden_rows[:, None] + inner[None, :] + begin, mask=is_element, other=0.0))
        # Each weight is read once per step, so it should not displace other data in the cache.
        loaded = tl.load(
            weight_rows[:, None] + inner[None, :] + begin, mask=is_weight, other=0.0, eviction_policy="evict_first"
        )
        acc = tl.dot(loaded, rows, acc, input_precision="ieee")
    return acc


@jit
def _product_tile(
    weight, scales, expert, column, hidden_rows, is_column, is_row,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_PACKED: tl.constexpr, IS_FAST: tl.constexpr,
    TILE_C: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows `column` of an expert's weight with hidden rows, which are pointers: float32 [TILE_C, TILE_R]."""
    if IS_PACKED:
        acc = packed_product_tile(
            weight, scales, expert, column, hidden_rows, is_column, is_row, NUM_COLUMNS, DEPTH, IS_FAST, TILE_C, TILE_R
        )
    else:
        weight_rows = weight + (expert.to(tl.int64) * NUM_COLUMNS + column) * DEPTH
        acc = _plain_product_tile(weight_rows, hidden_rows, is_column, is_row, DEPTH, TILE_C, TILE_R, TILE_K)
    return acc


@jit
def gated_rows(
    hidden, weight, scales, bias, order, out, expert, begin, count, rank, its_route, tile,
    HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_SORTED: tl.constexpr, IS_PACKED: tl.constexpr, IS_FAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    TILE_R: tl.constexpr, TILE_F: tl.constexpr, TILE_K: tl.constexpr, NUM_PROGRAMS: tl.constexpr = 1,
):  # fmt: skip
    """Write gate(x) * up(x) of an expert's rows from `begin` to `count`, in a tile of TILE_F of its WIDTH columns.

    `NUM_PROGRAMS` programs share the rows: each computes a tile of rows and skips the tiles of the others.
    """
    dtype = out.dtype.element_ty
    # Rows of the gate, then rows of `up`: one product with a tile size that suits tensor cores.
    side = tl.arange(0, 2 * TILE_F)
    out_column = tile * TILE_F + tl.arange(0, TILE_F)
    is_column = tile * TILE_F + side % TILE_F < WIDTH
    column = side // TILE_F * WIDTH + tile * TILE_F + side % TILE_F
    for first in range(begin, count, NUM_PROGRAMS * TILE_R):
        is_row = first + tl.arange(0, TILE_R) < count
        if IS_SORTED:
            route = tl.load(order + first + tl.arange(0, TILE_R), mask=is_row, other=0).to(tl.int32)
        else:
            route = at_ranks(its_route, rank, first, TILE_R)
        hidden_rows = hidden + (route // NUM_CHOSEN).to(tl.int64) * HIDDEN_ROW
        acc = _product_tile(
            weight, scales, expert, column, hidden_rows, is_column, is_row,
            2 * WIDTH, DEPTH, IS_PACKED, IS_FAST, 2 * TILE_F, TILE_R, TILE_K,
        )  # fmt: skip
        if HAS_BIAS:
            added = tl.load(bias + expert.to(tl.int64) * 2 * WIDTH + column, mask=is_column, other=0.0)
            acc += added.to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, TILE_F, TILE_R)), (1, 2, 0)))
        gated = joined_tiles(gate.to(dtype), up.to(dtype), KIND, ALPHA, LIMIT)
        place = route[None, :].to(tl.int64) * WIDTH + out_column[:, None]
        tl.store(out + place, gated, mask=is_row[None, :] & (out_column < WIDTH)[:, None])


@jit
def down_rows(
    hidden, weight, scales, bias, scores, order, out, num_rows, expert, begin, count, rank, its_route, its_score, tile,
    NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_SORTED: tl.constexpr, IS_PACKED: tl.constexpr, IS_FAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr, NUM_PROGRAMS: tl.constexpr = 1,
):  # fmt: skip
    """Write down(x) * score of an expert's rows from `begin` to `count`, in a tile of TILE_C of its WIDTH columns.

    `NUM_PROGRAMS` is as in `gated_rows`.
    """
    dtype = out.dtype.element_ty
    column = tile * TILE_C + tl.arange(0, TILE_C)
    is_column = column < WIDTH
    for first in range(begin, count, NUM_PROGRAMS * TILE_R):
        is_row = first + tl.arange(0, TILE_R) < count
        if IS_SORTED:
            route = tl.load(order + first + tl.arange(0, TILE_R), mask=is_row, other=0).to(tl.int32)
            score = tl.load(scores + route, mask=is_row, other=0.0).to(tl.float32)
        else:
            route = at_ranks(its_route, rank, first, TILE_R)
            score = at_ranks(its_score, rank, first, TILE_R)
        hidden_rows = hidden + route.to(tl.int64) * DEPTH
        acc = _product_tile(
            weight, scales, expert, column, hidden_rows, is_column, is_row,
            WIDTH, DEPTH, IS_PACKED, IS_FAST, TILE_C, TILE_R, TILE_K,
        )  # fmt: skip
        if HAS_BIAS:
            added = tl.load(bias + expert.to(tl.int64) * WIDTH + column, mask=is_column, other=0.0)
            acc += added.to(tl.float32)[:, None]
        scored = (acc.to(dtype).to(tl.float32) * score[None, :]).to(dtype)
        part_row = (route % NUM_CHOSEN).to(tl.int64) * num_rows + route // NUM_CHOSEN
        place = part_row[None, :] * WIDTH + column[:, None]
        tl.store(out + place, scored, mask=is_row[None, :] & is_column[:, None])
