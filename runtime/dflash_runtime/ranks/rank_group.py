"""The processes that share one target: sums and gathers of tensors, and agreement on what the host decides.

Every rank runs the same calls on its share of the target's weights. The results of sums and gathers are bitwise equal
on all ranks, so all ranks choose the same tokens and schedule the same steps without a message per step. Numbers that
may differ between ranks, such as free memory and measured times, are agreed on here.

Axis letters: P parts, T flat rows, D width, W columns of one rank, N ranks.
"""

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_kernels.norms.pushed_sum import Rooms
from dflash_runtime.errors import DFlashError, PeerUnreachable

LIMIT_S = 1800.0
"""Seconds that a rank waits for the others. A reader of a stream that pauses longer ends the run."""

LOOK_S = 0.05
"""Seconds between two looks whether the other ranks still run, while the device works."""

ENDED = "ranks-ended"
"""The id of the error if another rank has ended."""


Explain = Callable[[float], DFlashError | None]
"""Returns why another rank has ended, or None while all run. Waits at most this many seconds for the reason."""


def no_explanation(timeout_s: float) -> None:
    """See `Explain`: this rank is not told why others end."""


class Exchange(Protocol):
    """Moves tensors between the ranks on one kind of device."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Parts [P, ...] -> parts [1, ...] or [P, ...] that add up to the sum over all ranks, with equal bits on each.

        May overwrite its contiguous argument.
        """
        ...

    def rooms_for(self, parts: Tensor) -> Rooms | None:
        """Return where a norm adds up parts [P, T, D] of all ranks, or None if they need a sum of their own."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the contiguous tensors of all ranks in order, [N, ...]."""
        ...


class Ranks:
    """The ranks, seen from rank `rank` of `size`. With one rank every method returns its argument.

    device   exchanges tensors on the device of the models
    host     exchanges tensors in host memory
    explain  tells why another rank has ended
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: Exchange | None = None,
        host: Exchange | None = None,
        explain: Explain = no_explanation,
    ) -> None:
        self.rank, self.size = rank, size
        self.explain = explain
        self.on_device, self._host = device, host

    def total(self, parts: Tensor) -> Tensor:
        """Parts [P, T, D] of this rank -> parts that add up to the sum over all ranks."""
        if self.on_device is None:
            return parts
        return self.on_device.sum(parts.contiguous())

    def rooms_for(self, parts: Tensor) -> Rooms | None:
        """Return where a norm adds up parts [P, T, D] of all ranks, or None if `total` does."""
        return None if self.on_device is None else self.on_device.rooms_for(parts)

    def gather(self, columns: Tensor) -> Tensor:
        """Columns [T, W] of this rank -> the columns of all ranks side by side, [T, N * W]."""
        if self.on_device is None:
            return columns
        return self.on_device.gather(columns.contiguous()).movedim(0, 1).reshape(len(columns), -1)

    def least(self, value: int) -> int:
        """Return the least value of all ranks."""
        return value if self._host is None else int(self._gather_host([value]).min())

    def from_first(self, value: Any) -> Any:
        """Return the JSON value of rank 0. Other ranks pass anything."""
        if self._host is None:
            return value
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = int(self._gather_host([len(text)])[0])
        room = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0:
            room.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return json.loads(bytes(self._exchanged(room)[0].tolist()))

    def are_equal(self, digest: bytes) -> bool:
        """Whether all ranks pass the same digest, of a multiple of eight bytes."""
        if self._host is None:
            return True
        found = self._exchanged(torch.frombuffer(bytearray(digest), dtype=torch.int64))
        return bool((found == found[0]).all())

    def wait(self, event: "torch.cuda.Event | None", limit_s: float = LIMIT_S) -> None:
        """Wait for work on the device that may need the other ranks.

        Raises:
            PeerUnreachable: another rank has ended, or did not take part within the time limit.
        """
        if event is None:
            return
        if self.size == 1:
            event.synchronize()
            return
        until, look = time.monotonic() + limit_s, time.monotonic() + LOOK_S
        while not event.query():
            now = time.monotonic()
            if now < look:
                continue
            look = now + LOOK_S
            if (reason := self.explain(0)) is not None:
                raise reason
            if now > until:
                raise PeerUnreachable(f"a step did not end within {limit_s:g} s", id="ranks-stand-still")

    def _gather_host(self, values: list[int]) -> Tensor:
        return self._exchanged(torch.tensor(values, dtype=torch.int64))

    def _exchanged(self, tensor: Tensor) -> Tensor:
        """The host tensors of all ranks, [N, ...].

        Raises:
            PeerUnreachable: another rank has ended, or did not take part within the time limit.
        """
        assert self._host is not None
        return self._host.gather(tensor)


def current_event(device: torch.device) -> "torch.cuda.Event":
    """An event after all work that the current stream of a GPU has queued."""
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event


ALONE = Ranks()
"""A process with a whole target."""
