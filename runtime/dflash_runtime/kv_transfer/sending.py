"""The prefill side of a connection: offers saved hand-offs when they are wanted, and holds them until they arrive.

The decode side pulls:

    decode side    prefill side   when
    want                          a load begins
                   offer          the key is wanted and saved; with the header
    take                          the decode side has room
                   (tensors)
    got                           all tensors arrived undamaged
                   refused        instead of an offer: nothing will be saved under the key
    drop                          instead of take or got: the load was cancelled or failed

Each want has a number that all its messages repeat, so that a late message is not taken for one of a newer want.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from dflash_runtime.documents import to_json
from dflash_runtime.errors import CapacityError, DFlashError, InvalidConfig, PeerUnreachable
from dflash_runtime.kv_transfer.carrier import Carrier, Staged
from dflash_runtime.kv_transfer.connector import mark_written
from dflash_runtime.kv_transfer.connector_futures import settle
from dflash_runtime.kv_transfer.handoff import Handoff, HandoffHeader
from dflash_runtime.kv_transfer.messages import Drop, Got, Message, Offer, Refused, Take, Want
from dflash_runtime.kv_transfer.payload_bytes import header_with_checksums

LONGEST_MEMORY = 4096
"""How many keys are remembered as refused, and how many as given up before they were saved."""

MOST_WANTED = 100_000
"""How many keys the other side may want before they are saved."""


@dataclass(slots=True)
class _Held:
    handoff: Handoff
    written: list[torch.cuda.Event]
    futures: "list[Future[None]]"
    number: int | None = None  # of the want that it was offered for
    staged: Staged | None = None
    is_taken: bool = False


@dataclass(slots=True)
class _Book:
    """By key: the hand-off held, the number of the open want, the reason of a refusal, the reason of a drop."""

    held: dict[str, _Held] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


class SendingSide:
    """Holds saved hand-offs until they are wanted. Its methods never wait: `do` queues work for the transfer thread."""

    def __init__(
        self, carrier: Carrier, send: Callable[[Message], None], do: Callable[[Callable[[], None]], None]
    ) -> None:
        self._carrier, self._send, self._do = carrier, send, do
        self._book = _Book()
        self._ended: DFlashError | None = None
        self._lock = threading.Lock()

    def save(self, handoff: Handoff) -> "Future[None]":
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # only the other side can give a save up
        key, written = handoff.key, mark_written(handoff.tensors)
        with self._lock:
            reason = self._book.dropped.pop(key, None)
            error = self._ended or (None if reason is None else _not_taken(key, reason))
            if error is None:
                self._hold(_Held(handoff, written, [future]))
        if error is not None:
            settle(future, error)
        return future

    def _hold(self, new: _Held) -> None:
        key = new.handoff.key
        old = self._book.held.get(key)
        if old is not None and old.number is not None:  # it is already travelling
            old.futures += new.futures
            return
        new.futures += old.futures if old is not None else []
        self._book.held[key] = new
        self._book.refused.pop(key, None)
        if key in self._book.wanted:
            self._begin(new, self._book.wanted.pop(key))

    def refuse(self, key: str, reason: str) -> None:
        with self._lock:
            if key in self._book.held or self._ended is not None:
                return
            number = self._book.wanted.pop(key, None)
            _remember(self._book.refused, key, reason)
        if number is not None:
            self._send(Refused(key, number, reason))

    def is_wanted(self, key: str) -> bool:
        """See `Connector.is_wanted`. A hand-off that is travelling still counts as wanted."""
        with self._lock:
            held = self._book.held.get(key)
            return key in self._book.wanted or (held is not None and held.number is not None)

    def read(self, message: Message) -> None:
        """Act on a message of the other side."""
        match message:
            case Want(key, number):
                self._want(key, number)
            case Take(key, number):
                self._do(lambda: self._transfer(key, number))
            case Got(key, number):
                self._finish(key, number, None)
            case Drop(key, number, reason):
                self._drop(key, number, reason)

    def end(self, error: DFlashError) -> None:
        """End all open and later futures with an error."""
        with self._lock:
            self._ended = self._ended or error
            held, self._book = list(self._book.held.values()), _Book()
        _settle_all((future for item in held for future in item.futures), error)

    def _want(self, key: str, number: int) -> None:
        with self._lock:
            self._book.dropped.pop(key, None)
            held, reason = self._book.held.get(key), self._book.refused.get(key)
            if held is not None:
                self._begin(held, number)
            elif reason is None:
                if len(self._book.wanted) >= MOST_WANTED:
                    expected = f"at most {MOST_WANTED}"
                    raise InvalidConfig("wanted keys", len(self._book.wanted), expected, id="too-many-wants")
                self._book.wanted[key] = number
        if held is None and reason is not None:
            self._send(Refused(key, number, reason))

    def _begin(self, held: _Held, number: int) -> None:
        if held.number is None:  # otherwise the want came twice
            held.number = number
            self._do(lambda: self._offer(held, number))

    def _offer(self, held: _Held, number: int) -> None:
        key = held.handoff.key
        with self._lock:
            if self._book.held.get(key) is not held:  # it was given up meanwhile
                return
        try:
            for event in held.written:
                event.synchronize()
            held.staged = self._carrier.stage(held.handoff.tensors)
            header = to_json(_header(held.handoff, held.staged))
        except Exception as error:
            reason = error.message if isinstance(error, DFlashError) else f"{type(error).__name__}: {error}"
            self._send(Refused(key, number, reason))
            text = f"hand-off {key}: not sent: {reason}"
            self._finish(key, number, CapacityError(text, id="handoff-not-sent", field="key", found=key))
            return
        self._send(Offer(key, number, header, held.staged.directions))

    def _transfer(self, key: str, number: int) -> None:
        with self._lock:
            held = self._book.held.get(key)
            if held is None or held.staged is None or held.number != number or held.is_taken:
                return
            held.is_taken = True
        self._carrier.send(held.staged)

    def _drop(self, key: str, number: int, reason: str) -> None:
        with self._lock:
            if self._book.wanted.get(key) == number:
                del self._book.wanted[key]
                _remember(self._book.dropped, key, reason)
        self._finish(key, number, _not_taken(key, reason))

    def _finish(self, key: str, number: int, error: DFlashError | None) -> None:
        """Release the hand-off that was offered for a want. Has no effect when a message comes twice."""
        with self._lock:
            held = self._book.held.get(key)
            if held is None or held.number != number:
                return
            del self._book.held[key]
            if error is not None:
                _remember(self._book.refused, key, error.message)
        _settle_all(held.futures, error)
        if held.staged is not None:
            staged = held.staged
            self._do(lambda: self._carrier.release(staged))


def _header(handoff: Handoff, staged: Staged) -> HandoffHeader:
    """The header, with checksums if all tensors are on the host. For others they would cost a copy to the host."""
    ready = replace(handoff, tensors=staged.tensors)
    on_host = all(tensor.device.type == "cpu" for tensor in staged.tensors.values())
    return header_with_checksums(ready) if on_host else ready.header.sealed


def _not_taken(key: str, reason: str) -> PeerUnreachable:
    text = f"hand-off {key} was not taken: {reason}"
    return PeerUnreachable(text, id="handoff-not-taken", field="key", found=key)


def _remember(entries: dict[str, str], key: str, reason: str) -> None:
    entries[key] = reason
    while len(entries) > LONGEST_MEMORY:
        del entries[next(iter(entries))]


def _settle_all(futures: "Iterable[Future[None]]", error: DFlashError | None) -> None:
    for future in futures:
        settle(future, error)
