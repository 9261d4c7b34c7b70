"""The gated delta rule over chunks of prompts, many rows at a time.

Within a piece of 64 rows the corrections solve a triangular system, so that a piece needs products of matrices and only
the pieces run one after another. The sums have another order than row by row, so results differ in the last bits.

The first launch computes everything that needs no state, for all pieces at once: the inverse of each triangular system,
and how much each row reads of the corrections before it. The second launch runs the pieces of a chunk in order, one
program per head and tile of columns of its state. Lengths of queries and keys are factors of sums, so products read the
rows as they are.
Sources: arXiv 2412.06464; huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.

Axis letters: T rows, H value heads, G key heads, V and K sizes of a value and a key, B texts, N rows of a piece,
E chunks, P pieces, C = 2 * G * K + H * V channels: queries, keys, values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.attention.ragged_attention import Segment
from dflash_kernels.launch import ceil_div, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.recurrent.delta_rule import (
    EPSILON,
    STATE_TILE,
    Gates,
    gate_values,
    load_gates,
    room_for,
    state_places,
    state_tiles,
    whole_states,
)

PIECE = 64

VALUE_TILE = 32
"""Columns of a state in one program."""


class PromptChunks(NamedTuple):
    """Chunks of prompts in flat rows, and their pieces. Chunks and pieces without rows are padding."""

    chunks: Tensor
    """[5, E] int64: first flat row, number of rows, rows of the text before them, text, first piece"""
    pieces: Tensor
    """[2, P] int64: first flat row, number of rows"""

    @classmethod
    def cut(cls, ints: Tensor, num_chunks: int) -> "PromptChunks":
        """The chunks in a tensor of `chunk_ints` for this many chunks."""
        end = 5 * even(num_chunks)
        return cls(ints[:end].view(5, -1), ints[end:].view(2, -1))


def even(count: int) -> int:
    """Return the smallest even number that is at least `count`."""
    return count + count % 2


def chunk_ints(
    chunks: Sequence[Segment], num_chunks: int | None = None, num_pieces: int | None = None, padding_text: int = 0
) -> list[int]:
    """The integers of `PromptChunks`, padded to `num_chunks` (even) and `num_pieces` if these are given.

    Padding chunks begin after the last row. The number of chunks is even, so that every field is aligned to 16 bytes:
    kernels were compiled for such pointers.
    """
    pieces, rows = list[tuple[int, int]](), list[tuple[int, ...]]()
    for chunk in chunks:
        rows.append((chunk.first_row, chunk.num_rows, chunk.context_len, chunk.table_row, len(pieces)))
        begins = range(0, chunk.num_rows, PIECE)
        pieces += ((chunk.first_row + begin, min(PIECE, chunk.num_rows - begin)) for begin in begins)
    end = max((chunk.first_row + chunk.num_rows for chunk in chunks), default=0)
    rows += [(end, 0, 0, padding_text, 0)] * ((num_chunks or even(len(rows))) - len(rows))
    pieces += [(0, 0)] * ((num_pieces or len(pieces)) - len(pieces))
    return [*(value for column in zip(*rows, strict=True) for value in column),
            *(value for column in zip(*pieces, strict=True) for value in column)]  # fmt: skip


def delta_prompts_ref(
    rows: Tensor, gates: Gates, states: Tensor, num_key_heads: int, prompts: PromptChunks, out: Tensor | None = None
) -> Tensor:
    """Run chunks of prompts from the states of their texts, and store the states after them.

    rows    [T, C]
    states  [B, H, P, K, S] in tiles (`delta_rule.state_tiles`), written; a chunk that begins its text starts from zeros
    out     [T, H, V] in the dtype of `rows`, written; a new tensor if None
    Returns `out`. Rows outside of chunks are left as they are. The reference waits for the device.
    """
    wide = states.dtype
    num_heads, key_size = states.shape[1], states.shape[3]
    keys_width = num_key_heads * key_size
    value_size = (rows.shape[1] - 2 * keys_width) // num_heads
    query, keys, values = rows.to(wide).split((keys_width, keys_width, num_heads * value_size), -1)
    query, keys = (_unit(item.view(len(rows), -1, key_size), num_heads) for item in (query, keys))
    values = values.view(len(rows), num_heads, value_size)
    decays, betas = gate_values(gates, wide)
    parts = [query * key_size**-0.5, keys, values, decays, betas]
    out = room_for(rows, num_heads, value_size) if out is None else out
    for first, num_rows, context_len, text, _ in prompts.chunks.T.tolist():
        if not num_rows:
            continue
        state = whole_states(states[text], value_size)
        state = state if context_len else torch.zeros_like(state)
        end = first + num_rows
        for begin in range(first, end, PIECE):
            piece = slice(begin, min(begin + PIECE, end))
            found, state = _piece(state, *(item[piece].transpose(0, 1) for item in parts))
            out[piece] = found.transpose(0, 1).to(rows.dtype)
        states[text] = state_tiles(state)
    return out


def _unit(heads: Tensor, num_heads: int) -> Tensor:
    unit = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPSILON)
    return unit.repeat_interleave(num_heads // heads.shape[1], 1)


def _piece(
    state: Tensor, query: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor
) -> tuple[Tensor, Tensor]:
    """One piece of rows from a state [H, K, V] -> outputs [H, N, V] and the state after it.

    query, keys [H, N, K], values [H, N, V], decays and betas [H, N].
    """
    total = decays.cumsum(-1)
    since = total[:, :, None] - total[:, None, :]  # the decay of row j until row i
    num_rows = since.shape[-1]
    is_before = torch.ones((num_rows, num_rows), dtype=torch.bool, device=state.device).tril()
    since = torch.where(is_before, since, -torch.inf).exp()
    pairs = (betas[:, :, None] * since * (keys @ keys.mT)).tril(-1)
    pairs = pairs + torch.eye(num_rows, dtype=state.dtype, device=state.device)
    decayed = total.exp()[:, :, None]
    wanted = betas[:, :, None] * (values - decayed * (keys @ state))
    deltas = torch.linalg.solve_triangular(pairs, wanted, upper=False, unitriangular=True)
    outs = decayed * (query @ state) + (since * (query @ keys.mT)) @ deltas
    left = (total[:, -1:] - total).exp()[:, :, None]
    return outs, total[:, -1, None, None].exp() * state + keys.mT @ (left * deltas)


@jit
def dot_wide(narrow, wide, PRECISION: tl.constexpr, IS_SPLIT: tl.constexpr):
    """Return the product of rows in the model's dtype and a float32 matrix.

    With `IS_SPLIT` the matrix is the sum of two in bfloat16, which keeps 16 bits of its numbers.
    """
    if IS_SPLIT:
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(narrow, high, tl.dot(narrow, low))
    return tl.dot(narrow.to(tl.float32), wide, input_precision=PRECISION)


@jit
def length_scale(rows, eps):
    """Return the factor of each row [N, K] that makes its length one."""
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@jit
def row_pairs(
    asks, keys, ask_scale, key_scale, total, beta, NUM_ROWS: tl.constexpr, PRECISION: tl.constexpr, is_seen=None
):
    """Return what each row takes from the corrections of the rows before it, with its key and with its query.

    asks, keys  [N, K]
    total       [N]   sum of the decays up to each row
    is_seen     [N, N]   rows that each row takes from, itself included; by default all rows up to it
    """
    row = tl.arange(0, NUM_ROWS)
    near = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    asked = tl.dot(asks, tl.trans(keys), input_precision=PRECISION)
    since = total[:, None] - total[None, :]
    if is_seen is None:
        since = tl.where(row[:, None] >= row[None, :], since, float("-inf"))
    else:
        since = tl.where(is_seen, since, float("-inf"))
    since = tl.exp(since) * key_scale[None, :]
    pairs = tl.where(row[:, None] > row[None, :], (beta * key_scale)[:, None] * since * near, 0.0)
    return pairs, since * asked * ask_scale[:, None]


@jit
def join_blocks(inverse, pairs, SOLVED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of the unit matrix plus `pairs`, which is zero on and above the diagonal.

    `inverse` has the inverses of the blocks of `SOLVED` rows on the diagonal. Blocks are joined in pairs: the inverse
    of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']].
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    for level in tl.static_range(1, 8):
        if (1 << level) >= SOLVED and (2 << level) <= SIZE:
            is_joint = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) != (column >> level))
            joint = tl.dot(tl.where(is_joint, pairs, 0.0), inverse, input_precision=PRECISION)
            inverse -= tl.dot(inverse, joint, input_precision=PRECISION)
    return inverse


@jit
def _invert(pairs, PIECE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of the unit matrix plus `pairs`. Blocks of 16 rows on the diagonal are solved row by row."""
    NUM: tl.constexpr = PIECE // 16
    is_own = (tl.arange(0, NUM)[:, None] == tl.arange(0, NUM)[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(is_own, tl.reshape(pairs, (NUM, 16, NUM, 16)), 0.0), 2)
    line, place = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    solved = tl.where(line == place, 1.0, tl.zeros((NUM, 16, 16), tl.float32))
    for index in range(1, 16):
        # Row `index` of the inverse: minus its pairs times the rows above it.
        own = tl.sum(tl.where(line == index, blocks, 0.0), 1)
        above = tl.sum(own[:, :, None] * tl.where(line < index, solved, 0.0), 1)
        solved = tl.where(line == index, solved - above[:, None, :], solved)
    inverse = tl.reshape(tl.where(is_own, tl.expand_dims(solved, 2), 0.0), (PIECE, PIECE))
    return join_blocks(inverse, pairs, 16, PIECE, PRECISION)


@jit(do_not_specialize=["num_pieces"])
def _delta_pieces_kernel(
    rows, decay_in, beta_in, log_rate, bias, pieces, inverses, shares, marks, num_pieces,
    num_rows, rows_row, decay_row, beta_row, scale, eps,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, KEY: tl.constexpr, TILE_K: tl.constexpr, PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    group = head // (NUM_HEADS // NUM_KEYS)
    first, count = tl.load(pieces + piece), tl.load(pieces + num_pieces + piece)
    row, key = tl.arange(0, PIECE), tl.arange(0, TILE_K)
    is_row = row < count
    is_element = is_row[:, None] & (key < KEY)[None, :]
    flat = first + row
    source = rows + flat[:, None] * rows_row + group * KEY + key[None, :]
    asks = tl.load(source, mask=is_element, other=0.0)
    keys = tl.load(source + NUM_KEYS * KEY, mask=is_element, other=0.0)
    ask_scale, key_scale = length_scale(asks, eps) * scale, length_scale(keys, eps)
    rate, shift = tl.exp(tl.load(log_rate + head)), tl.load(bias + head)
    decay, beta = load_gates(decay_in, beta_in, flat * decay_row + head, flat * beta_row + head, is_row, rate, shift)
    total = tl.cumsum(tl.where(is_row, decay, 0.0), 0)
    pairs, share = row_pairs(asks, keys, ask_scale, key_scale, total, beta, PIECE, PRECISION)
    inverse = _invert(pairs, PIECE, PRECISION) * beta[None, :]
    place = (piece * NUM_HEADS + head) * PIECE * PIECE + row[:, None] * PIECE + row[None, :]
    tl.store(inverses + place, inverse)
    tl.store(shares + place, share)
    mark = marks + 3 * head * num_rows + flat
    tl.store(mark, total, mask=is_row)
    tl.store(mark + num_rows, ask_scale, mask=is_row)
    tl.store(mark + 2 * num_rows, key_scale, mask=is_row)


@jit(do_not_specialize=["num_chunks"])
def _delta_scan_kernel(
    rows, chunks, inverses, shares, marks, states, out, num_chunks, num_rows, rows_row,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr,
    TILE_V: tl.constexpr, TILE_K: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
    IS_SPLIT: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    first, count, start, text, first_piece = (
        tl.load(chunks + chunk), tl.load(chunks + num_chunks + chunk), tl.load(chunks + 2 * num_chunks + chunk),
        tl.load(chunks + 3 * num_chunks + chunk), tl.load(chunks + 4 * num_chunks + chunk),
    )  # fmt: skip
    count = count.to(tl.int32)
    if count > 0:
        group = head // (NUM_HEADS // NUM_KEYS)
        value, key, row = tl.program_id(0) * TILE_V + tl.arange(0, TILE_V), tl.arange(0, TILE_K), tl.arange(0, PIECE)
        is_value, is_key = (value < VALUE)[None, :], key < KEY
        home, is_home = state_places(states, text * NUM_HEADS + head, key, value, VALUE, KEY)
        state = tl.load(home, mask=is_home & (start > 0), other=0.0)
        square = row[:, None] * PIECE + row[None, :]
        for index in tl.range(0, tl.cdiv(count, PIECE), num_stages=NUM_STAGES):
            is_row = index * PIECE + row < count
            flat = first + index * PIECE + row
            source = rows + flat[:, None] * rows_row
            is_element = is_row[:, None] & is_key[None, :]
            asks = tl.load(source + group * KEY + key[None, :], mask=is_element, other=0.0)
            keys = tl.load(source + (NUM_KEYS + group) * KEY + key[None, :], mask=is_element, other=0.0)
            own = source + 2 * NUM_KEYS * KEY + head * VALUE + value[None, :]
            values = tl.load(own, mask=is_row[:, None] & is_value, other=0.0).to(tl.float32)
            place = ((first_piece + index) * NUM_HEADS + head) * PIECE * PIECE + square
            inverse, share = tl.load(inverses + place), tl.load(shares + place)
            mark = marks + 3 * head * num_rows + flat
            total = tl.load(mark, mask=is_row, other=0.0)
            ask_scale = tl.load(mark + num_rows, mask=is_row, other=0.0)
            key_scale = tl.load(mark + 2 * num_rows, mask=is_row, other=0.0)
            last = tl.sum(tl.where(row == tl.minimum(count - index * PIECE, PIECE) - 1, total, 0.0), 0)
            decayed = tl.exp(total)
            known = dot_wide(keys, state, PRECISION, IS_SPLIT) * (key_scale * decayed)[:, None]
            deltas = tl.dot(inverse, values - known, input_precision=PRECISION)
            found = dot_wide(asks, state, PRECISION, IS_SPLIT) * (ask_scale * decayed)[:, None]
            found = tl.dot(share, deltas, found, input_precision=PRECISION)
            target = out + (flat[:, None] * NUM_HEADS + head) * VALUE + value[None, :]
            tl.store(target, found.to(out.dtype.element_ty), mask=is_row[:, None] & is_value)
            left = tl.where(is_row, tl.exp(last - total) * key_scale, 0.0)
            added = dot_wide(tl.trans(keys), deltas * left[:, None], PRECISION, IS_SPLIT)
            state = state * tl.exp(last) + added
        tl.store(home, state, mask=is_home)


def delta_prompts(
    rows: Tensor, gates: Gates, states: Tensor, num_key_heads: int, prompts: PromptChunks, out: Tensor | None = None
) -> Tensor:
    """Compute `delta_prompts_ref` in two launches."""
    check_tensors(rows, *gates, states, *prompts)
    num_heads, num_tiles, key_size, tile = states.shape[1:]
    value_size = (rows.shape[1] - 2 * num_key_heads * key_size) // num_heads
    require(tile == STATE_TILE and num_tiles == ceil_div(value_size, tile), "states", "tiles of states")
    require(states.dtype == torch.float32 and states.is_contiguous(), "states", "contiguous float32")
    require(num_heads % num_key_heads == 0, "states", "value heads as a multiple of key heads")
    width = 2 * num_key_heads * key_size + num_heads * value_size
    require(rows.shape[1] == width and rows.stride(1) == 1, "rows", "queries, keys and values of every head")
    require(all(item.stride(1) == 1 and len(item) == len(rows) for item in gates[:2]), "gates", "one row per row")
    require(all(item.is_contiguous() for item in prompts), "prompts", "contiguous tensors")
    num_rows, num_chunks, num_pieces = len(rows), prompts.chunks.shape[1], prompts.pieces.shape[1]
    out = room_for(rows, num_heads, value_size) if out is None else out
    require(out.is_contiguous() and out.shape == (num_rows, num_heads, value_size), "out", "[rows, heads, values]")
    if not num_pieces:
        return out
    squares = torch.empty((2, num_pieces, num_heads, PIECE, PIECE), dtype=torch.float32, device=rows.device)
    marks = torch.empty((num_heads, 3, num_rows), dtype=torch.float32, device=rows.device)
    is_narrow = rows.element_size() == 2
    precision = "tf32" if rows.dtype == torch.bfloat16 else "tf32x3"
    _delta_pieces_kernel[(num_pieces, num_heads)](
        rows, *gates, prompts.pieces, *squares, marks, num_pieces, num_rows, rows.stride(0),
        gates.decay.stride(0), gates.beta.stride(0), key_size**-0.5, EPSILON,
        NUM_HEADS=num_heads, NUM_KEYS=num_key_heads, KEY=key_size, TILE_K=max(power_of_2(key_size), 16), PIECE=PIECE,
        PRECISION=precision, num_warps=2,
    )  # fmt: skip
    tile_values = min(VALUE_TILE, max(power_of_2(value_size), 16))
    _delta_scan_kernel[(ceil_div(value_size, tile_values), num_heads, num_chunks)](
        rows, prompts.chunks, *squares, marks, states, out, num_chunks, num_rows, rows.stride(0),
        NUM_HEADS=num_heads, NUM_KEYS=num_key_heads, VALUE=value_size, KEY=key_size,
        TILE_V=tile_values, TILE_K=max(power_of_2(key_size), 16), PIECE=PIECE, PRECISION=precision,
        IS_SPLIT=rows.dtype == torch.bfloat16, NUM_STAGES=2 if is_narrow else 1, num_warps=4,
    )  # fmt: skip
    return out
