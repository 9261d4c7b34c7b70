"""The interface of what carries hand-offs between engines, and the table of those there are.

A connector is one file in this package: `@CONNECTORS.register(name)` enters a function that opens a place, which is
then reached as `name://HOST:PORT`; `places.open_connector` finds it. Whatever a connector waits for, it waits for in
threads of its own: an engine asks whether a transfer is done, and goes on with other requests meanwhile.
"""

from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.registry import Registry

TransferRole = Literal["prefill", "decode"]
"""Which side of a hand-off a process is: the one that saves, or the one that loads."""


class Connector(Protocol):
    """Carries hand-offs from where they are saved to where they are loaded, each under its key.

    With `takes_device` what is saved is best where it was computed; otherwise it is copied to the host before.
    """

    name: str
    takes_device: bool

    def save(self, handoff: Handoff) -> "Future[None]":
        """Begin to hand off; done once the other side has it, or it lies where it can be had.

        The payload's tensors are not changed afterwards by who saves them, and are held until the future is done. One
        of a key that was saved before and is not on its way yet takes its place; both futures are then done together.
        The future raises CapacityError where no room is left, and PeerUnreachable where nobody takes it, or no longer.
        """
        ...

    def load(self, key: str) -> "Future[Handoff]":
        """Begin to fetch what was, or will be, saved under a key.

        The future raises InvalidHandoff where what came is not what was saved, and PeerUnreachable where nothing will,
        as after a refusal. One that is cancelled before its tensors are on their way is given up, and the side that
        saves it told so; it may take for ever, so who waits has a limit of its own and cancels.
        """
        ...

    def refuse(self, key: str, reason: str) -> None:
        """Say that nothing will be saved under a key, so that who loads it need not wait; one that was saved stays."""
        ...

    def is_wanted(self, key: str) -> bool:
        """Whether the other side waits for what is, or will be, saved under a key; False where that is not known."""
        ...

    def close(self) -> None:
        """End what is under way and give back what it holds; futures that are open end, cancelled or with an error.

        Closing twice is closing once.
        """
        ...


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a connector is opened with beside its place.

    `timeout_s` limits how long the other process is waited for, and how long a transfer may stand still. `device` is
    where tensors are received, if the connector can choose; without it, where it receives best.
    """

    role: TransferRole
    timeout_s: float = 60.0
    device: torch.device | None = None


class OpenPlace(Protocol):
    """Opens the place that stands behind a connector's name, which is a folder or HOST:PORT."""

    def __call__(self, place: str, options: OpenOptions) -> Connector: ...


CONNECTORS: Registry[OpenPlace] = Registry("connector")


def mark_written(tensors: Mapping[str, Tensor]) -> list[torch.cuda.Event]:
    """Events after which tensors hold what the calling thread has queued for them, one a device.

    Threads of a connector have other streams than the engine, and wait for these before they read.
    """
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    events = []
    for device in devices:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


def settle(future: "Future[Any]", outcome: Any) -> None:
    """End a future with a result, or with an error where the outcome is one; one that has ended stays as it is."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
