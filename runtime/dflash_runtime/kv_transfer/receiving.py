"""The decode side of a connection: asks for hand-offs, receives and checks them, and confirms.

`sending.py` describes the messages.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from dflash_runtime.errors import CapacityError, DFlashError, InvalidHandoff, PeerUnreachable, naming_file
from dflash_runtime.kv_transfer.carrier import Carrier
from dflash_runtime.kv_transfer.connector_futures import settle
from dflash_runtime.kv_transfer.handoff import Handoff, HandoffHeader
from dflash_runtime.kv_transfer.messages import Drop, Got, Message, Offer, Refused, Take, Want
from dflash_runtime.kv_transfer.payload_bytes import assemble

NOT_WANTED = "it is no longer wanted"


@dataclass(slots=True)
class _Want:
    number: int
    futures: "list[Future[Handoff]]" = field(default_factory=list)
    is_offered: bool = False
    has_begun: bool = False


class ReceivingSide:
    """Keeps the futures that wait for each key. Its methods never wait: `do` queues work for the transfer thread."""

    def __init__(
        self, carrier: Carrier, send: Callable[[Message], None], do: Callable[[Callable[[], None]], None]
    ) -> None:
        self._carrier, self._send, self._do = carrier, send, do
        self._wants: dict[str, _Want] = {}
        self._numbers = count()
        self._ended: DFlashError | None = None
        self._lock = threading.Lock()

    def load(self, key: str) -> "Future[Handoff]":
        future: Future[Handoff] = Future()
        with self._lock:
            ended = self._ended
            if ended is None:
                self._wait(key, future)
        if ended is not None:
            settle(future, ended)
        else:
            future.add_done_callback(lambda done: self._give_up(key) if done.cancelled() else None)
        return future

    def _wait(self, key: str, future: "Future[Handoff]") -> None:
        want = self._wants.get(key)
        if want is None:
            want = self._wants[key] = _Want(next(self._numbers))
            self._send(Want(key, want.number))
        elif want.has_begun:
            future.set_running_or_notify_cancel()
        want.futures.append(future)

    def read(self, message: Message) -> None:
        """Act on a message of the other side."""
        match message:
            case Offer(key, number) as offer:
                with self._lock:
                    want = self._wants.get(key)
                    if want is None or want.number != number or want.is_offered:
                        return
                    want.is_offered = True
                self._do(lambda: self._receive(offer))
            case Refused(key, number, reason):
                self._settle(key, number, refusal(key, reason))

    def end(self, error: DFlashError) -> None:
        """End all open and later futures with an error."""
        with self._lock:
            self._ended = self._ended or error
            wants, self._wants = list(self._wants.values()), {}
        for want in wants:
            for future in want.futures:
                settle(future, error)

    def _give_up(self, key: str) -> None:
        """Tell the other side if all futures of a key were cancelled."""
        with self._lock:
            want = self._wants.get(key)
            if want is None or want.has_begun or not all(future.cancelled() for future in want.futures):
                return
            del self._wants[key]
            self._drop(key, want.number, NOT_WANTED)

    def _receive(self, offer: Offer) -> None:
        """Receive an offered hand-off, unless all its futures were cancelled."""
        key, number = offer.key, offer.number
        if not self._begin(key, number):
            return
        try:
            header = _read_header(offer)
            tensors = self._allocate(key, header)
        except DFlashError as error:
            self._drop(key, number, error.message)
            self._settle(key, number, error)
            return
        self._send(Take(key, number))
        self._carrier.receive(tensors, offer.directions)
        outcome: Any
        try:
            with naming_file(f"hand-off {key}"):
                outcome = assemble(header, tensors)
            self._send(Got(key, number))
        except InvalidHandoff as error:
            outcome = error
            self._drop(key, number, error.message)
        self._settle(key, number, outcome)

    def _begin(self, key: str, number: int) -> bool:
        """Whether a future still waits. After this call its futures can no longer be cancelled."""
        with self._lock:
            want = self._wants.get(key)
            if want is None or want.number != number or want.has_begun:
                return False
            want.has_begun = any([future.set_running_or_notify_cancel() for future in want.futures])
            if not want.has_begun:
                del self._wants[key]
                self._drop(key, number, NOT_WANTED)
            return want.has_begun

    def _allocate(self, key: str, header: HandoffHeader) -> dict[str, Tensor]:
        try:
            return self._carrier.allocate(header.tensors)
        except (RuntimeError, MemoryError) as error:
            num_bytes = sum(spec.num_bytes for spec in header.tensors.values())
            raise CapacityError(
                f"hand-off {key}: no room for its {num_bytes} bytes",
                id="no-room-for-handoff", field="key", found=key,
            ) from error  # fmt: skip

    def _drop(self, key: str, number: int, reason: str) -> None:
        reason = reason.removeprefix(f"hand-off {key}: ")  # the other side names the key itself
        self._send(Drop(key, number, reason))

    def _settle(self, key: str, number: int, outcome: Any) -> None:
        with self._lock:
            want = self._wants.get(key)
            if want is None or want.number != number:
                return
            del self._wants[key]
        for future in want.futures:
            settle(future, outcome)


def _read_header(offer: Offer) -> HandoffHeader:
    """The header of an offer.

    Raises:
        InvalidHandoff, UnsupportedError: it is malformed, belongs to another key, or is from a later release.
    """
    with naming_file(f"hand-off {offer.key}"):
        header = HandoffHeader.read(offer.header)
        if header.handoff.key != offer.key:
            raise InvalidHandoff(field="key", found=header.handoff.key, expected=repr(offer.key))
        return header


def refusal(key: str, reason: str) -> PeerUnreachable:
    """The error of a load after the other side has refused the key."""
    return PeerUnreachable(f"hand-off {key} will not come: {reason}", id="handoff-refused", field="key", found=key)
