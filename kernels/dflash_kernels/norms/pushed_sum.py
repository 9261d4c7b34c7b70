"""The sum of a row over GPUs, inside a kernel: each GPU writes its numbers into the memory of the others.

A message is a row of numbers, each with the count of sums of its row so far. A reader waits until every number has the
new count, so no fence and no second round trip is needed. A room holds two messages per row and GPU. A GPU writes the
next but one message only after it has read the next one, which the reader sends after it has read this one. Therefore
nothing is overwritten too early. All GPUs add in the order of ranks, so their sums have equal bits.

Axis letters: T rows, D width, N ranks, L numbers of a message with all rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.launch import jit, tl

SLOTS = 2
"""Messages of a row that a room holds for each rank."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """The memory through which ranks send rows, seen from one rank. All rows have the same width.

    own        [2, N, L] int64   where other ranks write
    addresses  [N] int64         address of each rank's room on this device
    counts     [R] int32         sums of each row so far, 0 at first as in `own`; at most R rows, and R * D <= L
    rank       this rank
    """

    own: Tensor
    addresses: Tensor
    counts: Tensor
    rank: int

    @property
    def num_ranks(self) -> int:
        """Ranks, this one included."""
        return len(self.addresses)

    def takes(self, num_rows: int, width: int) -> bool:
        """Whether messages of this many rows of this width fit."""
        return num_rows <= len(self.counts) and num_rows * width <= self.own.shape[2]


def messages_ref(numbers: Tensor, counts: Tensor) -> Tensor:
    """Numbers [T, D] float32 with the counts [T] int32 of their rows -> messages [T, D] int64."""
    return (counts.long() << 32)[:, None] | (numbers.view(torch.int32).long() & 0xFFFFFFFF)


@jit
def sum_of_ranks(
    numbers, own_room, addresses, counts, row, dim, is_dim,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the sum over ranks of one row of numbers [TILE] float32. Call this once per row and launch."""
    count = tl.load(counts + row) + 1
    begin = (count % 2).to(tl.int64) * NUM_RANKS * LENGTH + row * WIDTH
    message = (count.to(tl.int64) << 32) | (numbers.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(NUM_RANKS):
        if rank != RANK:
            room = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
            tl.store(room + begin + RANK * LENGTH + dim, message, mask=is_dim)
    total = tl.zeros_like(numbers)
    for rank in tl.static_range(NUM_RANKS):
        if rank == RANK:
            total += numbers
        else:
            source = own_room + begin + rank * LENGTH + dim
            found = tl.load(source, mask=is_dim, other=0, volatile=True)
            while tl.max((is_dim & ((found >> 32) != count)).to(tl.int32), 0) > 0:
                found = tl.load(source, mask=is_dim, other=0, volatile=True)
            total += found.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(counts + row, count)
    return total
