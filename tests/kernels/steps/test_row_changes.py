"""Changes of rows between steps: the kernels equal the references and write nothing else."""

import random

import pytest
import torch
from torch import Tensor

from dflash_kernels.kv.slot_mapping import PAD, locate_rows, locate_rows_ref
from dflash_kernels.steps.row_changes import (
    NUM_CHANGE_FIELDS,
    HeldRows,
    ReadyRows,
    change_rows,
    change_rows_ref,
    switch_on_rows,
    switch_on_rows_ref,
)
from dflash_kernels.steps.step_rows import RowState
from dflash_testing.tensors import DEVICE

PAGE, NUM_ROWS = 16, 9


def ints(*shape: int, seed: int = 0, high: int = 2**40) -> Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def held_rows(num_stops: int, num_columns: int) -> HeldRows:
    """Return rows with random fields."""
    generations, widths, top_ks, seeds, reserved = ints(5, NUM_ROWS).unbind()
    floats = ints(2, NUM_ROWS, seed=1).double()
    return HeldRows(
        done=torch.zeros(NUM_ROWS, dtype=torch.bool, device=DEVICE), generations=generations, widths=widths,
        top_ks=top_ks, seeds=seeds, temperatures=floats[0], top_ps=floats[1], reserved_lens=reserved,
        stop_ids=ints(NUM_ROWS, num_stops, seed=2), page_table=ints(NUM_ROWS, num_columns, seed=3),
    )  # fmt: skip


def random_changes(seed: int, num_stops: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return changes of some rows. They may be assigned, and may gain pages from any column on."""
    rng = random.Random(seed)
    changes, pages = list[list[int]](), list[int]()
    for row in rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS)):
        is_given = rng.random() < 0.5
        column = 0 if is_given else rng.randint(0, num_columns)
        room = num_columns - column
        count = rng.choice([0, min(1, room), room, rng.randint(0, room)])
        fields = [rng.randint(-(2**62), 2**62) for _ in range(4)]
        bits = torch.tensor([rng.random(), rng.random()], dtype=torch.float64).view(torch.int64).tolist()
        stops = [rng.randint(-1, 500) for _ in range(num_stops)]
        changes.append([row, is_given, column, count, len(pages), *fields, *bits, *stops])
        pages += [rng.randint(1, 2**40) for _ in range(count)]
    sent = [torch.tensor(values, dtype=torch.int64, device=DEVICE) for values in (changes, pages)]
    return sent[0], sent[1]


def copied(rows: HeldRows) -> HeldRows:
    return HeldRows(*(tensor.clone() for tensor in rows))


@pytest.mark.parametrize(("num_stops", "num_columns"), [(16, 5), (3, 128), (1, 300)])
def test_changes_equal_the_reference(num_stops: int, num_columns: int) -> None:
    for seed in range(40):
        found = held_rows(num_stops, num_columns)
        expected = copied(found)
        changes, pages = random_changes(seed, num_stops, num_columns)
        change_rows(found, changes, pages, PAGE)
        change_rows_ref(expected, changes, pages, PAGE)
        for name, one, other in zip(HeldRows._fields, found, expected, strict=True):
            assert torch.equal(one, other), (seed, name)


@pytest.mark.parametrize("change", [change_rows, pytest.param(change_rows_ref, marks=pytest.mark.reference)])
def test_a_row_that_gains_pages_keeps_its_other_fields(change: object) -> None:
    before = held_rows(3, 6)
    after = copied(before)
    changes = torch.zeros((2, NUM_CHANGE_FIELDS + 3), dtype=torch.int64, device=DEVICE)
    changes[0, :5], changes[1, :5] = torch.tensor([4, 0, 2, 3, 0]), torch.tensor([7, 0, 0, 0, 3])
    change(after, changes, torch.tensor([11, 12, 13], device=DEVICE), PAGE)  # type: ignore[operator]
    expected = copied(before)
    expected.page_table[4, 2:5] = torch.tensor([11, 12, 13], device=DEVICE)
    expected.reserved_lens[4] = 5 * PAGE
    for one, other in zip(after, expected, strict=True):
        assert torch.equal(one, other)


def test_empty_changes_do_nothing() -> None:
    rows = held_rows(3, 6)
    change_rows(rows, torch.empty((0, NUM_CHANGE_FIELDS + 3), dtype=torch.int64, device=DEVICE), ints(0), PAGE)
    assert not len(switch_on_rows(running_rows(), ReadyRows(*ints(4, 0).unbind()), ints(0), rows.done[:0]))
    assert not rows.done.any()


def running_rows() -> RowState:
    """Return assigned rows before their prompts have run."""
    kv_lens, anchors, remaining, reserved, widths, generations = ints(6, NUM_ROWS, seed=4).unbind()
    return RowState(
        done=torch.ones(NUM_ROWS, dtype=torch.bool, device=DEVICE), kv_lens=kv_lens, anchors=anchors,
        remaining=remaining, reserved_lens=reserved, widths=widths, generations=generations,
        stop_ids=ints(NUM_ROWS, 3, seed=5, high=6) - 2, page_table=ints(NUM_ROWS, 4, seed=6),
    )  # fmt: skip


def ready_rows(rows: list[int], num_fresh: int) -> ReadyRows:
    return ReadyRows(
        torch.tensor(rows, device=DEVICE), ints(len(rows), seed=7), ints(len(rows), seed=8, high=4) - 1,
        ints(len(rows) - num_fresh, seed=9),
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "num_fresh"), [([3], 1), ([3], 0), ([8, 0, 5, 1], 3), (list(range(NUM_ROWS)), 9)])
def test_switching_on_equals_the_reference(rows: list[int], num_fresh: int) -> None:
    """Some first tokens are stop ids, some reach the limit, and some have logits that are not finite."""
    ready = ready_rows(rows, num_fresh)
    for seed in range(20):
        chosen, is_finite = ints(num_fresh, seed=seed, high=5), ints(num_fresh, seed=seed + 1, high=3) == 1
        found, expected = running_rows(), running_rows()
        packed = switch_on_rows(found, ready, chosen, is_finite)
        assert torch.equal(packed, switch_on_rows_ref(expected, ready, chosen, is_finite))
        for name, one, other in zip(RowState._fields, found, expected, strict=True):
            assert torch.equal(one, other), (seed, name)


@pytest.mark.parametrize("switch_on", [switch_on_rows, pytest.param(switch_on_rows_ref, marks=pytest.mark.reference)])
def test_a_request_that_ends_with_its_first_token_stays_done(switch_on: object) -> None:
    state = running_rows()
    state.stop_ids[[2, 4, 6]] = torch.tensor([[7], [8], [-1]], device=DEVICE)
    ready = ReadyRows(*(torch.tensor(item, device=DEVICE) for item in ([4, 2, 6, 0], [9] * 4, [5, 5, 1, 3], [44])))
    tokens, is_finite = torch.tensor([7, 7, 7], device=DEVICE), torch.tensor([True, True, False], device=DEVICE)
    packed = switch_on(state, ready, tokens, is_finite)  # type: ignore[operator]
    ends = [False, True, True]
    assert [bool(state.done[row]) for row in (4, 2, 6)] == ends
    generations = state.generations[[4, 2, 6]].tolist()
    finite = (1, 1, 0)
    assert packed.tolist() == [
        [1, 0, 0, end, number, generation, 7] for end, number, generation in zip(ends, finite, generations, strict=True)
    ]
    assert [state.remaining[row].item() for row in (4, 2, 6, 0)] == [4, 4, 0, 3]
    assert [state.anchors[row].item() for row in (4, 2, 6, 0)] == [7, 7, 7, 44]
    assert not state.done[0]


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    rows = held_rows(3, 6)
    with pytest.raises(ValueError, match=r"^changes: "):
        change_rows(rows, ints(2, NUM_CHANGE_FIELDS), ints(1), PAGE)
    with pytest.raises(ValueError, match=r"^tensors: "):
        change_rows(rows, ints(NUM_CHANGE_FIELDS + 3, 2).T, ints(1), PAGE)
    with pytest.raises(ValueError, match=r"^chosen: "):
        switch_on_rows(running_rows(), ready_rows([1, 2], 1), ints(2), rows.done[:2])


@pytest.mark.parametrize("lengths", [[1], [5, 1, 40], [1024], [1, 1023, 1025], [300] * 9])
def test_positions_and_slots_of_flat_rows_equal_the_reference(lengths: list[int]) -> None:
    """Chunks have any length after any context. Some positions lack a page."""
    rng = random.Random(len(lengths))
    table = ints(len(lengths) + 1, 200, high=2**40)
    table[:, ::7] = 0
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    shifts = [rng.randint(0, 1000) + length - end for length, end in zip(lengths, ends, strict=True)]
    rows = rng.sample(range(len(lengths) + 1), len(lengths))
    sent = [torch.tensor(values, device=DEVICE) for values in (ends, shifts, rows)]
    found, expected = (
        locate(table, sent[0], sent[1], sent[2], ends[-1], PAGE) for locate in (locate_rows, locate_rows_ref)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert (found[1] == PAD).any() == (expected[0] // PAGE % 7 == 0).any()


def test_no_rows_give_empty_results() -> None:
    nothing = ints(0)
    for locate in (locate_rows, locate_rows_ref):
        assert [len(part) for part in locate(ints(2, 3), nothing, nothing, nothing, 0, PAGE)] == [0, 0]
