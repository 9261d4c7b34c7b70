"""The gated delta rule over blocks of drafted rows, from one state per text and without a state per row.

A recurrent layer keeps a matrix for each head, its state. Every row scales the state, reads it with its key, writes a
correction, and reads it with its query:

    state = exp(decay) * state
    delta = beta * (value - state @ key)
    state = state + delta key^T
    out   = state @ query

Only rows that are accepted may change the state, and acceptance is known after the block. So a block keeps three
records per row, its key, delta and decay, in a ring: position p is at p modulo the size of the ring. The next block of
the text first replays the records of the rows that were accepted, with the same operations in the same order, so the
result is bitwise equal to decoding row by row. Rejection is a smaller count. The replayed state is stored when the ring
would run full, which a ring of two blocks does after every block.

Keys and queries are normalised here, and everything is computed in float32 (float64 for float64 models).
Sources: arXiv 2412.06464; huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.

Axis letters: R requests, W rows of a block, B texts, M rows of a ring, H value heads, G key heads, V and K sizes of a
value and a key, P tiles of S columns of a state, C = 2 * G * K + H * V channels: queries, keys, values.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.drafts.draft_tree import TreeRows
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.launch_config import MIN_DOT

EPSILON = 1e-6
"""Added to the squared length of a key or query."""

STATE_TILE = 16
"""Columns of a tile of a state. One program of one warp computes one tile. Another width would sum in another order."""

_TL_STATE_TILE = constexpr(STATE_TILE)

SERIAL_LAUNCH = {"num_warps": 1, "maxnreg": 128}
"""With more registers per thread, fewer programs share a multiprocessor."""


class DeltaMemory(NamedTuple):
    """One layer's memory of every text: the state, and the records of rows after it."""

    states: Tensor
    """[B, H, P, K, S] float32, in tiles of S columns (`state_tiles`), so that each program reads adjacent memory"""
    keys: Tensor
    """[B, M, G, K] float32, normalised"""
    deltas: Tensor
    """[B, M, H, V] float32"""
    decays: Tensor
    """[B, M, H] float32, logarithms"""


def empty_states(
    num_texts: int, num_heads: int, key_size: int, value_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """States [B, H, P, K, S] of zeros."""
    shape = (num_texts, num_heads, ceil_div(value_size, STATE_TILE), key_size, STATE_TILE)
    return torch.zeros(shape, dtype=dtype, device=device)


def state_tiles(states: Tensor) -> Tensor:
    """Cut the columns of states [..., K, V] into tiles [..., P, K, S]. The last tile is padded with zeros."""
    padded: Tensor = functional.pad(states, (0, -states.shape[-1] % STATE_TILE))
    tiles: Tensor = padded.unflatten(-1, (-1, STATE_TILE))
    return tiles.transpose(-3, -2)


def whole_states(tiles: Tensor, value_size: int) -> Tensor:
    """Join tiles [..., P, K, S] to states [..., K, V]."""
    whole: Tensor = tiles.transpose(-3, -2).flatten(-2)
    return whole[..., :value_size]


class Gates(NamedTuple):
    """The inputs of decay and beta, and a layer's parameters for them."""

    decay: Tensor
    """[T, H]"""
    beta: Tensor
    """[T, H]"""
    log_rate: Tensor
    """[H] float32"""
    bias: Tensor
    """[H] float32"""

    def split(self, count: int) -> tuple["Gates", "Gates"]:
        """The gates of the first `count` rows, and of the other rows."""
        first, rest = ((self.decay[part], self.beta[part]) for part in (slice(count), slice(count, None)))
        return Gates(*first, self.log_rate, self.bias), Gates(*rest, self.log_rate, self.bias)


class BlockTexts(NamedTuple):
    """The texts of blocks, and how far their states reach."""

    texts: Tensor
    """[R] int64"""
    state_lens: Tensor
    """[R] int64, rows that the stored state includes"""
    lens: Tensor
    """[R] int64, rows before the block: those after `state_lens` are replayed"""


def delta_rule_ref(
    rows: Tensor,
    gates: Gates,
    memory: DeltaMemory,
    blocks: BlockTexts,
    most_replayed: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Run blocks of rows from the states of their texts.

    rows           [R * W, C]
    memory         written: the records of the block's rows, and the replayed states
    most_replayed  a state with more replayed rows is stored, and then includes all rows before the block
    out            [R * W, H, V] in the dtype of `rows`, written; a new tensor if None
    Returns `out`.
    """
    return rule_of_trees_ref(rows, gates, memory, blocks, most_replayed, out, None)


def rule_of_trees_ref(
    rows: Tensor, gates: Gates, memory: DeltaMemory, blocks: BlockTexts, most_replayed: int, out: Tensor | None,
    tree: TreeRows | None,
) -> Tensor:  # fmt: skip
    """Compute `delta_rule_ref`. In a tree, the state before a row is the state after its parent."""
    count = len(blocks.texts)
    _, size, num_keys, key_size = memory.keys.shape
    num_heads, value_size = memory.deltas.shape[2:]
    wide = memory.states.dtype
    query, keys, values = rows.to(wide).split((num_keys * key_size, num_keys * key_size, num_heads * value_size), -1)
    query, keys = (_unit(item.view(count, -1, num_keys, key_size)) for item in (query, keys))
    query, values = query * key_size**-0.5, values.view(count, -1, num_heads, value_size)
    decays, betas = (item.view(count, -1, num_heads) for item in gate_values(gates, wide))
    state = _replay(memory, blocks, most_replayed)
    outs, repeat, num_rows = [], num_heads // num_keys, keys.shape[1]
    kept = state.new_empty((num_rows, *state.shape)) if tree is not None else None
    for index in range(num_rows):
        if kept is not None and tree is not None and index:
            state = kept[tree.parents[:, index], torch.arange(count, device=rows.device)]
        key, ask = (item[:, index].repeat_interleave(repeat, 1)[..., None] for item in (keys, query))
        state = state * decays[:, index].exp()[:, :, None, None]
        delta = (values[:, index] - (state * key).sum(-2)) * betas[:, index, :, None]
        state = state + key * delta[:, :, None]
        if kept is not None:
            kept[index] = state
        outs.append((state * ask).sum(-2))
        slot = (blocks.lens + index) % size
        memory.keys[blocks.texts, slot] = keys[:, index]
        memory.deltas[blocks.texts, slot] = delta
        memory.decays[blocks.texts, slot] = decays[:, index]
    found = torch.stack(outs, 1).flatten(0, 1).to(rows.dtype)
    return found if out is None else out.copy_(found)


def _replay(memory: DeltaMemory, blocks: BlockTexts, most_replayed: int) -> Tensor:
    """The states [R, H, K, V] before the blocks, stored where more than `most_replayed` rows were replayed."""
    size, repeat = memory.keys.shape[1], memory.deltas.shape[2] // memory.keys.shape[2]
    counts = blocks.lens - blocks.state_lens
    state = whole_states(memory.states[blocks.texts], memory.deltas.shape[3])
    for index in range(int(counts.max()) if len(counts) else 0):
        slot = (blocks.state_lens + index) % size
        key = memory.keys[blocks.texts, slot].repeat_interleave(repeat, 1)[..., None]
        decay, delta = memory.decays[blocks.texts, slot], memory.deltas[blocks.texts, slot]
        replayed = state * decay.exp()[:, :, None, None] + key * delta[:, :, None]
        state = torch.where((index < counts)[:, None, None, None], replayed, state)
    is_stored = counts > most_replayed
    memory.states[blocks.texts[is_stored]] = state_tiles(state[is_stored])
    return state


def gate_values(gates: Gates, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's decay, and its beta, both [T, H]."""
    decay, beta, log_rate, bias = (item.to(wide) for item in gates)
    return -log_rate.exp() * functional.softplus(decay + bias), beta.sigmoid()


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPSILON)


@jit
def load_gates(decay_in, beta_in, place_decay, place_beta, is_row, rate, shift):
    """Return the logarithm of the decay of rows, and their beta, in float32."""
    gate = tl.load(decay_in + place_decay, mask=is_row, other=0.0).to(tl.float32) + shift
    grown = tl.exp(tl.minimum(gate, 20.0))
    softplus = tl.where(grown < 0.01, grown * (1.0 - grown * (0.5 - grown / 3.0)), tl.log(1.0 + grown))
    beta = tl.sigmoid(tl.load(beta_in + place_beta, mask=is_row, other=0.0).to(tl.float32))
    return -rate * tl.where(gate > 20.0, gate, softplus), beta


@jit
def state_places(states, home, key, value, VALUE: tl.constexpr, KEY: tl.constexpr):
    """Return where the elements [K, V] of the state number `home` are, and which of them exist."""
    num_tiles: tl.constexpr = tl.cdiv(VALUE, _TL_STATE_TILE)
    tile = value // _TL_STATE_TILE
    first = states + ((home * num_tiles + tile) * KEY * _TL_STATE_TILE + value % _TL_STATE_TILE)[None, :]
    return first + key[:, None] * _TL_STATE_TILE, (key < KEY)[:, None] & (tile < num_tiles)[None, :]


@jit
def _add_correction(state, key, delta, TILE_K: tl.constexpr, TILE_V: tl.constexpr):
    """Replay and rule must round alike, so both add corrections here."""
    keys, deltas = tl.broadcast_to(key[:, None], (TILE_K, TILE_V)), tl.broadcast_to(delta[None, :], (TILE_K, TILE_V))
    return tl.fma(keys, deltas, state)


@jit
def replay_rows(
    state, keys, deltas, decays, text, done, num_replayed, ring_size, key, is_key, value, is_value, group, head,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr,
    TILE_V: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Return the state after the recorded rows from `done` on."""
    place = (done % ring_size).to(tl.int32)  # divisions of 64 bits are slow
    next_key, next_delta, next_decay = _load_record(
        keys, deltas, decays, text * ring_size + place, key, is_key, value, is_value, group, head,
        NUM_HEADS, NUM_KEYS, VALUE, KEY,
    )  # fmt: skip
    for _ in range(num_replayed):
        old_key, old_delta, decay = next_key, next_delta, next_decay
        place = tl.where(place + 1 == ring_size, 0, place + 1)
        # The next record is loaded while this one is computed. After the last one, the loaded numbers are not used.
        next_key, next_delta, next_decay = _load_record(
            keys, deltas, decays, text * ring_size + place, key, is_key, value, is_value, group, head,
            NUM_HEADS, NUM_KEYS, VALUE, KEY,
        )  # fmt: skip
        state = _add_correction(state * tl.exp(decay), old_key, old_delta, TILE_K, TILE_V)
    return state


@jit
def _load_record(
    keys, deltas, decays, slot, key, is_key, value, is_value, group, head,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """Return the key, delta and decay of a recorded row."""
    old_key = tl.load(keys + (slot * NUM_KEYS + group) * KEY + key, mask=is_key, other=0.0)
    old_delta = tl.load(deltas + (slot * NUM_HEADS + head) * VALUE + value, mask=is_value, other=0.0)
    return old_key, old_delta, tl.load(decays + slot * NUM_HEADS + head)


@jit
def _load_row(
    rows, row, rows_row, key, is_key, value, is_value, group, head,
    NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """Return a row's query, key and value."""
    source = rows + row * rows_row
    ask = tl.load(source + group * KEY + key, mask=is_key, other=0.0)
    new_key = tl.load(source + (NUM_KEYS + group) * KEY + key, mask=is_key, other=0.0)
    return ask, new_key, tl.load(source + 2 * NUM_KEYS * KEY + head * VALUE + value, mask=is_value, other=0.0)


@jit
def _dot(one, other):
    """Return the inner product of two vectors, the same in every lane.

    Each product is rounded. In `a * b + c * d` the compiler would round only one product, and another one in each lane.
    """
    return tl.sum(tl.fma(one, other, tl.zeros_like(one)), 0)


@jit
def _pick(numbers, index, COUNT: tl.constexpr):
    """Return one of `COUNT` numbers."""
    return tl.sum(tl.where(tl.arange(0, COUNT) == index, numbers, 0.0), 0)


@jit(do_not_specialize=["num_rows", "most_replayed"])
def _delta_rule_kernel(
    rows, decay_in, beta_in, log_rate, bias, states, keys, deltas, decays, texts, state_lens, lens, out,
    num_rows, ring_size, most_replayed, rows_row, decay_row, beta_row, scale, eps,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr,
    TILE_V: tl.constexpr, TILE_K: tl.constexpr, TILE_R: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    request, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = head // (NUM_HEADS // NUM_KEYS)
    text, done, begin = tl.load(texts + request), tl.load(state_lens + request), tl.load(lens + request)
    value, key, lane = part * TILE_V + tl.arange(0, TILE_V), tl.arange(0, TILE_K), tl.arange(0, TILE_R)
    is_value, is_key = value < VALUE, key < KEY
    place, is_home = state_places(states, text * NUM_HEADS + head, key, value, VALUE, KEY)
    rate, shift = tl.exp(tl.load(log_rate + head)), tl.load(bias + head)
    first, slot = request * num_rows, (begin % ring_size).to(tl.int32)
    # The launch before this one writes neither states nor records: they come from earlier steps.
    num_replayed = (begin - done).to(tl.int32)
    state = replay_rows(
        tl.load(place, mask=is_home, other=0.0), keys, deltas, decays, text, done, num_replayed, ring_size,
        key, is_key, value, is_value, group, head, NUM_HEADS, NUM_KEYS, VALUE, KEY, TILE_V, TILE_K,
    )  # fmt: skip
    if num_replayed > most_replayed:
        tl.store(place, state, mask=is_home)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    next_ask, next_key, next_value = _load_row(
        rows, first, rows_row, key, is_key, value, is_value, group, head, NUM_KEYS, VALUE, KEY
    )
    # One place computes the gates of all rows, so that each row rounds alike wherever it is in its block.
    flat, is_row = first + lane, lane < num_rows
    decay, beta = load_gates(decay_in, beta_in, flat * decay_row + head, flat * beta_row + head, is_row, rate, shift)
    slots = slot + lane
    slots = text * ring_size + tl.where(slots >= ring_size, slots - ring_size, slots)
    tl.store(decays + slots * NUM_HEADS + head, decay, mask=is_row & (part == 0))
    grown = tl.exp(decay)
    for index in range(num_rows):
        ask, new_key, new_value = next_ask.to(tl.float32), next_key.to(tl.float32), next_value.to(tl.float32)
        # The next row is loaded while this one is computed.
        row = first + index
        next_ask, next_key, next_value = _load_row(
            rows, tl.minimum(row + 1, first + num_rows - 1), rows_row, key, is_key, value, is_value, group, head,
            NUM_KEYS, VALUE, KEY,
        )  # fmt: skip
        # All sums run side by side: lengths are factors of sums, and the query reads the state before its correction.
        state = state * _pick(grown, index, TILE_R)
        known, asked = tl.sum(state * new_key[:, None], 0), tl.sum(state * ask[:, None], 0)
        ask_scale = tl.rsqrt(_dot(ask, ask) + eps) * scale
        key_scale = tl.rsqrt(_dot(new_key, new_key) + eps)
        near = _dot(ask, new_key) * key_scale
        delta = (new_value - known * key_scale) * _pick(beta, index, TILE_R)
        result = (asked + delta * near) * ask_scale
        new_key = new_key * key_scale
        state = _add_correction(state, new_key, delta, TILE_K, TILE_V)
        tl.store(out + (row * NUM_HEADS + head) * VALUE + value, result.to(out.dtype.element_ty), mask=is_value)
        record = text * ring_size + slot
        slot = tl.where(slot + 1 == ring_size, 0, slot + 1)
        tl.store(deltas + (record * NUM_HEADS + head) * VALUE + value, delta, mask=is_value)
        if (part == 0) & (head % (NUM_HEADS // NUM_KEYS) == 0):
            tl.store(keys + (record * NUM_KEYS + group) * KEY + key, new_key, mask=is_key)


def delta_rule(
    rows: Tensor,
    gates: Gates,
    memory: DeltaMemory,
    blocks: BlockTexts,
    most_replayed: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `delta_rule_ref` in one launch. Every program runs the rows of a block one after another."""
    num_rows = check_blocks(rows, gates, memory, blocks, most_replayed)
    _, size, num_keys, key_size = memory.keys.shape
    num_heads, value_size = memory.deltas.shape[2:]
    count = len(blocks.texts)
    out = room_for(rows, num_heads, value_size) if out is None else out
    require(out.is_contiguous() and out.shape == (len(rows), num_heads, value_size), "out", "[rows, heads, values]")
    if num_rows:
        _delta_rule_kernel[(count, num_heads, memory.states.shape[2])](
            rows, *gates, *memory, *blocks, out, num_rows, size, most_replayed,
            rows.stride(0), gates.decay.stride(0), gates.beta.stride(0), key_size**-0.5, EPSILON,
            NUM_HEADS=num_heads, NUM_KEYS=num_keys, VALUE=value_size, KEY=key_size,
            TILE_V=STATE_TILE, TILE_K=max(MIN_DOT, power_of_2(key_size)),
            TILE_R=max(MIN_DOT, power_of_2(num_rows)), **SERIAL_LAUNCH,
            **early(rows.device),
        )  # fmt: skip
    return out


def check_blocks(rows: Tensor, gates: Gates, memory: DeltaMemory, blocks: BlockTexts, most_replayed: int) -> int:
    """Check the arguments of a launch -> the number of rows of a block."""
    check_tensors(rows, *gates, *memory, *blocks)
    _, size, num_keys, key_size = memory.keys.shape
    num_heads, value_size = memory.deltas.shape[2:]
    count = len(blocks.texts)
    require(all(item.dtype == torch.float32 for item in memory), "memory", "float32")
    require(all(item.is_contiguous() for item in memory), "memory", "contiguous tensors")
    require(num_heads % num_keys == 0, "memory", "value heads as a multiple of key heads")
    tiled = (ceil_div(value_size, STATE_TILE), key_size, STATE_TILE)
    require(memory.states.shape[1:] == (num_heads, *tiled), "memory", "states in tiles")
    width = 2 * num_keys * key_size + num_heads * value_size
    require(rows.shape[1] == width and rows.stride(1) == 1, "rows", "queries, keys and values of every head")
    require(count > 0 and len(rows) % count == 0, "rows", "whole blocks")
    require(all(item.stride(1) == 1 and len(item) == len(rows) for item in gates[:2]), "gates", "one row per row")
    num_rows = len(rows) // count
    require(most_replayed + 2 * num_rows <= size, "memory", "a ring of the replayed rows and two blocks")
    return num_rows


def room_for(rows: Tensor, num_heads: int, value_size: int) -> Tensor:
    """A new tensor [T, H, V] for the results of rows [T, C]."""
    return torch.empty((len(rows), num_heads, value_size), dtype=rows.dtype, device=rows.device)
