"""The gated delta rule over blocks of drafted rows, on tensor cores.

It computes `delta_rule.delta_rule_ref`, and keeps the same records. The rows of a block solve a triangular system, as
in `delta_prompts.py`, and the replayed rows are added in one product. This is faster for many requests. The sums have
another order than row by row, so the text may differ from plain decoding where two tokens are nearly equally likely.
The first launch computes what needs no state: the inverse of each triangular system, and how much each row reads of the
corrections before it. It needs many registers, and the second launch needs many programs at once.
Sources: arXiv 2412.06464; huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.

The rows of a tree take only from their ancestors, and decays add up along each path. The triangular system has the same
form, because ancestors come first, so a tree needs no state per row either. Source: arXiv 2608.20961.

Axis letters: R requests, W rows of a block, M rows of a ring, H value heads, G key heads, V and K sizes of a value and
a key, C = 2 * G * K + H * V channels: queries, keys, values.
"""

import torch
from torch import Tensor

from dflash_kernels.drafts.draft_tree import TreeRows
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.launch_config import MIN_DOT
from dflash_kernels.recurrent.delta_prompts import dot_wide, join_blocks, length_scale, row_pairs
from dflash_kernels.recurrent.delta_rule import (
    EPSILON,
    BlockTexts,
    DeltaMemory,
    Gates,
    check_blocks,
    load_gates,
    replay_rows,
    room_for,
    rule_of_trees_ref,
    state_places,
)

BLOCK_TILE = 64
"""Columns of a state in one program."""

MAX_TREE_ROWS = 64
"""Most rows of a tree: a program holds the square of its rows, and compiling a larger one takes many minutes."""

BLOCK_LAUNCH = {"num_warps": 4, "maxnreg": 128}
"""With more registers per thread, fewer programs share a multiprocessor."""

TREE_LAUNCH = {"num_warps": 8}
"""For more than 16 rows: 128 registers per thread are too few for 64 rows on 4 warps. Not measured."""

PAIR_WARPS = ((132, 4), (512, 2))
"""Most programs of the first launch, and their warps. One warp is enough for more programs."""


def delta_blocks_ref(
    rows: Tensor,
    gates: Gates,
    memory: DeltaMemory,
    blocks: BlockTexts,
    most_replayed: int = 0,
    out: Tensor | None = None,
    tree: TreeRows | None = None,
) -> Tensor:
    """Return the results of `delta_rule_ref`, or along the paths of trees, and keep the records of all rows."""
    return rule_of_trees_ref(rows, gates, memory, blocks, most_replayed, out, tree)


@jit(do_not_specialize=["num_rows"])
def _delta_pairs_kernel(
    rows, decay_in, beta_in, log_rate, bias, keys, decays, texts, lens, words, squares, marks,
    num_rows, ring_size, rows_row, decay_row, beta_row, scale, eps,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, KEY: tl.constexpr, TILE_K: tl.constexpr, TILE_R: tl.constexpr,
    NUM_WORDS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = head // (NUM_HEADS // NUM_KEYS)
    text, begin = tl.load(texts + request), tl.load(lens + request)
    key, row = tl.arange(0, TILE_K), tl.arange(0, TILE_R)
    is_row = row < num_rows
    is_element = is_row[:, None] & (key < KEY)[None, :]
    rate, shift = tl.exp(tl.load(log_rate + head)), tl.load(bias + head)
    flat = request * num_rows + row
    source = rows + flat[:, None] * rows_row + group * KEY + key[None, :]
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    asks = tl.load(source, mask=is_element, other=0.0)
    new_keys = tl.load(source + NUM_KEYS * KEY, mask=is_element, other=0.0)
    decay, beta = load_gates(decay_in, beta_in, flat * decay_row + head, flat * beta_row + head, is_row, rate, shift)
    decay, beta = tl.where(is_row, decay, 0.0), tl.where(is_row, beta, 0.0)
    ask_scale, key_scale = length_scale(asks, eps) * scale, length_scale(new_keys, eps)
    if words is None:
        total = tl.cumsum(decay, 0)
        pairs, share = row_pairs(asks, new_keys, ask_scale, key_scale, total, beta, TILE_R, "tf32x3")
    else:
        is_pair = is_row[:, None] & is_row[None, :]
        word = tl.load(words + (flat * NUM_WORDS)[:, None] + (row // 64)[None, :], mask=is_pair, other=0)
        is_seen = ((word >> (row % 64)[None, :]) & 1) != 0
        total = tl.sum(tl.where(is_seen, decay[None, :], 0.0), 1)
        pairs, share = row_pairs(asks, new_keys, ask_scale, key_scale, total, beta, TILE_R, "tf32x3", is_seen)
    square = squares + (request * NUM_HEADS + head) * 2 * TILE_R * TILE_R + row[:, None] * TILE_R + row[None, :]
    near = row[:, None] // 2 == row[None, :] // 2
    inverse = tl.where(row[:, None] == row[None, :], 1.0, tl.where(near, -pairs, 0.0))
    tl.store(square, join_blocks(inverse, pairs, 2, TILE_R, "tf32x3") * beta[None, :])
    tl.store(square + TILE_R * TILE_R, share)
    mark = marks + (request * NUM_HEADS + head) * 2 * TILE_R + row
    decayed = tl.exp(total)
    tl.store(mark, ask_scale * decayed)
    tl.store(mark + TILE_R, key_scale * decayed)
    slot = text * ring_size + ((begin % ring_size).to(tl.int32) + row) % ring_size
    tl.store(decays + slot * NUM_HEADS + head, decay, mask=is_row)
    if head % (NUM_HEADS // NUM_KEYS) == 0:
        unit = new_keys.to(tl.float32) * key_scale[:, None]
        tl.store(keys + (slot[:, None] * NUM_KEYS + group) * KEY + key[None, :], unit, mask=is_element)


@jit(do_not_specialize=["num_rows", "most_replayed"])
def _delta_blocks_kernel(
    rows, states, keys, deltas, decays, texts, state_lens, lens, squares, marks, out,
    num_rows, ring_size, most_replayed, rows_row,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr,
    TILE_V: tl.constexpr, TILE_K: tl.constexpr, TILE_R: tl.constexpr, IS_SPLIT: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    part, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // (NUM_HEADS // NUM_KEYS)
    text, done, begin = tl.load(texts + request), tl.load(state_lens + request), tl.load(lens + request)
    value, key, row = part * TILE_V + tl.arange(0, TILE_V), tl.arange(0, TILE_K), tl.arange(0, TILE_R)
    is_value, is_key, is_row = value < VALUE, key < KEY, row < num_rows
    place, is_home = state_places(states, text * NUM_HEADS + head, key, value, VALUE, KEY)
    # Earlier steps wrote the states and the records of the rows before the block.
    num_replayed = (begin - done).to(tl.int32)
    state = replay_rows(
        tl.load(place, mask=is_home, other=0.0), keys, deltas, decays, text, done, num_replayed, ring_size,
        key, is_key, value, is_value, group, head, NUM_HEADS, NUM_KEYS, VALUE, KEY, TILE_V, TILE_K,
    )  # fmt: skip
    if num_replayed > most_replayed:
        tl.store(place, state, mask=is_home)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    flat = request * num_rows + row
    source = rows + flat[:, None] * rows_row
    is_element = is_row[:, None] & is_key[None, :]
    is_result = is_row[:, None] & is_value[None, :]
    asks = tl.load(source + group * KEY + key[None, :], mask=is_element, other=0.0)
    new_keys = tl.load(source + (NUM_KEYS + group) * KEY + key[None, :], mask=is_element, other=0.0)
    values = tl.load(source + 2 * NUM_KEYS * KEY + head * VALUE + value[None, :], mask=is_result, other=0.0)
    square = squares + (request * NUM_HEADS + head) * 2 * TILE_R * TILE_R + row[:, None] * TILE_R + row[None, :]
    inverse, share = tl.load(square), tl.load(square + TILE_R * TILE_R)
    mark = marks + (request * NUM_HEADS + head) * 2 * TILE_R + row
    known = dot_wide(new_keys, state, "tf32x3", IS_SPLIT) * tl.load(mark + TILE_R)[:, None]
    found = dot_wide(asks, state, "tf32x3", IS_SPLIT) * tl.load(mark)[:, None]
    new_deltas = tl.dot(inverse, values.to(tl.float32) - known, input_precision="tf32x3")
    found = tl.dot(share, new_deltas, found, input_precision="tf32x3")
    target = out + (flat[:, None] * NUM_HEADS + head) * VALUE + value[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=is_result)
    slot = text * ring_size + ((begin % ring_size).to(tl.int32) + row) % ring_size
    tl.store(deltas + (slot[:, None] * NUM_HEADS + head) * VALUE + value[None, :], new_deltas, mask=is_result)


def delta_blocks(
    rows: Tensor,
    gates: Gates,
    memory: DeltaMemory,
    blocks: BlockTexts,
    most_replayed: int = 0,
    out: Tensor | None = None,
    tree: TreeRows | None = None,
) -> Tensor:
    """Compute `delta_blocks_ref` in two launches, all rows of a block at once."""
    num_rows = check_blocks(rows, gates, memory, blocks, most_replayed)
    if tree is not None:
        check_tensors(rows, *tree)
        require(tree.words.shape[:2] == (len(blocks.texts), num_rows), "tree", "one entry per row")
        require(num_rows <= MAX_TREE_ROWS, "tree", f"at most {MAX_TREE_ROWS} rows")
    _, size, num_keys, key_size = memory.keys.shape
    num_heads, value_size = memory.deltas.shape[2:]
    out = room_for(rows, num_heads, value_size) if out is None else out
    if not num_rows:
        return out
    count, tile_values = len(blocks.texts), min(BLOCK_TILE, max(power_of_2(value_size), MIN_DOT))
    tile_rows = max(power_of_2(num_rows), MIN_DOT)
    sizes = {"NUM_HEADS": num_heads, "NUM_KEYS": num_keys, "KEY": key_size, "TILE_R": tile_rows}
    sizes["TILE_K"] = max(power_of_2(key_size), MIN_DOT)
    squares = torch.empty((count, num_heads, 2, tile_rows, tile_rows), dtype=torch.float32, device=rows.device)
    marks = torch.empty((count, num_heads, 2, tile_rows), dtype=torch.float32, device=rows.device)
    texts, state_lens, lens = blocks
    _delta_pairs_kernel[(count, num_heads)](
        rows, *gates, memory.keys, memory.decays, texts, lens, tree.words.contiguous() if tree is not None else None,
        squares, marks, num_rows, size,
        rows.stride(0), gates.decay.stride(0), gates.beta.stride(0), key_size**-0.5, EPSILON,
        **sizes, NUM_WORDS=tree.words.shape[2] if tree is not None else 0,
        num_warps=next((warps for most, warps in PAIR_WARPS if count * num_heads <= most), 1),
        **early(rows.device),
    )  # fmt: skip
    _delta_blocks_kernel[(ceil_div(value_size, tile_values), num_heads, count)](
        rows, *memory, texts, state_lens, lens, squares, marks, out, num_rows, size, most_replayed, rows.stride(0),
        **sizes, VALUE=value_size, TILE_V=tile_values, IS_SPLIT=rows.dtype == torch.bfloat16,
        **(BLOCK_LAUNCH if tile_rows <= MIN_DOT else TREE_LAUNCH), **early(rows.device),
    )  # fmt: skip
    return out
