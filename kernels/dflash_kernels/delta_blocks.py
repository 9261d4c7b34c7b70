"""The gated delta rule over blocks of drafted rows, on tensor cores.

It computes `delta_rule.delta_rule_ref`, and keeps the same records. The rows of a block solve a triangular system, as
in `delta_prompts.py`, and the replayed rows are added in one product. This is faster for many requests. The sums have
another order than row by row, so the text may differ from plain decoding where two tokens are nearly equally likely.
Sources: arXiv 2412.06464; huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.

Axis letters: R requests, W rows of a block, M rows of a ring, H value heads, G key heads, V and K sizes of a value and
a key, C = 2 * G * K + H * V channels: queries, keys, values.
"""

import torch
from torch import Tensor

from dflash_kernels.delta_prompts import dot_wide, length_scale, row_pairs
from dflash_kernels.delta_rule import (
    EPSILON,
    BlockTexts,
    DeltaMemory,
    Gates,
    check_blocks,
    delta_rule_ref,
    load_gates,
    room_for,
)
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch_config import MIN_DOT, ceil_div, jit, power_of_2, tl

BLOCK_TILE, BLOCK_WARPS = 64, 4
"""Columns of a state in one program, and its warps."""


def delta_blocks_ref(
    rows: Tensor,
    gates: Gates,
    memory: DeltaMemory,
    blocks: BlockTexts,
    most_replayed: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the results of `delta_rule_ref`, and keep its records."""
    return delta_rule_ref(rows, gates, memory, blocks, most_replayed, out)


@jit
def _invert_rows(pairs, TILE_R: tl.constexpr):
    """Return the inverse of the unit matrix plus `pairs`, which is zero on and above the diagonal, row by row."""
    line, place = tl.arange(0, TILE_R)[:, None], tl.arange(0, TILE_R)[None, :]
    solved = tl.where(line == place, 1.0, tl.zeros((TILE_R, TILE_R), tl.float32))
    for index in range(1, TILE_R):
        own = tl.sum(tl.where(line == index, pairs, 0.0), 0)
        above = tl.sum(own[:, None] * tl.where(line < index, solved, 0.0), 0)
        solved = tl.where(line == index, solved - above[None, :], solved)
    return solved


@jit
def _replay_at_once(
    state, keys, deltas, decays, text, done, num_replayed, ring_size, key, is_key, value, is_value, group, head,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Return the state after the recorded rows from `done` on."""
    old = tl.arange(0, TILE_M)
    is_old = old < num_replayed
    slot = text * ring_size + ((done % ring_size).to(tl.int32) + old) % ring_size
    decay = tl.load(decays + slot * NUM_HEADS + head, mask=is_old, other=0.0)
    last = tl.sum(decay, 0)
    left = tl.exp(last - tl.cumsum(decay, 0))
    place = (slot[None, :] * NUM_KEYS + group) * KEY + key[:, None]
    old_keys = tl.load(keys + place, mask=is_key[:, None] & is_old[None, :], other=0.0)
    place = (slot[:, None] * NUM_HEADS + head) * VALUE + value[None, :]
    old_deltas = tl.load(deltas + place, mask=is_old[:, None] & is_value[None, :], other=0.0)
    return tl.dot(old_keys, old_deltas * left[:, None], state * tl.exp(last), input_precision="tf32x3")


@jit(do_not_specialize=["num_rows", "most_replayed"])
def _delta_blocks_kernel(
    rows, decay_in, beta_in, log_rate, bias, states, keys, deltas, decays, texts, state_lens, lens, out,
    num_rows, ring_size, most_replayed, rows_row, decay_row, beta_row, scale, eps,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr,
    TILE_V: tl.constexpr, TILE_K: tl.constexpr, TILE_R: tl.constexpr, TILE_M: tl.constexpr,
    IS_SPLIT: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    request, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = head // (NUM_HEADS // NUM_KEYS)
    text, done, begin = tl.load(texts + request), tl.load(state_lens + request), tl.load(lens + request)
    value, key, row = part * TILE_V + tl.arange(0, TILE_V), tl.arange(0, TILE_K), tl.arange(0, TILE_R)
    is_value, is_key, is_row = value < VALUE, key < KEY, row < num_rows
    is_home = is_key[:, None] & is_value[None, :]
    home = states + ((text * NUM_HEADS + head) * KEY + key[:, None]) * VALUE + value[None, :]
    # The launch before this one writes neither states nor records: they come from earlier steps.
    state = tl.load(home, mask=is_home, other=0.0)
    num_replayed = (begin - done).to(tl.int32)
    if num_replayed > 0:
        state = _replay_at_once(
            state, keys, deltas, decays, text, done, num_replayed, ring_size, key, is_key, value, is_value, group, head,
            NUM_HEADS, NUM_KEYS, VALUE, KEY, TILE_M,
        )  # fmt: skip
    if num_replayed > most_replayed:
        tl.store(home, state, mask=is_home)
    rate, shift = tl.exp(tl.load(log_rate + head)), tl.load(bias + head)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    flat = request * num_rows + row
    source = rows + flat[:, None] * rows_row
    is_element = is_row[:, None] & is_key[None, :]
    is_result = is_row[:, None] & is_value[None, :]
    asks = tl.load(source + group * KEY + key[None, :], mask=is_element, other=0.0)
    new_keys = tl.load(source + (NUM_KEYS + group) * KEY + key[None, :], mask=is_element, other=0.0)
    values = tl.load(source + 2 * NUM_KEYS * KEY + head * VALUE + value[None, :], mask=is_result, other=0.0)
    ask_scale, key_scale = length_scale(asks, eps) * scale, length_scale(new_keys, eps)
    decay, beta = load_gates(decay_in, beta_in, flat * decay_row + head, flat * beta_row + head, is_row, rate, shift)
    decay, beta = tl.where(is_row, decay, 0.0), tl.where(is_row, beta, 0.0)
    total = tl.cumsum(decay, 0)
    pairs, share = row_pairs(asks, new_keys, ask_scale, key_scale, total, beta, TILE_R, "tf32x3")
    known = dot_wide(new_keys, state, "tf32x3", IS_SPLIT) * (key_scale * tl.exp(total))[:, None]
    found = dot_wide(asks, state, "tf32x3", IS_SPLIT) * (ask_scale * tl.exp(total))[:, None]
    new_deltas = tl.dot(
        _invert_rows(pairs, TILE_R) * beta[None, :], values.to(tl.float32) - known, input_precision="tf32x3"
    )
    found = tl.dot(share, new_deltas, found, input_precision="tf32x3")
    is_result = is_row[:, None] & is_value[None, :]
    tl.store(
        out + (flat[:, None] * NUM_HEADS + head) * VALUE + value[None, :],
        found.to(out.dtype.element_ty),
        mask=is_result,
    )
    slot = text * ring_size + ((begin % ring_size).to(tl.int32) + row) % ring_size
    tl.store(deltas + (slot[:, None] * NUM_HEADS + head) * VALUE + value[None, :], new_deltas, mask=is_result)
    tl.store(decays + slot * NUM_HEADS + head, decay, mask=is_row & (part == 0))
    if (part == 0) & (head % (NUM_HEADS // NUM_KEYS) == 0):
        unit = new_keys.to(tl.float32) * key_scale[:, None]
        tl.store(keys + (slot[:, None] * NUM_KEYS + group) * KEY + key[None, :], unit, mask=is_element)


def delta_blocks(
    rows: Tensor,
    gates: Gates,
    memory: DeltaMemory,
    blocks: BlockTexts,
    most_replayed: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `delta_blocks_ref` in one launch, all rows of a block at once."""
    num_rows = check_blocks(rows, gates, memory, blocks, most_replayed)
    _, size, num_keys, key_size = memory.keys.shape
    num_heads, value_size = memory.deltas.shape[2:]
    out = room_for(rows, num_heads, value_size) if out is None else out
    if num_rows:
        tile_values = min(BLOCK_TILE, max(power_of_2(value_size), MIN_DOT))
        _delta_blocks_kernel[(len(blocks.texts), num_heads, ceil_div(value_size, tile_values))](
            rows, *gates, *memory, *blocks, out, num_rows, size, most_replayed,
            rows.stride(0), gates.decay.stride(0), gates.beta.stride(0), key_size**-0.5, EPSILON,
            NUM_HEADS=num_heads, NUM_KEYS=num_keys, VALUE=value_size, KEY=key_size,
            TILE_V=tile_values, TILE_K=max(power_of_2(key_size), MIN_DOT), TILE_R=max(power_of_2(num_rows), MIN_DOT),
            TILE_M=max(power_of_2(size - num_rows), MIN_DOT), IS_SPLIT=rows.dtype == torch.bfloat16,
            num_warps=BLOCK_WARPS, **early(rows.device),
        )  # fmt: skip
    return out
