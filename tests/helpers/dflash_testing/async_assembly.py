"""Memory of a simulated program in PTX, and what runs beside the program: copies and products of tensor cores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dflash_testing.assembly import bfloat16_of

WORD, LANES = 0xFFFFFFFF, 32

Registers = dict[str, Tensor]

Shared = dict[int, Tensor]
"""Words of shared memory by their addresses."""

SWIZZLED = 1 << 30
"""The bit of a descriptor's upper word that says that rows have 128 bytes, in places that depend on the row."""

POISON = torch.tensor(0x7FC07FC0)
"""Two bfloat16 numbers that are not a number: what shared memory holds before something is written."""


class Source(Protocol):
    """Global memory."""

    def load(self, addresses: Tensor) -> Tensor:
        """Return the words at addresses, which are multiples of 4."""


@dataclass(frozen=True)
class Memory:
    """Words of global memory from an address on. Loads outside of it fail."""

    first: int
    words: Tensor

    def load(self, addresses: Tensor) -> Tensor:
        places = addresses - self.first
        assert not (places % 4).any(), "an address is no multiple of 4"
        assert bool(((places >= 0) & (places < 4 * len(self.words))).all()), "a load outside of memory"
        return self.words[places // 4] & WORD


@dataclass
class Pending:
    """Groups of work that a warp has begun. Work is done as late as possible, when the warp waits for it."""

    begun: list[Callable[[], None]] = field(default_factory=list)
    groups: list[list[Callable[[], None]]] = field(default_factory=list)

    def add(self, work: Callable[[], None]) -> None:
        self.begun.append(work)

    def commit(self) -> None:
        self.groups.append(self.begun)
        self.begun = []

    def wait(self, most: int) -> None:
        """Do the oldest groups until at most some are left."""
        while len(self.groups) > most:
            for work in self.groups.pop(0):
                work()


@dataclass
class _Barrier:
    """A phase ends when all have arrived and all bytes are there."""

    expected: int
    arrived: int = 0
    missing_bytes: int = 0
    phase: int = 0

    def end_phase(self) -> None:
        assert self.arrived <= self.expected, "more arrivals than expected"
        if self.arrived == self.expected and not self.missing_bytes:
            self.phase, self.arrived = self.phase + 1, 0


@dataclass
class Barriers:
    """The barriers of a program by their addresses, and copies that they await. `is_late`: they are done in a wait."""

    memory: Source
    shared: Shared
    is_late: bool
    made: dict[int, _Barrier] = field(default_factory=dict)
    copies: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def count(self, kind: Sequence[str], at: int, given: int) -> None:
        """Make a barrier for a number of arrivals, or arrive, and perhaps expect a number of bytes."""
        if kind[0] == "init":
            self.made[at] = _Barrier(given)
            return
        barrier = self.made[at]
        barrier.missing_bytes += given
        barrier.arrived += 1
        barrier.end_phase()

    def copy(self, to: int, source: int, num_bytes: int, full: int) -> None:
        """Copy bytes to shared memory. Addresses and numbers of bytes are multiples of 16."""
        assert num_bytes > 0, "a copy of nothing"
        assert not (to | source | num_bytes) % 16, "a copy of parts of 16 bytes"
        self.copies.setdefault(full, []).append((to, source, num_bytes))
        if not self.is_late:
            self._finish(full)

    def is_done(self, at: int, parity: int) -> bool:
        """Return whether the last phase that ended has this parity."""
        if self.made[at].phase % 2 != parity:
            return True
        self._finish(at)
        return False

    def _finish(self, full: int) -> None:
        for to, source, num_bytes in self.copies.pop(full, []):
            words = torch.arange(0, num_bytes, 4)
            self.shared |= zip((to + words).tolist(), self.memory.load(source + words), strict=True)
            self.made[full].missing_bytes -= num_bytes
            self.made[full].end_phase()


def shared_rows(shared: Shared, descriptor: int, num_rows: int) -> Tensor:
    """Return 16 columns of rows in shared memory, as `wgmma` reads them by a descriptor, float64 [N, 16]."""
    assert descriptor >> 32 & ~0x3FFF == SWIZZLED, "rows of 128 bytes with swizzle"
    row, word = torch.arange(num_rows)[:, None], torch.arange(8)[None, :]
    eight_rows = (descriptor >> 32 & 0x3FFF) * 16
    address = (descriptor & 0x3FFF) * 16 + row // 8 * eight_rows + row % 8 * 128 + word * 4
    address ^= (address >> 7 & 7) << 4
    words = torch.stack([shared.get(at, POISON) for at in address.flatten().tolist()]).view(num_rows, 8)
    return torch.stack([bfloat16_of(words), bfloat16_of(words >> 16)], dim=-1).flatten(1)
