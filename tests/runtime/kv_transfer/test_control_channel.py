"""Addresses, the channel between two sides, and connections of strangers."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from dflash_runtime.errors import UsageError
from dflash_runtime.kv_transfer import control_channel
from dflash_runtime.kv_transfer.control_channel import (
    GREETING_S,
    LONGEST_BYTES,
    Address,
    ControlChannel,
    connect,
    listen,
)
from dflash_runtime.kv_transfer.messages import (
    Drop,
    Greeting,
    Want,
    read_message,
)
from dflash_testing.refusals import refuses
from dflash_testing.transfers import LIMIT_S, free_location, transfer_threads

NONE = Greeting(carrier="none")


@pytest.mark.parametrize(
    ("text", "host", "port"), [("127.0.0.1:80", "127.0.0.1", 80), ("a.b:1", "a.b", 1), ("[::1]:65535", "::1", 65535)]
)
def test_addresses_are_parsed(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:0", "host:65536", "host:-1", "host:x", "a/b:80", "h:²"]
)
def test_malformed_addresses_are_refused(text: str) -> None:
    with refuses(UsageError, field="address", found=text):
        Address.parse(text)


DEEP = b"[" * 200_000


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


@pytest.fixture
def channels() -> Iterator[tuple[ControlChannel, ControlChannel]]:
    address = Address.parse(free_location("gloo").removeprefix("gloo://"))
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen, address, NONE, 10.0)
        other = connect(address, NONE, 10.0)
        one = listening.result()
    yield one, other
    one.close()
    other.close()


class TestChannel:
    def test_messages_arrive_in_order_and_then_the_end(self, channels: Any) -> None:
        one, other = channels
        sent = [Drop("a", number, "ü" * number * 10) for number in range(100)]
        for message in sent:
            one.send(message)
        one.end()
        assert [read_message(other.read()) for _ in sent] == sent
        assert other.read() is None

    def test_sending_does_not_wait_for_a_reader(self, channels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control_channel, "ENDING_S", 0.1)
        one, _ = channels
        for _ in range(64):
            one.send(Drop("a", 0, "a" * (1 << 20)))
        one.close()

    def test_closing_wakes_the_reader(self, channels: Any) -> None:
        one, _ = channels
        reader = threading.Thread(target=one.read, daemon=True)
        reader.start()
        one.close()
        reader.join(5)
        assert not reader.is_alive()

    @pytest.mark.parametrize(
        "data", [struct.pack(">I", LONGEST_BYTES + 1), framed(b"{]"), framed(b"[]"), framed(DEEP), b"\x00\x00\x00\x02{"]
    )
    def test_a_malformed_or_slow_message_ends_the_stream(self, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control_channel, "MESSAGE_S", 0.05)
        here, there = socket.socketpair()
        address = socket.create_server(("127.0.0.1", 0))
        there.close()
        here.close()
        here = socket.create_connection(address.getsockname())
        there, _ = address.accept()
        address.close()
        channel = ControlChannel(here, NONE)
        there.sendall(data)
        assert channel.read() is None
        there.close()
        channel.close()


HELLO = {"hello": 2, "carrier": "none", "nonce": "n"}
STRANGERS: dict[str, bytes] = {
    "deep": framed(DEEP[:4000]),
    "deep and long": framed(DEEP),
    "silent": b"",
    "too long": struct.pack(">I", LONGEST_BYTES),
    "unfinished": framed(b"{" * 99)[:50],
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "another version": framed(json.dumps({**HELLO, "hello": 99}).encode()),
    "another carrier": framed(json.dumps({**HELLO, "carrier": "x"}).encode()),
    "unknown key": framed(json.dumps({**HELLO, "x": 1}).encode()),
    "wrong port": framed(json.dumps({**HELLO, "store_port": 1 << 16}).encode()),
    "no proof": framed(json.dumps(HELLO).encode()),
    "wrong proof": framed(json.dumps(HELLO).encode()) + framed(b'{"proof": "00"}'),
    "proof of no type": framed(json.dumps(HELLO).encode()) + framed(b'{"proof": []}'),
    "deep after the greeting": framed(json.dumps(HELLO).encode()) + framed(DEEP[:4000]),
}


class TestStrangers:
    """A side that listens skips connections that are not the other side."""

    def test_the_other_side_connects_beside_strangers(self) -> None:
        address = Address.parse(free_location("gloo").removeprefix("gloo://"))
        with ThreadPoolExecutor(1) as pool, ExitStack() as strangers:
            listening = pool.submit(listen, address, NONE, LIMIT_S, "secret")
            for data in STRANGERS.values():
                strangers.enter_context(connected(address)).sendall(data)
            other = connect(address, NONE, LIMIT_S, "secret")
            one = listening.result(LIMIT_S)
            other.send(Want("a", 0))
            assert one.read() == {"kind": "want", "key": "a", "number": 0}
            one.close()
            other.close()
        assert not transfer_threads()

    def test_more_strangers_than_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control_channel, "MOST_STRANGERS", 3)
        address = Address.parse(free_location("gloo").removeprefix("gloo://"))
        with ThreadPoolExecutor(1) as pool, ExitStack() as strangers:
            listening = pool.submit(listen, address, NONE, LIMIT_S)
            kept = [strangers.enter_context(connected(address)) for _ in range(4)]
            kept[0].settimeout(GREETING_S / 2)
            assert kept[0].makefile("rb").read().startswith(b"\0\0"), "the oldest gets a greeting and then the end"
            connect(address, NONE, LIMIT_S).close()
            listening.result(LIMIT_S).close()

    @pytest.mark.parametrize(
        ("name", "id"), [("another version", "another-connector"), ("wrong proof", "another-secret")]
    )
    def test_the_error_at_the_end_names_what_differed(self, name: str, id: str) -> None:
        address = Address.parse(free_location("gloo").removeprefix("gloo://"))
        with ThreadPoolExecutor(1) as pool:
            listening = pool.submit(listen, address, NONE, 0.5)
            with connected(address) as stranger:
                stranger.sendall(STRANGERS[name])
                with refuses(UsageError, id):
                    listening.result(LIMIT_S)

    def test_a_message_of_every_kind_and_a_slow_one_end_a_greeting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A byte in each interval does not extend the time limit."""
        monkeypatch.setattr(control_channel, "GREETING_S", 0.2)
        address = Address.parse(free_location("gloo").removeprefix("gloo://"))
        with ThreadPoolExecutor(1) as pool:
            listening = pool.submit(listen, address, NONE, LIMIT_S)
            with connected(address) as stranger, suppress(ConnectionError):
                for num_sent in range(1000):  # noqa: B007
                    stranger.sendall(b"\0")
                    threading.Event().wait(0.02)
            assert num_sent < 999, "the connection was cut"
            connect(address, NONE, LIMIT_S).close()
            listening.result(LIMIT_S).close()

    def test_another_secret_is_refused_by_the_side_that_connects(self) -> None:
        address = Address.parse(free_location("gloo").removeprefix("gloo://"))
        with ThreadPoolExecutor(1) as pool:
            listening = pool.submit(listen, address, NONE, 1.0, "one")
            with refuses(UsageError, "another-secret"):
                connect(address, NONE, LIMIT_S, "two")
            with refuses(UsageError, "another-secret"):
                listening.result(LIMIT_S)


@contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    """A connection to a side that may not listen yet."""
    for _ in range(1000):
        try:
            with socket.create_connection((address.host, address.port)) as connection:
                yield connection
                return
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
