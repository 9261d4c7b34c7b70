"""The messages of a hand-off, and how both sides handle messages that come twice, late, or not at all."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from dflash_runtime.documents import to_json
from dflash_runtime.errors import MISSING, InvalidConfig, InvalidHandoff, PeerUnreachable
from dflash_runtime.kv_transfer.carrier import Staged
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
from dflash_testing.transfers import error_of, make_handoff, outcome

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
