"""Beginning and end of a step: the kernels equal the references for any state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.slot_mapping import PAD
from dflash_kernels.step_rows import (
    NUM_FIELDS,
    Bounds,
    RowState,
    StepRows,
    close_step,
    close_step_ref,
    open_step,
    open_step_ref,
)
from dflash_testing.tensors import DEVICE

PAGE, NUM_STOPS, VOCAB = 4, 3, 4
BOUNDS = Bounds(max_model_len=70, last_draft_len=61, page_size=PAGE, mask_id=99)


def draw(seed: int, low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(DEVICE)


def random_state(num_rows: int, seed: int) -> RowState:
    """Return rows of any length up to the model's limit. Some are done, and some lack pages."""
    table = draw(seed, 1, 400, num_rows, 20)
    table[:, 15:] = draw(seed + 1, 0, 2, num_rows, 5)
    return RowState(
        done=draw(seed + 2, 0, 4, num_rows) == 0,
        kv_lens=draw(seed + 3, 0, 70, num_rows),
        anchors=draw(seed + 4, 0, VOCAB, num_rows),
        remaining=draw(seed + 5, 1, 12, num_rows),
        reserved_lens=draw(seed + 6, 0, 84, num_rows),
        widths=draw(seed + 7, 1, 9, num_rows),
        generations=draw(seed + 8, 0, 2**40, num_rows),
        stop_ids=draw(seed + 9, -1, VOCAB, num_rows, NUM_STOPS),
        page_table=table,
    )


def copied(state: RowState) -> RowState:
    return RowState(*(tensor.clone() for tensor in state))


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(("num_block", "num_verified"), [(1, 1), (2, 2), (8, 8), (8, 3), (8, 1), (16, 16), (5, 4)])
@pytest.mark.parametrize("seeds", [(0, 20, 40), pytest.param((60, 80, 100), marks=pytest.mark.slow)])
def test_both_ends_of_a_step_equal_the_references(seeds: tuple[int, ...], num_block: int, num_verified: int) -> None:
    for seed in seeds:
        state = random_state(24, seed)
        rows = torch.randperm(24, generator=torch.Generator().manual_seed(seed))[:17].to(DEVICE)
        step = open_step(state, rows, num_block, num_verified, BOUNDS)
        assert_same(step, open_step_ref(state, rows, num_block, num_verified, BOUNDS))
        ids = draw(seed, -1, VOCAB, 17, num_verified - 1), draw(seed + 1, 0, VOCAB, 17, num_verified)
        given: tuple[Any, ...] = (rows, step, *ids, step.max_accepted, draw(seed + 2, 0, 5, 17, num_verified) > 0)
        mine, theirs = copied(state), copied(state)
        assert_same(close_step(mine, *given), close_step_ref(theirs, *given))
        assert_same(mine, theirs)


def test_a_done_row_does_not_change_if_it_occurs_several_times() -> None:
    """CUDA graphs pad their batches with a done row."""
    state = random_state(5, 3)
    state.done[4] = True
    before = copied(state)
    rows = torch.full((6,), 4, device=DEVICE)
    step = open_step(state, rows, 8, 8, BOUNDS)
    assert step.slots.tolist() == [[PAD] * 8] * 6
    assert step.context_lens.tolist() == [0] * 6
    ids = draw(0, 0, VOCAB, 6, 7), draw(1, 0, VOCAB, 6, 8)
    packed, slots = close_step(state, rows, step, *ids, step.max_accepted, torch.ones_like(ids[1], dtype=torch.bool))
    assert_same(state, before)
    assert packed[:, 0].tolist() == [0] * 6
    assert packed.shape == (6, NUM_FIELDS + 15)
    assert bool((slots == PAD).all())


def test_slots_above_32_bits() -> None:
    state = random_state(1, 0)
    state.done.fill_(False)
    state.kv_lens.fill_(3)
    state.reserved_lens.fill_(4)
    state.page_table.fill_(2**31)
    assert open_step(state, torch.zeros(1, dtype=torch.int64, device=DEVICE), 2, 2, BOUNDS).slots.tolist() == [
        [2**31 * PAGE + 3, PAD]
    ]  # fmt: skip


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    state, rows = random_state(3, 0), torch.tensor([0, 1], device=DEVICE)
    with pytest.raises(ValueError, match=r"^num_verified: "):
        open_step(state, rows, 4, 5, BOUNDS)
    step: StepRows = open_step(state, rows, 4, 4, BOUNDS)
    with pytest.raises(ValueError, match=r"^draft_ids: "):
        close_step(state, rows, step, step.slots, step.slots, step.max_accepted, step.slots > 0)
