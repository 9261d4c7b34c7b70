"""Messages between the two processes of a hand-off: one TCP connection, JSON behind its length in four bytes.

Requests and headers go here, and how the bytes of tensors go is another matter (`carrier.py`). A socket of its own
tells at once that the other process is gone, whatever carries tensors, and a thread that waits for it can be woken;
torch's gloo has neither a way to end a receive that was begun nor a sign of life between transfers. Nothing that
arrives is run: messages are JSON. Who can reach the port can take part, so it belongs into a trusted network.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from dflash_runtime.errors import PeerUnreachable, UsageError

VERSION = 1
"""Of the messages; both sides must speak the same."""

LENGTH = struct.Struct(">I")
LONGEST_BYTES = 1 << 28
"""Of a message. A header of a million tokens has about 8 MB; what announces more is no message of ours."""

RETRY_S = 0.05
GREETING_S = 10.0
"""How long who connects may take for its first message: what connects and is silent is not who is waited for."""

ENDING_S = 3.0
"""How long the other side is given to read the last messages before the connection is cut."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Address:
    """Where the prefill side listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """`HOST:PORT`, an IPv6 address in brackets.

        Raises:
            UsageError: it is something else.
        """
        host, _, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise UsageError(f"{text!r} is no address, expected HOST:PORT, as 127.0.0.1:7654")
        return cls(host, int(port))


class ControlChannel:
    """A connection of which both sides have made sure that they understand each other.

    `greeting` is what the other side said of itself. Sending never waits; reading is for one thread.
    """

    def __init__(self, connection: socket.socket, greeting: Message) -> None:
        self.greeting = greeting
        self.local_host, self.other_host = connection.getsockname()[0], connection.getpeername()[0]
        self._connection = connection
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        _notice_silence(connection)
        self._writer = start_thread(self._write, "handoff-writer")

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; where the other side is gone it goes nowhere, and `read` says so."""
        self._outbox.put(_frame(message))

    def read(self) -> Message | None:
        """The next message; None once there will be no more."""
        try:
            return _receive(self._connection)
        except (OSError, ValueError):
            return None

    def end(self) -> None:
        """Send what is queued and then nothing more; the other side reads to its end."""
        self._outbox.put(None)

    def close(self) -> None:
        """Cut the connection, whoever waits for it."""
        self.end()
        join(self._writer, ENDING_S)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        join(self._writer, ENDING_S)
        self._connection.close()

    def _write(self) -> None:
        with suppress(OSError):
            while (frame := self._outbox.get()) is not None:
                self._connection.sendall(frame)
            self._connection.shutdown(socket.SHUT_WR)


def listen(address: Address, greeting: Mapping[str, Any], timeout_s: float) -> ControlChannel:
    """Wait for the other process to connect.

    Raises:
        PeerUnreachable: nobody did in time.
        UsageError: the port cannot be had, or the other side is of another kind.
    """
    until = time.monotonic() + timeout_s
    with bind(address) as server:
        while (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(OSError, ValueError):
                connection, _ = server.accept()
                found = _greet(connection, greeting, left)
                if found is not None:
                    return _agreed(connection, found, greeting, address)
    raise PeerUnreachable(f"nobody connected to {address} within {timeout_s:g} s")


def bind(address: Address, port: int | None = None) -> socket.socket:
    """A socket that listens there, or at another port of that host; 0 is any.

    Raises:
        UsageError: the address is not of this machine, or its port is taken.
    """
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        place = (address.host, address.port if port is None else port)
        return socket.create_server(place, family=family, backlog=1)
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UsageError(f"cannot listen at {address}: {reason}") from error


def connect(address: Address, greeting: Mapping[str, Any], timeout_s: float) -> ControlChannel:
    """Connect to the process that listens, or will.

    Raises:
        PeerUnreachable: it did not answer in time.
        UsageError: it is of another kind.
    """
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        with suppress(OSError, ValueError):
            connection = socket.create_connection((address.host, address.port), timeout=left)
            found = _greet(connection, greeting, left)
            if found is not None:
                return _agreed(connection, found, greeting, address)
        time.sleep(min(RETRY_S, max(until - time.monotonic(), 0)))
    raise PeerUnreachable(f"no answer from {address} within {timeout_s:g} s")


def start_thread(target: Any, name: str) -> threading.Thread:
    """A thread that does not keep the process alive."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread, limit_s: float) -> bool:
    """Whether a thread has ended in time; the calling one is not waited for."""
    if thread is not threading.current_thread():
        thread.join(limit_s)
    return not thread.is_alive()


def _greet(connection: socket.socket, greeting: Mapping[str, Any], left_s: float) -> Message | None:
    """What the other side says of itself; None where it says nothing, or is none of ours."""
    try:
        connection.settimeout(min(left_s, GREETING_S))
        connection.sendall(_frame({"hello": VERSION, **greeting}))
        found = _receive(connection)
        if found is not None and "hello" in found:
            connection.settimeout(None)
            return found
    except (OSError, ValueError):
        pass
    connection.close()
    return None


def _agreed(connection: socket.socket, found: Message, greeting: Mapping[str, Any], address: Address) -> ControlChannel:
    for name, expected in (("hello", VERSION), ("carrier", greeting["carrier"])):
        if found.get(name) != expected:
            connection.close()
            raise UsageError(f"{address}: the other side has {name} {found.get(name)!r}, expected {expected!r}")
    return ControlChannel(connection, found)


def _frame(message: Mapping[str, Any]) -> bytes:
    data = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    return LENGTH.pack(len(data)) + data


def _receive(connection: socket.socket) -> Message | None:
    """The next message; None where the other side has ended.

    Raises:
        ValueError: it is no message of ours.
    """
    head = _receive_bytes(connection, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if length > LONGEST_BYTES:
        raise ValueError("longer than any message")
    data = _receive_bytes(connection, length)
    message = None if data is None else json.loads(data)
    if message is not None and not isinstance(message, dict):
        raise ValueError("no object")
    return message


def _receive_bytes(connection: socket.socket, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(min(length - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _notice_silence(connection: socket.socket) -> None:
    """Have the system ask now and then whether the other machine is still there: a crash of it sends nothing."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}  # s, s, times, ms
    for name, value in limits.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
