"""How the bytes of tensors travel between two processes; all that differs between connectors of that kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.payload_bytes import as_bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """Tensors that are ready to travel: contiguous, in memory from which the carrier sends.

    `directions` is what the other side needs to fetch them, as JSON has it; `registration` is the carrier's own.
    """

    tensors: Mapping[str, Tensor]
    directions: Mapping[str, Any] = field(default_factory=dict)
    registration: Any = None


class Carrier(Protocol):
    """Moves tensors from who stages them to who receives; both sides go through them in the same order.

    All but `stop` is called in one thread. An error that is raised by `send` or `receive` ends the connection.
    """

    name: str
    takes_device: bool

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Make tensors ready to travel; they are written already."""
        ...

    def send(self, staged: Staged) -> None:
        """Hand tensors to the other side, which has said that it receives; nothing where it fetches them itself."""
        ...

    def release(self, staged: Staged) -> None:
        """Give back what staging took."""
        ...

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Room for the tensors that will be received."""
        ...

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        """Fill tensors; they are complete when it returns."""
        ...

    def stop(self) -> None:
        """Have a transfer that is under way end with an error, if it can be; called from another thread."""
        ...

    def close(self) -> None:
        """Give back everything."""
        ...


def filled_bytes(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The bytes of each tensor that has any, in order; [bytes] uint8, on their devices."""
    return [as_bytes(tensor) for tensor in tensors.values() if tensor.numel()]
