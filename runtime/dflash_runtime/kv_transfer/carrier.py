"""The interface of carriers: how the bytes of tensors travel between two processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.payload_bytes import as_bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """Tensors that are ready to travel: contiguous, in memory from which the carrier sends.

    `directions` is JSON that tells the other side how to fetch them. `registration` is the carrier's own handle.
    """

    tensors: Mapping[str, Tensor]
    directions: Mapping[str, Any] = field(default_factory=dict)
    registration: Any = None


class Carrier(Protocol):
    """Moves tensors from the sender, which stages them, to the receiver. Both sides handle tensors in the same order.

    One thread calls all methods except `stop`. An error from `send` or `receive` ends the connection.
    """

    name: str
    takes_device: bool

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Make completely written tensors ready to travel."""
        ...

    def send(self, staged: Staged) -> None:
        """Send tensors to the other side, which is receiving. Does nothing if the other side fetches them itself."""
        ...

    def release(self, staged: Staged) -> None:
        """Free the resources that staging took."""
        ...

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Empty tensors to receive into."""
        ...

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        """Fill tensors. They are complete when it returns."""
        ...

    def stop(self) -> None:
        """End a running transfer with an error, if possible. Called from another thread."""
        ...

    def close(self) -> None:
        """Free all resources."""
        ...


def filled_bytes(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The bytes of each tensor that is not empty, in order: [bytes] uint8, on their devices."""
    return [as_bytes(tensor) for tensor in tensors.values() if tensor.numel()]
