"""A snapshot at a boundary inside a block equals the state that the text has after exactly these rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_kernels.launch import HAS_TRITON
from dflash_kernels.recurrent.delta_rule import BlockTexts, Gates, delta_rule_ref, empty_states
from dflash_kernels.recurrent.recent_conv import RowRuns, recent_conv_ref
from dflash_kernels.recurrent.state_snapshots import LayerMemories, PassedRows, Snapshots, keep_passed, keep_passed_ref
from dflash_testing.tensors import normal

LAYERS, TEXTS, HEADS, KEYS, VALUE, KEY, TAPS, BLOCK = 2, 4, 4, 2, 24, 16, 4, 5
WIDTH = 2 * KEYS * KEY + HEADS * VALUE
POISON = -7.0
MOST_REPLAYED = 4

IMPLEMENTATIONS = [
    pytest.param(keep_passed_ref, marks=pytest.mark.reference),
    pytest.param(keep_passed, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
]


def empty(device: torch.device) -> LayerMemories:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(LAYERS, TEXTS, *shape, device=device)

    size = MOST_REPLAYED + 2 * BLOCK
    records = (zeros(size, KEYS, KEY), zeros(size, HEADS, VALUE), zeros(size, HEADS))
    states = empty_states(LAYERS * TEXTS, HEADS, KEY, VALUE, torch.float32, device).unflatten(0, (LAYERS, TEXTS))
    return LayerMemories(states, *records, zeros(BLOCK + TAPS - 1, WIDTH))


def run(memories: LayerMemories, rows: Tensor, gates: Gates, most_replayed: int, blocks: BlockTexts) -> None:
    """Run a block of rows [LAYERS, R * W, WIDTH]."""
    for index in range(LAYERS):
        memory, ring = memories.of_layer(index)
        recent_conv_ref(
            rows[index], torch.ones(TAPS, WIDTH, device=rows.device), ring, RowRuns(blocks.texts, blocks.lens)
        )
        delta_rule_ref(rows[index], gates, memory, blocks, most_replayed)


@pytest.mark.parametrize("keep", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("most_replayed", [0, MOST_REPLAYED])
def test_snapshots_equal_states_after_as_many_rows(
    keep: Callable[..., None], page_size: int, most_replayed: int
) -> None:
    """Blocks of three texts accept 5, 2 and 0 rows after 6 rows, and a fourth text has no slot.

    With `MOST_REPLAYED` the stored state is older than the block.
    """
    device = normal(1).device
    texts, accepted = torch.tensor([2, 0, 3, 1]).to(device), torch.tensor([5, 2, 0, 5]).to(device)
    slots = torch.tensor([1, 3, 0, -1]).to(device)
    before = torch.full((4,), 6, device=device)
    rows = normal(LAYERS, 4, 7 + BLOCK, WIDTH)
    gates = normal(2, 4, 7 + BLOCK, HEADS, seed=1)
    parameters = normal(HEADS, seed=3).sub(2.0), normal(HEADS, seed=4)

    def filled(counts: list[int], most_replayed: int) -> tuple[LayerMemories, Tensor]:
        """Memories after these blocks of rows, and the rows in the stored states."""
        memories, done = empty(device), torch.zeros_like(before)
        state_lens = done.clone()
        for count in counts:
            part = slice(int(done[0]), int(done[0]) + count)
            decay, beta = (item[:, part].flatten(0, 1).contiguous() for item in gates)
            inputs = rows[:, :, part].flatten(1, 2).contiguous()
            blocks = BlockTexts(texts, state_lens, done)
            run(memories, inputs, Gates(decay, beta, *parameters), most_replayed, blocks)
            state_lens = torch.where(done - state_lens > most_replayed, done, state_lens)
            done = done + count
        return memories, state_lens

    memories, state_lens = filled([5, 1, BLOCK], most_replayed)
    assert set(state_lens.tolist()) == {5 if most_replayed else 6}
    snapshots = Snapshots(
        torch.full((5, *memories.states[:, 0].shape), POISON, device=device),
        torch.full((5, LAYERS, TAPS - 1, WIDTH), POISON, device=device),
    )
    keep(memories, PassedRows(texts, slots, state_lens, before, before + accepted), snapshots, page_size)
    written = set()
    for place, slot in enumerate(slots.tolist()):
        boundary = (6 + int(accepted[place])) // page_size * page_size
        if slot < 0 or boundary <= 6:
            continue
        written.add(slot)
        # One more row stores the state at the boundary.
        exact, _ = filled([3, 3, *[1] * (boundary - 6), 1], 0)
        text = int(texts[place])
        torch.testing.assert_close(snapshots.states[slot], exact.states[:, text], rtol=1e-6, atol=1e-6)
        wanted = rows[:, place, boundary - TAPS + 1 : boundary]
        torch.testing.assert_close(snapshots.latest[slot], wanted, rtol=0, atol=0)
    for slot in set(range(5)) - written:
        assert (snapshots.states[slot] == POISON).all()
        assert (snapshots.latest[slot] == POISON).all()
    assert bool(written) == (page_size < 16)
