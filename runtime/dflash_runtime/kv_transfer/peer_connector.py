"""A connector between two processes, with any carrier for the tensors: its threads, and how it closes.

It has three threads: one reads messages, one writes messages, and one moves tensors, one hand-off after the other. When
the other process dies or closes, every open and every later future ends with PeerUnreachable.
"""

import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue

from dflash_runtime.errors import PeerUnreachable, UsageError
from dflash_runtime.kv_transfer.carrier import Carrier
from dflash_runtime.kv_transfer.connector import OpenOptions, TransferRole
from dflash_runtime.kv_transfer.control_channel import (
    ENDING_S,
    Address,
    ControlChannel,
    connect,
    join,
    listen,
    start_thread,
)
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.kv_transfer.messages import Bye, Greeting, Message, read_message
from dflash_runtime.kv_transfer.receiving import ReceivingSide
from dflash_runtime.kv_transfer.sending import SendingSide

LOG = logging.getLogger(__name__)


def open_channel(address: Address, greeting: Greeting, options: OpenOptions) -> ControlChannel:
    """Connect two processes: the prefill side listens and the decode side connects, in either order.

    Raises:
        PeerUnreachable: the other side did not connect or answer in time.
        UsageError: the port is not available, or the other side uses another carrier or secret.
    """
    meet = listen if options.role == "prefill" else connect
    return meet(address, greeting, options.timeout_s, options.secret)


class PeerConnector:
    """Saves hand-offs on the prefill side, and loads them on the decode side."""

    def __init__(self, role: TransferRole, address: Address, channel: ControlChannel, carrier: Carrier) -> None:
        self.name, self.takes_device = carrier.name, carrier.takes_device
        self.role, self.address = role, address
        self._channel, self._carrier = channel, carrier
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._sending = SendingSide(carrier, channel.send, self._jobs.put)
        self._receiving = ReceivingSide(carrier, channel.send, self._jobs.put)
        self._is_lost = self._is_closed = False
        self._lock = threading.Lock()
        self._worker = start_thread(self._work, "handoff-tensors")
        self._reader = start_thread(self._read_messages, "handoff-reader")
        atexit.register(self.close)  # a thread still inside torch at interpreter exit would abort the process

    def save(self, handoff: Handoff) -> "Future[None]":
        self._expect_role("prefill")
        return self._sending.save(handoff)

    def load(self, key: str) -> "Future[Handoff]":
        self._expect_role("decode")
        return self._receiving.load(key)

    def refuse(self, key: str, reason: str) -> None:
        self._expect_role("prefill")
        self._sending.refuse(key, reason)

    def is_wanted(self, key: str) -> bool:
        return self._sending.is_wanted(key)

    def close(self) -> None:
        """See `Connector.close`. The other side's futures end too. Takes some seconds if it does not answer."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        self._channel.send(Bye())
        self._lose("connection-closed", f"the connection with {self.address} was closed")
        join(self._reader, ENDING_S)  # ends when the other side has read all messages and closes too
        self._channel.close()
        join(self._reader, ENDING_S)
        if join(self._worker, ENDING_S):
            self._carrier.close()  # otherwise it is stuck in a transfer, which ends with one of the two processes

    def _expect_role(self, role: TransferRole) -> None:
        if self.role != role:
            raise UsageError(
                f"{self.name}://{self.address}: this is the {self.role} side, expected the {role} side",
                id="wrong-side", field="role", found=self.role, expected=role,
            )  # fmt: skip

    def _read_messages(self) -> None:
        side = self._sending if self.role == "prefill" else self._receiving
        there = f"the process at the other end of {self.address}"
        try:
            while (found := self._channel.read()) is not None:
                message = read_message(found)
                if not isinstance(message, Message):
                    self._lose("peer-closed", f"{there} has closed")
                    return
                side.read(message)
            self._lose("peer-gone", f"{there} is gone, or has sent something else than messages")
        except Exception as error:  # whatever a message holds, the futures end
            LOG.debug("message over %s refused", self.address, exc_info=True)
            self._lose("malformed-message", f"{there} has sent a malformed message: {error}")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # after any error of a carrier the two sides are out of step
                LOG.debug("transfer over %s failed", self.address, exc_info=True)
                reason = str(error).strip().partition("\n")[0]
                self._lose("transfer-failed", f"a transfer with the other end of {self.address} failed: {reason}")

    def _lose(self, problem: str, text: str) -> None:
        """End all futures and threads with an error. The reader still reads all messages of the other side."""
        with self._lock:
            if self._is_lost:
                return
            self._is_lost = True
        error = PeerUnreachable(text, id=problem, field="address", found=str(self.address))
        self._sending.end(error)
        self._receiving.end(error)
        self._channel.end()
        with suppress(RuntimeError):  # the carrier may have ended already
            self._carrier.stop()
        self._jobs.put(None)
