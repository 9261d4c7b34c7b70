"""Rows of hidden states sorted by expert, in the order in which tensor cores read them from shared memory.

The routes of an expert are cut into tiles of up to R rows. A tile lies in memory as it will lie in shared memory. So
one copy loads a piece: 64 columns of the first row, then of the second row, and so on. A row of a piece has 128 bytes
in eight chunks. Tensor cores expect chunk i of row r at place i ^ (r % 8). Chunk 2 j has the columns
16 j + 4 t + (0, 1), with t from 0 to 3. Chunk 2 j + 1 has the columns 16 j + 4 t + (2, 3). In this order a thread
multiplies adjacent numbers of a packed weight (`mxfp4.py`).

A table says which tile a program computes. Each expert has its first tile at its own id, and other tiles behind.

Axis letters: T rows, C chosen experts per row, E experts, R rows of a tile, S most tiles, K columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, jit, power_of_2, tl

PIECE = 64
"""Columns that one copy loads. A row of a piece has 128 bytes."""

TILE_WORDS = 64
"""Words of two columns that a program arranges."""


@dataclass(frozen=True, slots=True)
class ArrangedRows:
    """The rows of all routes, sorted by expert.

    rows    [T C, K]   tile after tile, K a multiple of 64
    routes  [T C]      int32, the route of each place
    tiles   [S, 4]     int32: expert, first place, number of rows, and zero. The first E entries lack the expert
    """

    rows: Tensor
    routes: Tensor
    tiles: Tensor


@jit
def place_in_tile(row, column, num_rows):
    """Return where the elements of a tile have a column of a row."""
    within = column % 16
    chunk = column % 64 // 16 * 2 + within // 2 % 2
    return column // 64 * (num_rows * 64) + row * 64 + (chunk ^ (row & 7)) * 8 + within // 4 * 2 + within % 2


@jit
def _write_table(tiles, expert, begin, count, ROWS: tl.constexpr, TILE_T: tl.constexpr):
    """Write the entries of an expert's tiles. Places behind the first tiles that no tile needs get no rows."""
    tl.store(tiles + 4 * expert + 1, begin)
    tl.store(tiles + 4 * expert + 2, tl.minimum(count, ROWS))
    tl.store(tiles + 4 * expert + 3, 0)
    place = begin // ROWS + tl.arange(0, TILE_T)
    is_its = place < (begin + count) // ROWS  # the next expert's places begin here, and these are enough
    first = (1 + tl.arange(0, TILE_T)) * ROWS
    entry = tiles + 4 * (tl.num_programs(0) + place)
    tl.store(entry, expert, mask=is_its)
    tl.store(entry + 1, begin + first, mask=is_its)
    tl.store(entry + 2, tl.maximum(tl.minimum(count - first, ROWS), 0), mask=is_its)
    tl.store(entry + 3, 0, mask=is_its)


@jit(do_not_specialize=["num_rows"])
def _arrange_rows_kernel(
    hidden, chosen, rows, routes, tiles, num_rows, HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr,
    TILE_W: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch is gate and up
    NUM_WORDS: tl.constexpr = (WIDTH + 63) // 64 * 32
    expert = tl.program_id(0)
    row, place = tl.arange(0, TILE_T)[:, None], tl.arange(0, TILE_P)[None, :]
    route, is_route = row * NUM_CHOSEN + place, (row < num_rows) & (place < NUM_CHOSEN)
    ids = tl.load(chosen + route, mask=is_route, other=1 << 30, cache_modifier=".cg").to(tl.int32)
    its_route = tl.max(tl.where(ids == expert, route, -1), 1)
    is_its = (its_route >= 0).to(tl.int32)
    counts = tl.sum(tl.sum((ids < expert).to(tl.int32), 1) + is_its * 65536, 0)
    begin, count = counts & 65535, counts >> 16
    rank = tl.where(its_route >= 0, tl.cumsum(is_its, 0) - 1, -1)
    of_tile = tl.arange(0, TILE_R)
    if tl.program_id(1) == 0:
        _write_table(tiles, expert, begin, count, ROWS, TILE_T)
        tl.store(routes + begin + rank, its_route, mask=rank >= 0)
    # Two columns are one word. Stores are in order, so loads are not.
    word = tl.program_id(1) * TILE_W + tl.arange(0, TILE_W)
    piece, within = word // 32, word % 32
    chunk = (within[None, :] // 4) ^ (of_tile[:, None] & 7)
    source = piece[None, :] * 32 + chunk // 2 * 8 + within[None, :] % 4 * 2 + chunk % 2
    for first in range(0, count, ROWS):
        in_tile = tl.minimum(count - first, ROWS)
        found = tl.sum(tl.where(rank[None, :] == (first + of_tile)[:, None], its_route[None, :], 0), 1)
        hidden_words = hidden.to(tl.pointer_type(tl.int32)) + (found // NUM_CHOSEN).to(tl.int64) * (HIDDEN_ROW // 2)
        is_word = (of_tile < in_tile)[:, None] & (word < NUM_WORDS)[None, :]
        value = tl.load(hidden_words[:, None] + source, mask=is_word & (source < WIDTH // 2), other=0)
        to = rows.to(tl.pointer_type(tl.int32)) + (begin + first) * NUM_WORDS
        tl.store(to + piece[None, :] * (in_tile * 32) + of_tile[:, None] * 32 + within[None, :], value, mask=is_word)


def arranged_width(width: int) -> int:
    """Return the columns of arranged rows: whole pieces."""
    return ceil_div(width, PIECE) * PIECE


def arrange_rows(hidden: Tensor, chosen: Tensor, num_experts: int, tile_rows: int) -> ArrangedRows:
    """Sort the rows of `hidden` [T, K] by the experts that they chose, in tiles of up to `tile_rows` rows.

    hidden  bfloat16, rows that begin at multiples of 4 bytes, an even number of columns
    chosen  [T, C] int64, different ids within a row
    """
    num_rows, num_chosen = chosen.shape
    num_routes, width = num_rows * num_chosen, hidden.shape[1]
    rows = torch.empty((num_routes, arranged_width(width)), dtype=hidden.dtype, device=hidden.device)
    routes = torch.empty(num_routes, dtype=torch.int32, device=hidden.device)
    tiles = torch.empty((num_experts + num_routes // tile_rows, 4), dtype=torch.int32, device=hidden.device)
    _arrange_rows_kernel[(num_experts, ceil_div(arranged_width(width) // 2, TILE_WORDS))](
        hidden, chosen, rows, routes, tiles, num_rows, HIDDEN_ROW=hidden.stride(0), NUM_CHOSEN=num_chosen,
        WIDTH=width, ROWS=tile_rows, TILE_T=power_of_2(num_rows), TILE_P=power_of_2(num_chosen),
        TILE_R=power_of_2(tile_rows), TILE_W=TILE_WORDS, num_warps=4, **early(hidden.device),
    )  # fmt: skip
    return ArrangedRows(rows, routes, tiles)
