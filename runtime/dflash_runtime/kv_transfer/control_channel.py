"""Messages between the two processes of a hand-off, over one TCP connection: a length in four bytes, then JSON.

Requests and headers travel here; a carrier (`carrier.py`) moves the bytes of tensors. With its own socket, each side
detects at once that the other process has died, and can wake a thread that waits for a message. torch's gloo cannot end
a running receive, and cannot show that the peer is alive between transfers. Messages are JSON. Their content is never
executed. Without a secret anyone who can reach the port can be the other side, so use a trusted network.

A connection begins with a greeting of each side, and then with a proof that each side has the secret of
DFLASH_HANDOFF_SECRET, which is empty by default. A side that listens skips connections that do not get that far.
"""

import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from dflash_runtime.checkpoint.stored.strict_json import MAX_JSON_BYTES, loads
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import PeerUnreachable, UsageError
from dflash_runtime.kv_transfer.messages import Bye, Greeting, Message, Proof, message_to_json
from dflash_runtime.phrases import shorten

LENGTH = struct.Struct(">I")
LONGEST_BYTES = MAX_JSON_BYTES
"""The longest message. A header with a million tokens has about 8 MB; a longer message comes from another program."""

LONGEST_GREETING_BYTES = 4096
MESSAGE_S = 60.0
"""How long a message may take from its first to its last byte."""

RETRY_S = 0.05
GREETING_S = 10.0
"""How long a new connection may take for greeting and proof. A slow connection is not the peer."""

LOOK_S = 0.02
"""Time between two looks for connections that have sent their greetings."""

MOST_STRANGERS = 32
"""How many connections may be open before one is the other side. A further one ends the oldest."""

MOST_WAITING = 100_000
"""How many messages may wait for a side that does not read."""

SECRET = "DFLASH_HANDOFF_SECRET"

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
        if self._outbox.qsize() > MOST_WAITING:
            _hang_up(self._connection)
        self._outbox.put(_frame(message_to_json(message)))

    def read(self) -> dict[str, Any] | None:
        """The next message as a JSON object, or None if no more will come, or it is too long or too slow."""
        try:
            return _receive(self._connection, LONGEST_BYTES)
        except (OSError, ValueError):
            return None

    def end(self) -> None:
        """Send the queued messages and then end the stream, so that the other side reads to its end."""
        self._outbox.put(None)

    def close(self) -> None:
        """Cut the connection and wake the thread that reads."""
        self.end()
        join(self._writer, ENDING_S)
        _hang_up(self._connection)
        join(self._writer, ENDING_S)
        self._connection.close()

    def _write(self) -> None:
        with suppress(OSError):
            while (frame := self._outbox.get()) is not None:
                self._connection.sendall(frame)
            self._connection.shutdown(socket.SHUT_WR)


def listen(address: Address, greeting: Greeting, timeout_s: float, secret: str = "") -> ControlChannel:
    """Wait for the other process to connect. Strangers are skipped.

    Raises:
        PeerUnreachable: no process connected within `timeout_s`.
        UsageError: the port is not available, or only processes with another carrier or secret connected.
    """
    until = time.monotonic() + timeout_s
    with bind(address) as server, _Reception(address, greeting, secret) as reception:
        while (left := until - time.monotonic()) > 0:
            server.settimeout(min(left, LOOK_S))
            with suppress(OSError):
                reception.meet(server.accept()[0], until)
            found = reception.find(LOOK_S)
            if found is not None:
                return found
    raise reception.refusal or PeerUnreachable(
        f"no process connected to {address} within {timeout_s:g} s",
        id="no-connection", field="address", found=str(address),
    )  # fmt: skip


class _Reception:
    """Greets several connections at the same time, so that a slow stranger does not keep the other side out."""

    def __init__(self, address: Address, greeting: Greeting, secret: str) -> None:
        self.refusal: UsageError | None = None
        self._address, self._greeting, self._secret = address, greeting, secret
        self._open: deque[socket.socket] = deque()
        self._threads: list[threading.Thread] = []
        self._found: SimpleQueue[tuple[socket.socket, Greeting]] = SimpleQueue()

    def __enter__(self) -> "_Reception":
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up on all connections but the one that was found."""
        for connection in self._open:
            _hang_up(connection)
        for thread in self._threads:
            join(thread, ENDING_S)
        while not self._found.empty():
            self._found.get()[0].close()

    def meet(self, connection: socket.socket, until: float) -> None:
        """Greet a new connection in a thread of its own."""
        self._open.append(connection)
        if len(self._open) > MOST_STRANGERS:
            _hang_up(self._open.popleft())
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(start_thread(lambda: self._greet(connection, until), "handoff-greeting"))

    def find(self, wait_s: float) -> ControlChannel | None:
        """The connection that has proven to be the other side, if there is one."""
        try:
            connection, greeting = self._found.get(timeout=wait_s if self._threads else 0)
        except Empty:
            return None
        if connection in self._open:
            self._open.remove(connection)
        return ControlChannel(connection, greeting)

    def _greet(self, connection: socket.socket, until: float) -> None:
        try:
            found = _meet(connection, self._greeting, self._secret, until, self._address, is_listening=True)
            self._found.put((connection, found))
        except UsageError as error:
            self.refusal = error
            connection.close()
        except (OSError, ValueError):
            connection.close()


def bind(address: Address, port: int | None = None) -> socket.socket:
    """A socket that listens at the address, or at another port of its host. Port 0 is any free port.

    Raises:
        UsageError: this machine does not have the address, or its port is taken.
    """
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        host_and_port = (address.host, address.port if port is None else port)
        return socket.create_server(host_and_port, family=family, backlog=MOST_STRANGERS)
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UsageError(
            f"cannot listen at {address}: {reason}", id="cannot-listen", field="address", found=str(address)
        ) from error


def connect(address: Address, greeting: Greeting, timeout_s: float, secret: str = "") -> ControlChannel:
    """Connect to the process that listens at the address now, or will listen within `timeout_s`.

    Raises:
        PeerUnreachable: it did not answer in time.
        UsageError: the other side uses another carrier or secret.
    """
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        with suppress(OSError, ValueError), ExitStack() as stack:
            connection = socket.create_connection((address.host, address.port), timeout=left)
            stack.callback(connection.close)
            found = _meet(connection, greeting, secret, until, address, is_listening=False)
            stack.pop_all()
            return ControlChannel(connection, found)
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


def _meet(
    connection: socket.socket, greeting: Greeting, secret: str, until: float, address: Address, *, is_listening: bool
) -> Greeting:
    """Exchange greetings and proofs, and return the other side's greeting.

    Raises:
        OSError, ValueError: the connection ends, is too slow, or belongs to another program.
        UsageError: the other side uses another version, carrier or secret.
    """
    connection.settimeout(None)
    until = min(until, time.monotonic() + GREETING_S)
    own = replace(greeting, nonce=secrets.token_hex(16))
    found = _exchange(connection, to_json(own), until)
    if "hello" not in found:
        raise ValueError("not a greeting")
    for name, expected in (("hello", own.hello), ("carrier", own.carrier)):
        _compare(address, name, found.get(name), expected)
    other = from_json(Greeting, found, path=address, error=UsageError)
    ours = f"{is_listening} {own.nonce} {other.nonce}"
    theirs = f"{not is_listening} {other.nonce} {own.nonce}"
    proof = _exchange(connection, to_json(Proof(_prove(secret, ours))), until)
    if not hmac.compare_digest(str(proof.get("proof")).encode(), _prove(secret, theirs).encode()):
        raise UsageError(
            f"{address}: the other side has another secret", id="another-secret", field=SECRET,
            hint=f"set {SECRET} to the same text on both sides",
        )  # fmt: skip
    return other


def _exchange(connection: socket.socket, message: Mapping[str, Any], until: float) -> dict[str, Any]:
    """Send a message and return the other side's."""
    connection.sendall(_frame(message))
    found = _receive(connection, LONGEST_GREETING_BYTES, until)
    if found is None:
        raise ValueError("the other side has ended")
    return found


def _compare(address: Address, name: str, found: object, expected: object) -> None:
    if found != expected:
        raise UsageError(
            f"{address}: the other side has {name} {shorten(repr(found), 40)}, expected {expected!r}",
            id="another-connector", field=name, found=found, expected=repr(expected),
        )  # fmt: skip


def _prove(secret: str, text: str) -> str:
    return hmac.digest(secret.encode(), text.encode(), "sha256").hex()


def _hang_up(connection: socket.socket) -> None:
    """End a connection, and wake the threads that use it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _frame(message: Mapping[str, Any]) -> bytes:
    data = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    return LENGTH.pack(len(data)) + data


def _receive(connection: socket.socket, longest: int, until: float | None = None) -> dict[str, Any] | None:
    """The next JSON object, or None if the other side has ended the stream.

    Without `until` it waits for the first byte without a limit, and then MESSAGE_S for the others.

    Raises:
        ValueError: the bytes are not a JSON object, or are more than `longest`.
        TimeoutError: the message is too slow.
    """
    first = _receive_bytes(connection, 1, until)
    until = time.monotonic() + MESSAGE_S if until is None else until
    rest = _receive_bytes(connection, LENGTH.size - 1, until) if first else None
    if not first or not rest:
        return None
    (length,) = LENGTH.unpack(first + rest)
    if length > longest:
        raise ValueError("too long")
    data = _receive_bytes(connection, length, until)
    message = None if data is None else loads(data)
    if message is not None and not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def _receive_bytes(connection: socket.socket, length: int, until: float | None) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        _await_bytes(connection, until)
        part = connection.recv(min(length - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _await_bytes(connection: socket.socket, until: float | None) -> None:
    """Wait until bytes can be read. A time limit of the socket would limit sending too."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    wait_ms = None if until is None else max(until - time.monotonic(), 0) * 1000
    if not poll.poll(wait_ms):
        raise TimeoutError("the message is too slow")


def _notice_silence(connection: socket.socket) -> None:
    """Let the system probe the other machine regularly, because a machine that crashes sends nothing."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}  # s, s, times, ms
    for name, value in limits.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
