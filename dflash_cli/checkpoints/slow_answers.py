"""Limit the time of every answer of the hub: its headers and its body, whichever function of huggingface_hub reads it.

The HTTP library limits only the time without a byte, so a server that sends a byte now and then would never reach a
limit. `limit_answers` wraps the connections of the library: its own settings lack such a limit.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

from dflash_runtime.errors import CheckpointNotFound

ANSWER_S = 120.0
"""Seconds for an answer, from its request to its last byte. A longer answer needs BYTES_PER_S."""

BYTES_PER_S = 1000
"""The slowest download after ANSWER_S. Eight files at once need eight times as much."""

MAX_REDIRECTS = 5


class HubUnreachable(CheckpointNotFound):
    """The hub does not answer, or offline mode is on. A copy in the local cache may still be used."""


def too_slow(path: object = None) -> HubUnreachable:
    """The error of an answer past its limit."""
    hint = "try again later, or check the network and HF_ENDPOINT"
    return HubUnreachable(f"no whole answer within {ANSWER_S:g} s", id="hub-too-slow", path=path, hint=hint)


@cache
def limit_answers() -> None:
    """Limit the answers of all sessions that huggingface_hub opens from now on."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    make: Callable[[], Any] = _http._GLOBAL_CLIENT_FACTORY  # the user's own, if there is one

    def make_limited() -> Any:
        client = make()
        client.max_redirects = MAX_REDIRECTS
        for transport in (client._transport, *client._mounts.values()):
            pool = getattr(transport, "_pool", None)  # a transport of the user's own may lack one
            if pool is not None:
                pool._network_backend = _LimitedBackend(pool._network_backend)
        return client

    set_client_factory(make_limited)


class _LimitedBackend:
    """Opens limited streams, and is the library's backend otherwise."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def connect_tcp(self, *args: Any, **kwargs: Any) -> "_LimitedStream":
        return _LimitedStream(self._backend.connect_tcp(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _LimitedStream:
    """A connection that limits the time of each answer. A request begins when it is written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._begin()

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._begin()
        self._stream.write(buffer, timeout)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left = self._until - time.monotonic()
        try:
            data: bytes = self._stream.read(max_bytes, max(0.001, left if timeout is None else min(left, timeout)))
        except Exception as error:
            if time.monotonic() >= self._until:
                raise too_slow() from error
            raise
        self._until += len(data) / BYTES_PER_S
        if left <= 0:
            raise too_slow()
        return data

    def start_tls(self, *args: Any, **kwargs: Any) -> "_LimitedStream":
        return _LimitedStream(self._stream.start_tls(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _begin(self) -> None:
        self._until = time.monotonic() + ANSWER_S
