"""Sums over ranks inside the norm: equal to the sum of all parts, with equal bits, step for step.

Ranks run one after another here. So the test writes the messages of ranks that run later, and the kernel must write
those of ranks that ran before.
"""

from collections.abc import Iterable
from functools import reduce

import pytest
import torch
from torch import Tensor

from dflash_kernels.norms.pushed_sum import SLOTS, Rooms, messages_ref
from dflash_kernels.norms.rope_norm import add_rms_norm_of_ranks, add_rms_norm_ref
from dflash_testing.tensors import DEVICE, DTYPES, assert_rows_close, normal

LENGTH, ROWS = 512, 8


def open_rooms(num_ranks: int) -> list[Rooms]:
    owns = [torch.zeros(SLOTS, num_ranks, LENGTH, dtype=torch.int64, device=DEVICE) for _ in range(num_ranks)]
    addresses = torch.tensor([own.data_ptr() for own in owns], device=DEVICE)
    return [
        Rooms(own, addresses, torch.zeros(ROWS, dtype=torch.int32, device=DEVICE), rank)
        for rank, own in enumerate(owns)
    ]


def in_order(numbers: Iterable[Tensor]) -> Tensor:
    """The sum from first to last."""
    return reduce(torch.add, numbers)


def send(rooms: list[Rooms], sender: int, numbers: Tensor) -> None:
    """Write the next message of a rank into the rooms of ranks before it."""
    num_rows, width = numbers.shape
    for reader in rooms[:sender]:
        counts = reader.counts[:num_rows] + 1
        messages = messages_ref(numbers, counts)
        for row, count in enumerate(counts.tolist()):
            reader.own[count % SLOTS, sender, row * width : (row + 1) * width] = messages[row]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_ranks", "num_parts", "width"), [(2, 1, 64), (2, 3, 40), (3, 2, 63), (4, 1, 1)])
def test_ranks_add_all_parts(num_ranks: int, num_parts: int, width: int, dtype: torch.dtype) -> None:
    """Several sums with different numbers of rows, so that slots are used again."""
    rooms, kind = open_rooms(num_ranks), torch.float32 if num_parts > 1 else dtype
    weight = normal(width, dtype=dtype, seed=99)
    for step, num_rows in enumerate((1, 4, 2, 8, 8, 1)):
        parts = [normal(num_parts, num_rows, width, dtype=kind, seed=step * 10 + rank) for rank in range(num_ranks)]
        sums = [in_order(own.float()) for own in parts]
        residual = normal(num_rows, width, dtype=dtype, seed=step + 50)
        for rank in range(1, num_ranks):
            send(rooms, rank, sums[rank])
        results = [add_rms_norm_of_ranks(parts[rank], residual, weight, 1e-6, rooms[rank]) for rank in range(num_ranks)]
        for normed, total in results[1:]:
            assert torch.equal(normed, results[0][0])
            assert torch.equal(total, results[0][1])
        normed, total = results[0]
        assert torch.equal(total, in_order(sums).to(dtype) + residual)
        expected = add_rms_norm_ref(total[None], torch.zeros_like(total), weight, 1e-6)[0]
        assert_rows_close(normed, expected.double(), dtype)
    for room in rooms:
        assert room.counts.tolist() == [6, 4, 3, 3, 2, 2, 2, 2]


def test_rooms_take_no_more_than_they_hold() -> None:
    room = open_rooms(2)[0]
    assert room.takes(ROWS, LENGTH // ROWS)
    assert not room.takes(ROWS + 1, 1)
    assert not room.takes(ROWS, LENGTH // ROWS + 1)
    parts = normal(1, ROWS, LENGTH)
    with pytest.raises(ValueError, match="rooms"):
        add_rms_norm_of_ranks(parts, parts[0], normal(LENGTH), 1e-6, room)
