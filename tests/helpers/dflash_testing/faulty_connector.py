"""A faulty connector: it delays, loses, duplicates and reorders hand-offs at random, from a seed."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dflash_runtime.errors import PeerUnreachable
from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.connector_futures import settle
from dflash_runtime.kv_transfer.handoff import Handoff


class FaultyConnector:
    """Passes calls to another connector, with faults.

    lost       this share of saves and loads does not reach the other connector. A lost load waits until it is
               cancelled. A lost save ends with PeerUnreachable or as if it had arrived.
    doubled    this share of saves and loads is passed on twice
    delay_s    each call is delayed by up to this many seconds, so calls overtake one another

    `lost_keys` has the keys of lost calls, and `num_doubled` counts duplicated calls.
    """

    def __init__(
        self, inner: Connector, seed: int, *, lost: float = 0.1, doubled: float = 0.1, delay_s: float = 0.02
    ) -> None:
        self.name, self.takes_device = inner.name, inner.takes_device
        self._inner = inner
        self._random = random.Random(seed)
        self._shares = (lost, doubled, delay_s)
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self.lost_keys: set[str] = set()
        self.num_doubled = 0

    def save(self, handoff: Handoff) -> "Future[None]":
        """See `Connector.save`."""
        outer: Future[None] = Future()
        outer.set_running_or_notify_cancel()
        is_lost, is_doubled, delay_s = self._draw(handoff.key)
        if is_lost:
            error = PeerUnreachable(f"hand-off {handoff.key} was lost") if delay_s * 2 > self._shares[2] else None
            self._later(delay_s, lambda: settle(outer, error))
        else:
            self._later(delay_s, lambda: self._pass_on(outer, self._inner.save, handoff, is_doubled))
        return outer

    def load(self, key: str) -> "Future[Handoff]":
        """See `Connector.load`."""
        outer: Future[Handoff] = Future()
        is_lost, is_doubled, delay_s = self._draw(key)
        if is_lost:  # a cancellation still reaches the other side
            outer.add_done_callback(lambda done: self._inner.load(key).cancel() if done.cancelled() else None)
        else:
            self._later(delay_s, lambda: self._pass_on(outer, self._inner.load, key, is_doubled))
        self._open.add(outer)
        outer.add_done_callback(self._open.discard)
        return outer

    def refuse(self, key: str, reason: str) -> None:
        """See `Connector.refuse`."""
        self._later(self._random.uniform(0, self._shares[2]), lambda: self._inner.refuse(key, reason))

    def is_wanted(self, key: str) -> bool:
        """See `Connector.is_wanted`."""
        return self._inner.is_wanted(key)

    def close(self) -> None:
        """See `Connector.close`."""
        self._inner.close()
        for future in list(self._open):
            future.cancel()

    def _draw(self, key: str) -> tuple[bool, bool, float]:
        lost, doubled, delay_s = self._shares
        with self._lock:
            is_lost, is_doubled = self._random.random() < lost, self._random.random() < doubled
            self.lost_keys |= {key} if is_lost else set()
            self.num_doubled += is_doubled and not is_lost
            return is_lost, is_doubled, self._random.uniform(0, delay_s)

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, do)
        timer.daemon = True
        timer.start()

    def _pass_on(self, outer: "Future[Any]", begin: Callable[[Any], "Future[Any]"], what: Any, doubled: bool) -> None:
        if outer.cancelled():
            return
        try:
            inner = [begin(what) for _ in range(1 + doubled)]
        except Exception as error:  # for example because the connector was closed
            settle(outer, error)
            return
        outer.add_done_callback(lambda done: [future.cancel() for future in inner] if done.cancelled() else None)
        inner[0].add_done_callback(lambda done: _copy(done, outer))


def _copy(done: "Future[Any]", outer: "Future[Any]") -> None:
    if done.cancelled():
        outer.cancel()
    else:
        settle(outer, done.exception() or done.result())
