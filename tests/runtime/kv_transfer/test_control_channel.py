"""Addresses, messages, and how both sides handle messages that come twice, late, or not at all."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from torch import Tensor

from dflash_runtime.documents import to_json
from dflash_runtime.errors import MISSING, InvalidConfig, InvalidHandoff, PeerUnreachable, UsageError
from dflash_runtime.kv_transfer import control_channel
from dflash_runtime.kv_transfer.carrier import Staged
from dflash_runtime.kv_transfer.control_channel import (
    GREETING_S,
    LONGEST_BYTES,
    Address,
    ControlChannel,
    connect,
    listen,
)
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.kv_transfer.messages import (
    Bye,
    Drop,
    Got,
    Greeting,
    Message,
    Offer,
    Refused,
    Take,
    Want,
    message_to_json,
    read_message,
)
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec, header_with_checksums
from dflash_runtime.kv_transfer.receiving import NOT_WANTED, ReceivingSide
from dflash_runtime.kv_transfer.sending import LONGEST_MEMORY, SendingSide
from dflash_testing.refusals import refuses
from dflash_testing.transfers import LIMIT_S, error_of, free_location, make_handoff, outcome, transfer_threads

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


WRONG_MESSAGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no kind": ({"key": "a", "number": 0}, "wrong-value", "kind"),
    "another kind": ({"kind": "later", "key": "a", "number": 0}, "wrong-value", "kind"),
    "no key": ({"kind": "want", "number": 0}, "missing-key", "key"),
    "a number as text": ({"kind": "take", "key": "a", "number": "0"}, "wrong-value", "number"),
    "a key of another kind": ({"kind": "got", "key": "a", "number": 0, "reason": "x"}, "unknown-key", "reason"),
    "a kind of another type": ({"kind": [], "key": "a", "number": 0}, "wrong-value", "kind"),
    "a long key": ({"kind": "want", "key": "a" * 256, "number": 0}, "wrong-value", "key"),
    "an offer without a header": ({"kind": "offer", "key": "a", "number": 0}, "missing-key", "header"),
}


@pytest.mark.parametrize("name", WRONG_MESSAGES)
def test_a_message_with_other_keys_is_refused(name: str) -> None:
    value, id, field = WRONG_MESSAGES[name]
    with refuses(InvalidConfig, id, field=field):
        read_message(value)


def test_messages_have_the_keys_of_version_2() -> None:
    assert message_to_json(Want("a", 0)) == {"kind": "want", "key": "a", "number": 0}
    assert message_to_json(Refused("a", 1, "full")) == {"kind": "refused", "key": "a", "number": 1, "reason": "full"}
    assert message_to_json(Offer("a", 2, {"kind": "handoff"}, {"regions": []})) == {
        "kind": "offer", "key": "a", "number": 2, "header": {"kind": "handoff"}, "directions": {"regions": []},
    }  # fmt: skip
    assert message_to_json(Bye()) == {"kind": "bye"}
    greeting = Greeting(carrier="gloo", store_port=0, nonce="n")
    assert to_json(greeting) == {"hello": 2, "carrier": "gloo", "store_port": 0, "nonce": "n"}


def _through_json(received: list[Message]) -> Callable[[Message], None]:
    def send(message: Message) -> None:
        again = read_message(json.loads(json.dumps(message_to_json(message))))
        assert isinstance(again, Message)
        received.append(again)

    return send


class Wire:
    """Both sides of a connection without threads or sockets. Messages are kept until the test passes them on.

    Each message becomes JSON text and is read again, as on a connection.
    """

    def __init__(self) -> None:
        self.to_decode: list[Message] = []
        self.to_prefill: list[Message] = []
        self.jobs: list[Callable[[], None]] = []  # of the prefill side
        self.decode_jobs: list[Callable[[], None]] = []
        self.pipe: list[Mapping[str, Tensor]] = []
        self.num_sent, self.times = 0, 1
        self.prefill = SendingSide(self, _through_json(self.to_decode), self.jobs.append)
        self.decode = ReceivingSide(self, _through_json(self.to_prefill), self.decode_jobs.append)

    name = "wire"
    takes_device = False

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        return Staged({name: tensor.contiguous() for name, tensor in tensors.items()})

    def send(self, staged: Staged) -> None:
        self.num_sent += 1
        self.pipe.append(staged.tensors)

    def release(self, staged: Staged) -> None: ...

    def allocate(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        return {name: empty_like_spec(spec) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, Tensor], directions: Mapping[str, Any]) -> None:
        while not self.pipe:
            self.run_prefill()
        for name, tensor in self.pipe.pop(0).items():
            tensors[name].copy_(tensor)

    def stop(self) -> None: ...

    def close(self) -> None: ...

    def run_prefill(self) -> None:
        """Let the prefill side read one message and run one job."""
        if self.to_prefill:
            message = self.to_prefill.pop(0)
            for _ in range(self.times):
                self.prefill.read(message)
        if self.jobs:
            self.jobs.pop(0)()

    def run(self) -> None:
        """Pass on all messages, each `times` times, and run all jobs."""
        while self.jobs or self.decode_jobs or self.to_decode or self.to_prefill:
            self.run_prefill()
            if self.to_decode:
                message = self.to_decode.pop(0)
                for _ in range(self.times):
                    self.decode.read(message)
            if self.decode_jobs:
                self.decode_jobs.pop(0)()


class TestMessages:
    def test_each_may_come_twice(self) -> None:
        wire = Wire()
        loads = [wire.decode.load(key) for key in "abc"]
        saves = [wire.prefill.save(make_handoff(key, seed)) for seed, key in enumerate("abc")]
        wire.prefill.refuse("d", "none")
        loads.append(wire.decode.load("d"))
        wire.times = 2
        wire.run()
        assert [outcome(load, 0) for load in loads[:3]] == [0, 1, 2]
        assert isinstance(loads[3].exception(0), PeerUnreachable)
        assert [outcome(save, 0) for save in saves] == [None] * 3
        again = wire.decode.load("a")
        wire.run()
        assert not again.done()

    def test_tensors_are_sent_once_however_often_they_are_wanted(self) -> None:
        wire = Wire()
        wire.prefill.save(make_handoff("a"))
        wire.decode.load("a")
        want = wire.to_prefill[0]
        for _ in range(3):
            wire.prefill.read(want)
        wire.run()
        assert wire.num_sent == 1

    def test_an_offer_for_a_want_that_was_given_up_is_not_taken_for_the_next_one(self) -> None:
        wire = Wire()
        saving = wire.prefill.save(make_handoff("a", 1))
        first = wire.decode.load("a")
        wire.prefill.read(wire.to_prefill.pop(0))
        wire.jobs.pop(0)()  # the offer is on its way
        assert first.cancel()
        second = wire.decode.load("a")
        wire.run()
        assert outcome(saving, 0) == "PeerUnreachable handoff-not-taken"
        assert outcome(second, 0) == "PeerUnreachable handoff-refused", "the save ended, so no hand-off will come"
        assert all(NOT_WANTED in error_of(future, 0).message for future in (saving, second))

    def test_a_hand_off_given_up_before_its_save_is_not_held(self) -> None:
        wire = Wire()
        wire.decode.load("a").cancel()
        wire.run()
        error = error_of(wire.prefill.save(make_handoff("a")), 0)
        assert (type(error), error.id, error.found) == (PeerUnreachable, "handoff-not-taken", "a")
        assert NOT_WANTED in error.message

    def test_a_hand_off_given_up_before_its_save_can_be_wanted_again(self) -> None:
        wire = Wire()
        wire.decode.load("a").cancel()
        wire.run()
        loading = wire.decode.load("a")
        wire.run()
        saving = wire.prefill.save(make_handoff("a", 8))
        wire.run()
        assert [outcome(loading, 0), outcome(saving, 0)] == [8, None]

    def test_the_prefill_side_knows_which_keys_are_wanted(self) -> None:
        """A key is wanted before and after its save, until the hand-off has arrived."""
        wire = Wire()
        wire.prefill.save(make_handoff("a"))
        wire.decode.load("a")
        wire.decode.load("b")
        assert not wire.prefill.is_wanted("a")
        while wire.to_prefill:
            wire.prefill.read(wire.to_prefill.pop(0))
        assert [wire.prefill.is_wanted(key) for key in "abc"] == [True, True, False]
        wire.prefill.save(make_handoff("b"))
        assert wire.prefill.is_wanted("b")
        wire.run()
        assert not any(map(wire.prefill.is_wanted, "abc"))

    def test_messages_with_an_unknown_key_have_no_effect(self) -> None:
        wire = Wire()
        for about_saving in (Take("x", 7), Got("x", 7), Drop("x", 7, "")):
            wire.prefill.read(about_saving)
        for about_loading in (Offer("x", 7, {}, {}), Refused("x", 7, "")):
            wire.decode.read(about_loading)
        wire.run()
        assert wire.num_sent == 0

    def test_a_load_is_cancelled_between_the_offer_and_its_taking(self) -> None:
        wire = Wire()
        saving, loading = wire.prefill.save(make_handoff("a")), wire.decode.load("a")
        wire.prefill.read(wire.to_prefill.pop(0))
        wire.jobs.pop(0)()
        wire.decode.read(wire.to_decode.pop(0))
        loading._state = "CANCELLED"  # the state of a cancelled future before its callbacks run
        wire.run()
        assert outcome(saving, 0) == "PeerUnreachable handoff-not-taken"
        assert NOT_WANTED in error_of(saving, 0).message

    def test_the_number_of_remembered_refusals_is_limited(self) -> None:
        wire = Wire()
        for number in range(LONGEST_MEMORY + 10):
            wire.prefill.refuse(str(number), "none")
        assert len(wire.prefill._book.refused) == LONGEST_MEMORY
        oldest, newest = wire.decode.load("0"), wire.decode.load(str(LONGEST_MEMORY + 9))
        wire.run()
        assert (oldest.done(), newest.done()) == (False, True)

    def test_an_offer_with_the_header_of_another_key_is_refused(self) -> None:
        wire = Wire()
        loading = wire.decode.load("a")
        header = to_json(header_with_checksums(make_handoff("b")))
        wire.decode.read(Offer("a", 0, header, {}))
        wire.decode_jobs.pop(0)()
        error = error_of(loading, 0)
        assert (type(error), error.path) == (InvalidHandoff, "hand-off a")
        assert (error.field, error.found, error.expected) == ("key", "b", "'a'")
        assert [type(message) for message in wire.to_prefill] == [Want, Drop]

    @pytest.mark.parametrize("field", ["kind", "version", "key", "tensors"])
    def test_a_header_without_a_field_is_refused_before_tensors_travel(self, field: str) -> None:
        wire = Wire()
        loading = wire.decode.load("a")
        header = to_json(header_with_checksums(make_handoff("a")))
        del header[field]
        wire.decode.read(Offer("a", 0, header, {}))
        wire.decode_jobs.pop(0)()
        error = error_of(loading, 0)
        assert (type(error), error.path, error.field, error.found) == (InvalidHandoff, "hand-off a", field, MISSING)
        assert [type(message) for message in wire.to_prefill] == [Want, Drop]
