"""The interface of connectors, which carry hand-offs between engines, and the table of all connectors.

A connector is one file in this package. `@CONNECTORS.register(name)` enters a function that opens it, and users reach
it as `name://HOST:PORT`; `connector_locations.open_connector` finds it. A connector waits only in threads of its own.
The engine asks whether a transfer is done, and continues with other requests meanwhile.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from dflash_runtime.errors import UsageError
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.registry import Registry

if TYPE_CHECKING:
    import torch

TransferRole = Literal["prefill", "decode"]
"""The side of a process: `prefill` saves hand-offs, `decode` loads them."""


class Connector(Protocol):
    """Carries hand-offs, each under its key, from the engine that saves them to the engine that loads them.

    With `takes_device` payloads stay on the device that computed them. Otherwise they are copied to the host first.
    """

    name: str
    takes_device: bool

    def save(self, handoff: Handoff) -> "Future[None]":
        """Begin to hand off. The future is done when the other side has the payload, or can fetch it at any time.

        The caller must not change the payload's tensors, which are held until the future is done. A new save replaces
        an older one with the same key that has not begun to travel. Both futures are then done together.
        The future raises CapacityError if no room is left, and PeerUnreachable if the other side does not take it.
        """
        ...

    def load(self, key: str) -> "Future[Handoff]":
        """Begin to fetch the hand-off of a key, which may be saved before or after this call.

        The future raises InvalidHandoff if the payload differs from the saved one, and PeerUnreachable if none will
        come, for example after a refusal. Cancelling it before its tensors travel gives the hand-off up and tells the
        other side. It may wait forever: the caller sets a time limit and cancels.
        """
        ...

    def refuse(self, key: str, reason: str) -> None:
        """Say that nothing will be saved under a key, so that its load ends. Has no effect on a saved hand-off."""
        ...

    def is_wanted(self, key: str) -> bool:
        """Whether the other side waits for a key. False if the connector cannot know."""
        ...

    def close(self) -> None:
        """End running transfers and free all resources. Open futures are cancelled or end with an error.

        Closing again has no effect.
        """
        ...


class LoadingConnector:
    """Base of connectors that only load. Their loads never wait, so refusals have no effect."""

    name: str
    takes_device = False
    id_of_refusal: str
    """Id of the error of `save`."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=self.name)

    def save(self, handoff: Handoff) -> "Future[None]":
        """Refused.

        Raises:
            UsageError: always.
        """
        hint = "use a FileConnector to hand off"
        raise UsageError(f"{self.name}: this connector only loads hand-offs", id=self.id_of_refusal, hint=hint)

    def refuse(self, key: str, reason: str) -> None: ...

    def is_wanted(self, key: str) -> bool:
        return False

    def close(self) -> None:
        """See `Connector.close`. Running work of its threads is completed."""
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open a connector.

    `timeout_s` limits the wait for the other process, and how long a transfer may make no progress. `device` is where
    tensors are received, if the connector can choose. None lets the connector choose. Two processes connect only if
    both have the same `secret`.
    """

    role: TransferRole
    timeout_s: float = 60.0
    device: "torch.device | None" = None
    secret: str = ""


class OpenLocation(Protocol):
    """Opens a connector at a location: the folder, or the HOST:PORT after its name."""

    def __call__(self, location: str, options: OpenOptions) -> Connector: ...


CONNECTORS: Registry[OpenLocation] = Registry("connector")


def mark_written(tensors: "Mapping[str, torch.Tensor]") -> "list[torch.cuda.Event]":
    """CUDA events, one per device, after which the tensors hold the values that the calling thread has queued.

    A connector's threads use other streams than the engine, and wait for these events before they read.
    """
    import torch

    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    events = []
    for device in devices:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
