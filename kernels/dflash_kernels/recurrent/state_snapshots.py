"""Copy the state of a text at the last page boundary that its block passed, for all recurrent layers in one launch.

The rows after a stored state are records (`delta_rule.py`). The state at a boundary among the accepted rows is the
stored state with the records before the boundary replayed, by the same operations in the same order as in the next
block. A program without a boundary ends at once.

Axis letters: R requests, L layers, B texts, M rows of a ring, H value heads, G key heads, V and K sizes of a value and
a key, P tiles of T columns of a state, C channels, S taps, N snapshots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch import check_tensors, jit, power_of_2, require, tl
from dflash_kernels.launch_config import ELEMENT_TILE
from dflash_kernels.recurrent.delta_rule import (
    STATE_TILE,
    DeltaMemory,
    replay_rows,
    state_places,
    state_tiles,
    whole_states,
)


class LayerMemories(NamedTuple):
    """The memory of every text in all recurrent layers; see `DeltaMemory` and `recent_conv`."""

    states: Tensor
    """[L, B, H, P, K, T] float32"""
    keys: Tensor
    """[L, B, M, G, K] float32"""
    deltas: Tensor
    """[L, B, M, H, V] float32"""
    decays: Tensor
    """[L, B, M, H] float32"""
    rings: Tensor
    """[L, B, M', C], inputs of the convolution by position modulo M'"""

    def of_layer(self, index: int) -> tuple[DeltaMemory, Tensor]:
        """The records and the ring of one layer."""
        return DeltaMemory(*(item[index] for item in self[:4])), self.rings[index]


class Snapshots(NamedTuple):
    """Copies of states and of the rows before the next row."""

    states: Tensor
    """[N, L, H, P, K, T] float32"""
    latest: Tensor
    """[N, L, S - 1, C], oldest row first"""


class PassedRows(NamedTuple):
    """The rows that blocks added to their texts, and where a snapshot goes."""

    texts: Tensor
    """[R] int64"""
    slots: Tensor
    """[R] int64, the snapshot to write; negative for none"""
    state_lens: Tensor
    """[R] int64, rows that the stored state includes"""
    before: Tensor
    """[R] int64, rows of the text before the block"""
    after: Tensor
    """[R] int64, rows of the text with the accepted rows of the block"""


def keep_passed_ref(memories: LayerMemories, passed: PassedRows, snapshots: Snapshots, page_size: int) -> None:
    """Write a snapshot at the last multiple of `page_size` in `(before, after]` of each text, if there is one."""
    repeat = memories.deltas.shape[3] // memories.keys.shape[3]
    size, num_rows = memories.keys.shape[2], memories.rings.shape[2]
    num_latest = snapshots.latest.shape[2]
    for text, slot, done, before, after in torch.stack(passed).T.tolist():
        boundary = after // page_size * page_size
        if slot < 0 or boundary <= before:
            continue
        state = whole_states(memories.states[:, text], memories.deltas.shape[4])
        for position in range(done, boundary):
            place = position % size
            key = memories.keys[:, text, place].repeat_interleave(repeat, 1)[..., None]
            decay, delta = memories.decays[:, text, place], memories.deltas[:, text, place]
            state = state * decay.exp()[..., None, None] + key * delta[:, :, None]
        snapshots.states[slot] = state_tiles(state)
        for index in range(num_latest):
            snapshots.latest[slot, :, index] = memories.rings[:, text, (boundary - num_latest + index) % num_rows]


@jit
def _keep_passed_kernel(
    states, keys, deltas, decays, rings, texts, slots, state_lens, before, after, kept_states, kept_latest,
    num_texts, num_layers, page_size, ring_size, num_ring_rows,
    NUM_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr,
    NUM_LATEST: tl.constexpr, TILE_V: tl.constexpr, TILE_K: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    request, head, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot, begin, end = tl.load(slots + request), tl.load(before + request), tl.load(after + request)
    boundary = end // page_size * page_size
    if (slot >= 0) & (boundary > begin):
        done, text = tl.load(state_lens + request), layer * num_texts + tl.load(texts + request)
        group = head // (NUM_HEADS // NUM_KEYS)
        value, key = tl.arange(0, TILE_V), tl.arange(0, TILE_K)
        is_value, is_key = value < VALUE, key < KEY
        source, is_home = state_places(states, text * NUM_HEADS + head, key, value, VALUE, KEY)
        home, _ = state_places(kept_states, (slot * num_layers + layer) * NUM_HEADS + head, key, value, VALUE, KEY)
        state = replay_rows(
            tl.load(source, mask=is_home, other=0.0),
            keys, deltas, decays, text, done, (boundary - done).to(tl.int32), ring_size,
            key, is_key, value, is_value, group, head, NUM_HEADS, NUM_KEYS, VALUE, KEY, TILE_V, TILE_K,
        )  # fmt: skip
        tl.store(home, state, mask=is_home)
        # Each head's program copies a part of the channels.
        for index in tl.static_range(NUM_LATEST):
            position = boundary - NUM_LATEST + index
            row = rings + (text * num_ring_rows + (position + num_ring_rows) % num_ring_rows) * WIDTH
            target = kept_latest + ((slot * num_layers + layer) * NUM_LATEST + index) * WIDTH
            for first in range(head * TILE_C, WIDTH, NUM_HEADS * TILE_C):
                channel = first + tl.arange(0, TILE_C)
                is_channel = channel < WIDTH
                tl.store(target + channel, tl.load(row + channel, mask=is_channel, other=0.0), mask=is_channel)


def keep_passed(memories: LayerMemories, passed: PassedRows, snapshots: Snapshots, page_size: int) -> None:
    """Compute `keep_passed_ref` in one launch, without waiting for the device."""
    check_tensors(*memories, *passed, *snapshots)
    num_layers, num_texts, size, num_keys, key_size = memories.keys.shape
    num_heads, value_size = memories.deltas.shape[3:]
    num_rows, width = memories.rings.shape[2:]
    num_latest = snapshots.latest.shape[2]
    given = (*memories, *passed, *snapshots)
    require(all(item.is_contiguous() for item in given), "memories, passed and snapshots", "contiguous tensors")
    require(snapshots.states.shape[1:] == (num_layers, *memories.states.shape[2:]), "snapshots", "states of all layers")
    require(snapshots.latest.shape[1:] == (num_layers, num_latest, width), "snapshots", "rows of all layers")
    if len(passed.texts) and len(snapshots.states):
        _keep_passed_kernel[(len(passed.texts), num_heads, num_layers)](
            *memories, *passed, *snapshots, num_texts, num_layers, page_size, size, num_rows,
            NUM_HEADS=num_heads, NUM_KEYS=num_keys, VALUE=value_size, KEY=key_size, WIDTH=width,
            NUM_LATEST=num_latest, TILE_V=power_of_2(memories.states.shape[3] * STATE_TILE),
            TILE_K=power_of_2(key_size), TILE_C=ELEMENT_TILE, num_warps=8,
        )  # fmt: skip
