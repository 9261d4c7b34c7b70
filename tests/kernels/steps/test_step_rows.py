"""Beginning and end of a step: the kernels equal the references for any state."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_kernels.drafts.tree_path import Path
from dflash_kernels.kv.slot_mapping import PAD
from dflash_kernels.steps.step_rows import (
    NUM_FIELDS,
    Bounds,
    RowState,
    StepRows,
    close_step,
    close_step_ref,
    close_tree,
    close_tree_ref,
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


@pytest.mark.parametrize(
    ("num_block", "num_verified"), [(1, 1), (2, 2), (8, 8), (8, 3), (8, 1), (16, 16), (5, 4), (4, 9)]
)
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


@pytest.mark.parametrize(("num_rows", "num_path"), [(9, 4), (5, 8), (70, 16)])
def test_a_path_of_a_tree_is_committed_as_the_reference_does(num_rows: int, num_path: int) -> None:
    """Paths end before their last row, or are longer than the tree has rows. Some rows are not finite."""
    for seed in (0, 20, 40):
        state = random_state(24, seed)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(24, generator=generator)[:17].to(DEVICE)
        step = open_step(state, rows, 4, num_rows, BOUNDS)
        places, ends = torch.arange(num_path, device=DEVICE), draw(seed, 1, min(num_rows, num_path) + 1, 17)[:, None]
        nodes = 1 + torch.rand(17, num_rows - 1, generator=generator).argsort(1)[:, : num_path - 1].sort(1).values
        path_rows = F.pad(nodes.to(DEVICE), (1, max(num_path - num_rows, 0))) * (places < ends)
        chosen = draw(seed + 1, 0, 10 * VOCAB, 17, num_rows)
        is_match = (places[1:] < ends) & (draw(seed + 2, 0, 7, 17, num_path - 1) > 0)
        drafted = torch.where(is_match, chosen.gather(1, path_rows)[:, :-1], -1)
        is_finite = draw(seed + 3, 0, 9, 17, num_rows) > 0
        given: tuple[Any, ...] = (rows, step, Path(path_rows, drafted), chosen, step.max_accepted, is_finite)
        mine, theirs = copied(state), copied(state)
        found, expected = close_tree(mine, *given), close_tree_ref(theirs, *given)
        assert int(expected[0][:, 0].max()) > 2
        assert_same(found, expected)
        assert_same(mine, theirs)


@pytest.mark.reference
def test_slots_of_a_committed_path_belong_to_its_rows() -> None:
    """Of a tree with 6 rows, rows 0, 2 and 5 are committed: positions 3 to 5 of the text, in slots 19 to 21."""
    state = random_state(1, 0)
    for field, value in zip(state[:6], (0, 3, 1, 9, 60, 9), strict=True):
        field.fill_(value)
    state.stop_ids.fill_(-1)
    state.page_table.fill_(1)
    rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    step = open_step_ref(state, rows, 4, 6, Bounds(64, 50, 16, 7))
    path = Path(torch.tensor([[0, 2, 5, 0]], device=DEVICE), torch.tensor([[4, 6, -1]], device=DEVICE))
    chosen = torch.tensor([[4, 0, 6, 0, 0, 8]], device=DEVICE)
    packed, slots, row_slots = close_tree_ref(state, rows, step, path, chosen, step.max_accepted, chosen >= 0)
    assert packed[0, NUM_FIELDS : NUM_FIELDS + 3].tolist() == [4, 6, 8]
    assert slots.tolist() == [[19, 20, 21, PAD]]
    assert row_slots.tolist() == [[19, PAD, 20, PAD, PAD, 21]]


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
    with pytest.raises(ValueError, match="num_verified: "):
        open_step(state, rows, 4, 0, BOUNDS)
    step: StepRows = open_step(state, rows, 4, 4, BOUNDS)
    with pytest.raises(ValueError, match=r"^draft_ids: "):
        close_step(state, rows, step, step.slots, step.slots, step.max_accepted, step.slots > 0)
