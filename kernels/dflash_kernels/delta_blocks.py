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
    FEW,
    BlockTexts,
    DeltaMemory,
    Gates,
    check_blocks,
    delta_rule_ref,
    load_gates,
    replay_rows,
    room_for,
    state_places,
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
    """Return the inverse of the unit matrix plus `pairs`, which is zero on and above the diagonal.

    Blocks on the diagonal are joined in pairs: the inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']].
    """
    row, column = tl.arange(0, TILE_R)[:, None], tl.arange(0, TILE_R)[None, :]
    inverse = tl.where(row == column, 1.0, tl.where((row // 2 == column // 2), -pairs, 0.0))
    for level in tl.static_range(1, 8):
        if (2 << level) <= TILE_R:
            is_joint = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) != (column >> level))
            joint = tl.dot(tl.where(is_joint, pairs, 0.0), inverse, input_precision="tf32x3")
            inverse -= tl.dot(inverse, joint, input_precision="tf32x3")
    return inverse


@jit(do_not_specialize=["num_rows", "most_replayed"])
def _delta_blocks_kernel(
    rows, decay_in, beta_in, log_rate, bias, states, keys, deltas, decays, texts, state_lens, lens, out,
    num_rows, ring_size, most_replayed, rows_row, decay_row, beta_row, scale, eps,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr,
    TILE_V: tl.constexpr, TILE_K: tl.constexpr, TILE_R: tl.constexpr, IS_SPLIT: tl.constexpr,
    IS_LATE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    part, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = head // (NUM_HEADS // NUM_KEYS)
    text, done, begin = tl.load(texts + request), tl.load(state_lens + request), tl.load(lens + request)
    value, key, row = part * TILE_V + tl.arange(0, TILE_V), tl.arange(0, TILE_K), tl.arange(0, TILE_R)
    is_value, is_key, is_row = value < VALUE, key < KEY, row < num_rows
    place, is_home = state_places(states, text * NUM_HEADS + head, key, value, VALUE, KEY)
    if IS_LATE:
        wait_for_launches_before(IS_EARLY)
        let_next_launch_begin(IS_EARLY)
    # The launch before this one writes neither states nor records: they come from earlier steps.
    num_replayed = (begin - done).to(tl.int32)
    state = replay_rows(
        tl.load(place, mask=is_home, other=0.0), keys, deltas, decays, text, done, num_replayed, ring_size,
        key, is_key, value, is_value, group, head, NUM_HEADS, NUM_KEYS, VALUE, KEY, TILE_V, TILE_K,
    )  # fmt: skip
    if num_replayed > most_replayed:
        tl.store(place, state, mask=is_home)
    rate, shift = tl.exp(tl.load(log_rate + head)), tl.load(bias + head)
    if not IS_LATE:
        wait_for_launches_before(IS_EARLY)
        let_next_launch_begin(IS_EARLY)
    flat = request * num_rows + row
    source = rows + flat[:, None] * rows_row
    is_element = is_row[:, None] & is_key[None, :]
    is_result = is_row[:, None] & is_value[None, :]
    asks = tl.load(source + group * KEY + key[None, :], mask=is_element, other=0.0)
    new_keys = tl.load(source + (NUM_KEYS + group) * KEY + key[None, :], mask=is_element, other=0.0)
    values = tl.load(source + 2 * NUM_KEYS * KEY + head * VALUE + value[None, :], mask=is_result, other=0.0)
    decay, beta = load_gates(decay_in, beta_in, flat * decay_row + head, flat * beta_row + head, is_row, rate, shift)
    decay, beta = tl.where(is_row, decay, 0.0), tl.where(is_row, beta, 0.0)
    ask_scale, key_scale = length_scale(asks, eps) * scale, length_scale(new_keys, eps)
    total = tl.cumsum(decay, 0)
    pairs, share = row_pairs(asks, new_keys, ask_scale, key_scale, total, beta, TILE_R, "tf32x3")
    known = dot_wide(new_keys, state, "tf32x3", IS_SPLIT) * (key_scale * tl.exp(total))[:, None]
    found = dot_wide(asks, state, "tf32x3", IS_SPLIT) * (ask_scale * tl.exp(total))[:, None]
    wanted = (values.to(tl.float32) - known) * beta[:, None]
    new_deltas = tl.dot(_invert_rows(pairs, TILE_R), wanted, input_precision="tf32x3")
    found = tl.dot(share, new_deltas, found, input_precision="tf32x3")
    target = out + (flat[:, None] * NUM_HEADS + head) * VALUE + value[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=is_result)
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
        count, tile_values = len(blocks.texts), min(BLOCK_TILE, max(power_of_2(value_size), MIN_DOT))
        _delta_blocks_kernel[(ceil_div(value_size, tile_values), num_heads, count)](
            rows, *gates, *memory, *blocks, out, num_rows, size, most_replayed,
            rows.stride(0), gates.decay.stride(0), gates.beta.stride(0), key_size**-0.5, EPSILON,
            NUM_HEADS=num_heads, NUM_KEYS=num_keys, VALUE=value_size, KEY=key_size,
            TILE_V=tile_values, TILE_K=max(power_of_2(key_size), MIN_DOT), TILE_R=max(power_of_2(num_rows), MIN_DOT),
            IS_SPLIT=rows.dtype == torch.bfloat16, IS_LATE=count > FEW, num_warps=BLOCK_WARPS, **early(rows.device),
        )  # fmt: skip
    return out
