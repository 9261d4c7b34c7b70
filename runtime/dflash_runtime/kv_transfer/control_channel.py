"""Messages between the two processes of a hand-off, over one TCP connection: a length in four bytes, then JSON.

Requests and headers travel here; a carrier (`carrier.py`) moves the bytes of tensors. With its own socket, each side
detects at once that the other process has died, and can wake a thread that waits for a message. torch's gloo cannot end
a running receive, and cannot show that the peer is alive between transfers. Messages are JSON. Their content is never
executed. Anyone who can reach the port can send messages, so use a trusted network.
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

from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import PeerUnreachable, UsageError
from dflash_runtime.kv_transfer.messages import Bye, Greeting, Message, message_to_json

LENGTH = struct.Struct(">I")
LONGEST_BYTES = 1 << 28
"""The longest message. A header with a million tokens has about 8 MB; a longer message comes from another program."""

RETRY_S = 0.05
GREETING_S = 10.0
"""How long a new connection may take to send its greeting. A silent connection is not the peer."""

ENDING_S = 3.0
"""How long the other side may take to read the last messages before the connection is cut."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the prefill side listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """The address of `HOST:PORT`. An IPv6 address is in brackets.

        Raises:
            UsageError: the text has another form.
        """
        host, _, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise UsageError(field="address", found=text, expected="HOST:PORT, such as 127.0.0.1:7654")
        return cls(host, int(port))


class ControlChannel:
    """A connection after both sides have checked each other's greetings.

    `greeting` is the other side's. Sending never waits. Only one thread may read.
    """

    def __init__(self, connection: socket.socket, greeting: Greeting) -> None:
        self.greeting = greeting
        self.local_host, self.other_host = connection.getsockname()[0], connection.getpeername()[0]
        self._connection = connection
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        _notice_silence(connection)
        self._writer = start_thread(self._write, "handoff-writer")

    def send(self, message: Message | Bye) -> None:
        """Queue a message. If the other side is gone the message is lost, and `read` returns None."""
        self._outbox.put(_frame(message_to_json(message)))

    def read(self) -> dict[str, Any] | None:
        """The next message as a JSON object, or None if no more will come."""
        try:
            return _receive(self._connection)
        except (OSError, ValueError):
            return None

    def end(self) -> None:
        """Send the queued messages and then end the stream, so that the other side reads to its end."""
        self._outbox.put(None)

    def close(self) -> None:
        """Cut the connection and wake the thread that reads."""
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


def listen(address: Address, greeting: Greeting, timeout_s: float) -> ControlChannel:
    """Wait for the other process to connect.

    Raises:
        PeerUnreachable: no process connected within `timeout_s`.
        UsageError: the port is not available, or the other side uses another carrier.
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
    raise PeerUnreachable(
        f"no process connected to {address} within {timeout_s:g} s",
        id="no-connection", field="address", found=str(address),
    )  # fmt: skip


def bind(address: Address, port: int | None = None) -> socket.socket:
    """A socket that listens at the address, or at another port of its host. Port 0 is any free port.

    Raises:
        UsageError: this machine does not have the address, or its port is taken.
    """
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        host_and_port = (address.host, address.port if port is None else port)
        return socket.create_server(host_and_port, family=family, backlog=1)
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UsageError(
            f"cannot listen at {address}: {reason}", id="cannot-listen", field="address", found=str(address)
        ) from error


def connect(address: Address, greeting: Greeting, timeout_s: float) -> ControlChannel:
    """Connect to the process that listens at the address now, or will listen within `timeout_s`.

    Raises:
        PeerUnreachable: it did not answer in time.
        UsageError: the other side uses another carrier.
    """
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        with suppress(OSError, ValueError):
            connection = socket.create_connection((address.host, address.port), timeout=left)
            found = _greet(connection, greeting, left)
            if found is not None:
                return _agreed(connection, found, greeting, address)
        time.sleep(min(RETRY_S, max(until - time.monotonic(), 0)))
    raise PeerUnreachable(
        f"no answer from {address} within {timeout_s:g} s", id="no-answer", field="address", found=str(address)
    )


def start_thread(target: Any, name: str) -> threading.Thread:
    """Start a thread that does not keep the process alive."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread, limit_s: float) -> bool:
    """Whether a thread ends within `limit_s`. Does not wait for the calling thread."""
    if thread is not threading.current_thread():
        thread.join(limit_s)
    return not thread.is_alive()


def _greet(connection: socket.socket, greeting: Greeting, left_s: float) -> dict[str, Any] | None:
    """Exchange greetings. The other side's greeting, or None if it sends none or is another program."""
    try:
        connection.settimeout(min(left_s, GREETING_S))
        connection.sendall(_frame(to_json(greeting)))
        found = _receive(connection)
        if found is not None and "hello" in found:
            connection.settimeout(None)
            return found
    except (OSError, ValueError):
        pass
    connection.close()
    return None


def _agreed(connection: socket.socket, found: dict[str, Any], greeting: Greeting, address: Address) -> ControlChannel:
    try:
        for name, expected in (("hello", greeting.hello), ("carrier", greeting.carrier)):
            if found.get(name) != expected:
                raise UsageError(
                    f"{address}: the other side has {name} {found.get(name)!r}, expected {expected!r}",
                    id="another-connector", field=name, found=found.get(name), expected=repr(expected),
                )  # fmt: skip
        return ControlChannel(connection, from_json(Greeting, found, path=address, error=UsageError))
    except UsageError:
        connection.close()
        raise


def _frame(message: Mapping[str, Any]) -> bytes:
    data = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    return LENGTH.pack(len(data)) + data


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next JSON object, or None if the other side has ended the stream.

    Raises:
        ValueError: the bytes are not a JSON object.
    """
    head = _receive_bytes(connection, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if length > LONGEST_BYTES:
        raise ValueError("too long")
    data = _receive_bytes(connection, length)
    message = None if data is None else json.loads(data)
    if message is not None and not isinstance(message, dict):
        raise ValueError("not an object")
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
    """Let the system probe the other machine regularly, because a machine that crashes sends nothing."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}  # s, s, times, ms
    for name, value in limits.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
