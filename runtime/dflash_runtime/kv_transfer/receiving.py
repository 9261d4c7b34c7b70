"""The decode side of a connection: asks for hand-offs, receives and checks them, and confirms.

`sending.py` describes the messages.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from dflash_runtime.errors import CapacityError, DFlashError, InvalidHandoff, PeerUnreachable, naming_file
from dflash_runtime.kv_transfer.carrier import Carrier
from dflash_runtime.kv_transfer.connector_futures import settle
from dflash_runtime.kv_transfer.control_channel import Message
from dflash_runtime.kv_transfer.handoff import Handoff, tensor_specs
from dflash_runtime.kv_transfer.payload_bytes import check_tensors

NOT_WANTED = "it is no longer wanted"


@dataclass(slots=True)
class _Want:
    number: int
    futures: "list[Future[Handoff]]" = field(default_factory=list)
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
        """See `Connector.load`."""
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
            self._send({"kind": "want", "key": key, "number": want.number})
        elif want.has_begun:
            future.set_running_or_notify_cancel()
        want.futures.append(future)

    def read(self, message: Message) -> None:
        """Act on a message of the other side."""
        key, number = message["key"], message["number"]
        match message["kind"]:
            case "offer":
                self._do(lambda: self._receive(key, number, message["header"], message["directions"]))
            case "refused":
                self._settle(key, number, refusal(key, message["reason"]))

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

    def _receive(self, key: str, number: int, header: Any, directions: Mapping[str, Any]) -> None:
        """Receive an offered hand-off, unless all its futures were cancelled."""
        if not self._begin(key, number):
            return
        try:
            tensors = self._allocate(key, header)
        except DFlashError as error:
            self._drop(key, number, error.message)
            self._settle(key, number, error)
            return
        self._send({"kind": "take", "key": key, "number": number})
        self._carrier.receive(tensors, directions)
        outcome: Any
        try:
            with naming_file(f"hand-off {key}"):
                check_tensors(header, tensors)
                outcome = Handoff.read(header, tensors)
            self._send({"kind": "got", "key": key, "number": number})
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

    def _allocate(self, key: str, header: Any) -> dict[str, Tensor]:
        with naming_file(f"hand-off {key}"):
            specs = tensor_specs(header)
            if header["key"] != key:
                raise InvalidHandoff(field="key", found=header["key"], expected=repr(key))
        try:
            return self._carrier.allocate(specs)
        except (RuntimeError, MemoryError) as error:
            num_bytes = sum(spec.num_bytes for spec in specs.values())
            raise CapacityError(
                f"hand-off {key}: no room for its {num_bytes} bytes",
                id="no-room-for-handoff", field="key", found=key,
            ) from error  # fmt: skip

    def _drop(self, key: str, number: int, reason: str) -> None:
        reason = reason.removeprefix(f"hand-off {key}: ")  # the other side names the key itself
        self._send({"kind": "drop", "key": key, "number": number, "reason": reason})

    def _settle(self, key: str, number: int, outcome: Any) -> None:
        with self._lock:
            want = self._wants.get(key)
            if want is None or want.number != number:
                return
            del self._wants[key]
        for future in want.futures:
            settle(future, outcome)


def refusal(key: str, reason: str) -> PeerUnreachable:
    """The error of a load after the other side has refused the key."""
    return PeerUnreachable(f"hand-off {key} will not come: {reason}", id="handoff-refused", field="key", found=key)
