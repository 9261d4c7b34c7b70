"""Calls of a function in a forked process, which has limits of time and memory.

Code of others that computes in this process, such as a chat template, could otherwise run forever or take all memory.
The forked process has every module and object as they are, so a call gives what it would give here.
"""

import json
import os
import resource
import signal
import socket
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

LENGTH = struct.Struct(">Q")
GRACE_S = 1.0
"""The forked process ends itself at its time limit. If it does not, it is killed after this time."""


class CallFailed(Exception):
    """A call failed, was too slow, or took too much memory. The message gives the reason on one line.

    `kind` is the name of the exception in the forked process, or None past a limit.
    """

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind


class ForkedCalls:
    """Calls `call` with a JSON value, and returns its text. The process is forked at the first call, and is kept.

    seconds     limit of one call
    max_bytes   limit of the text, and of the memory that the process takes in addition
    """

    def __init__(self, call: Callable[[Any], str], *, seconds: float, max_bytes: int) -> None:
        self._call, self._seconds, self._max_bytes = call, seconds, max_bytes
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None

    def __call__(self, argument: Any) -> str:
        """Return the text of a call.

        Raises:
            CallFailed: the call raised an error or went past a limit.
        """
        with self._lock:
            try:
                ok, text = self._ask(json.dumps(argument).encode())
            except (OSError, EOFError) as error:
                self._end()
                self._socket = None
                limits = f"{self._seconds:g} s and {self._max_bytes} bytes"
                raise CallFailed(f"it took more than {limits}") from error
        if not ok:
            kind, _, reason = text.partition("\n")
            raise CallFailed(reason, kind)
        return text

    def _ask(self, data: bytes) -> tuple[bool, str]:
        connection = self._socket = self._socket or self._fork()
        until = time.monotonic() + self._seconds + GRACE_S
        connection.settimeout(self._seconds + GRACE_S)
        connection.sendall(LENGTH.pack(len(data)) + data)
        (length,) = LENGTH.unpack(_receive(connection, LENGTH.size, until))
        if length > 1 + self._max_bytes:
            raise EOFError
        found = _receive(connection, length, until)
        return found[:1] == b"1", found[1:].decode("utf-8", errors="replace")

    def _fork(self) -> socket.socket:
        here, there = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no lock of another thread
            pid = os.fork()
        if pid == 0:
            try:
                _close_all_but(there.fileno())
                _serve(there, self._call, self._seconds, self._max_bytes)
            finally:
                os._exit(0)
        there.close()
        self._end = weakref.finalize(self, _stop, here, pid)
        return here


def _stop(connection: socket.socket, pid: int) -> None:
    """End the forked process. It has nothing to finish."""
    connection.close()
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _close_all_but(kept: int) -> None:
    """Close all files but the standard streams and one other, so that no lock or connection of the parent is held."""
    os.closerange(3, kept)
    os.closerange(kept + 1, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20))


def _serve(connection: socket.socket, call: Callable[[Any], str], seconds: float, max_bytes: int) -> None:
    """Answer calls until the parent ends. Past its time limit the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with suppress(OSError, EOFError):
        while True:
            (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
            argument = json.loads(_receive(connection, length))
            signal.setitimer(signal.ITIMER_REAL, seconds)
            answer = _answer(call, argument)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(LENGTH.pack(len(answer)) + answer)


def _answer(call: Callable[[Any], str], argument: Any) -> bytes:
    try:
        return b"1" + call(argument).encode()
    except Exception as error:
        kind = type(error).__name__
        reason = (str(error).splitlines() or [""])[0] or kind
        return b"0" + f"{kind}\n{reason[:1000]}".encode("utf-8", errors="replace")


def _receive(connection: socket.socket, length: int, until: float | None = None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if until is not None:
            connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
