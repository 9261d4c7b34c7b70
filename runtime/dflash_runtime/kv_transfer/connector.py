"""The interface of what carries hand-offs between engines.

A connector is one file in this package. Whatever it waits for, it waits for in threads of its own: an engine asks
whether a transfer is done, and goes on with other requests meanwhile.
"""

from concurrent.futures import Future
from typing import Protocol

from dflash_runtime.kv_transfer.handoff import Handoff


class Connector(Protocol):
    """Carries hand-offs from where they are saved to where they are loaded, each under its key."""

    name: str

    def save(self, handoff: Handoff) -> "Future[None]":
        """Begin to hand off; done once the other side has it, or it lies where it can be had.

        The payload's tensors are not changed afterwards by who saves them. The future raises CapacityError where no
        room is left, and PeerUnreachable where nobody takes it.
        """
        ...

    def load(self, key: str) -> "Future[Handoff]":
        """Begin to fetch what was, or will be, saved under a key.

        The future raises InvalidHandoff where what came is not what was saved, and PeerUnreachable where nothing will.
        One that is cancelled is not fetched, if it has not begun.
        """
        ...

    def close(self) -> None:
        """End what is under way and give back what it holds."""
        ...
