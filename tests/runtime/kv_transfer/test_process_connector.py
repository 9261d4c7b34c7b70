"""Hand-offs over gloo: arrival in any order, cancelled, refused and damaged hand-offs."""

import gc
import random
import struct
import time
import weakref
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_runtime.errors import CapacityError, InvalidHandoff, PeerUnreachable
from dflash_runtime.kv_transfer import process_connector
from dflash_runtime.kv_transfer.carrier import Staged
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.kv_transfer.peer_connector import PeerConnector
from dflash_runtime.kv_transfer.process_connector import GlooCarrier
from dflash_runtime.kv_transfer.receiving import NOT_WANTED
from dflash_testing.transfers import (
    LIMIT_S,
    Peers,
    are_same,
    error_of,
    free_location,
    make_handoff,
    open_both,
    outcome,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_hand_offs_travel_from_process_to_process(peers: Peers) -> None:
    location = free_location("gloo")
    peer = peers.start(location, "prefill")
    decode = open_connector(location, "decode", LIMIT_S)
    for seed, key in enumerate("abc"):
        peer.tell("save", key, seed, 0)
    for seed, key in enumerate("abc"):
        assert are_same(decode.load(key).result(LIMIT_S), make_handoff(key, seed))
        assert peer.ask("outcome", key) is None
    decode.close()


@pytest.mark.parametrize("is_wanted_first", [False, True])
def test_a_key_may_be_saved_before_or_after_its_load(is_wanted_first: bool) -> None:
    with open_both(free_location("gloo")) as (prefill, decode):
        handoff = make_handoff("a", 3)
        if is_wanted_first:
            loading = decode.load("a")
            time.sleep(0.05)
            assert not loading.done()
            saving = prefill.save(handoff)
        else:
            saving = prefill.save(handoff)
            time.sleep(0.05)
            assert not saving.done()
            loading = decode.load("a")
        assert are_same(loading.result(LIMIT_S), handoff)
        saving.result(LIMIT_S)


def test_a_hand_off_without_tensors_travels() -> None:
    with open_both(free_location("gloo")) as (prefill, decode):
        ended = replace(make_handoff("a"), tensors={})
        prefill.save(ended)
        assert are_same(decode.load("a").result(LIMIT_S), ended)


def test_many_keys_out_of_order() -> None:
    keys = [f"key-{number}" for number in range(60)]
    generator = random.Random(1)
    with open_both(free_location("gloo")) as (prefill, decode):
        loads = {key: decode.load(key) for key in generator.sample(keys, 30)}
        saves = [prefill.save(make_handoff(key, number)) for number, key in generator.sample([*enumerate(keys)], 60)]
        loads |= {key: decode.load(key) for key in generator.sample(keys, 60) if key not in loads}
        assert [outcome(loads[key]) for key in keys] == list(range(60))
        assert not wait(saves, LIMIT_S).not_done


@pytest.mark.slow
def test_a_payload_of_many_pieces_travels(peers: Peers) -> None:
    location, num_bytes = free_location("gloo"), 3 * process_connector.PIECE_BYTES + 5
    peer = peers.start(location, "decode")
    prefill = open_connector(location, "prefill", LIMIT_S)
    saving = prefill.save(make_handoff("a", 9, num_bytes))
    peer.tell("load", "a")
    assert peer.ask("outcome", "a") == 9
    saving.result(LIMIT_S)
    prefill.close()


def test_pieces_are_reassembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_connector, "PIECE_BYTES", 37)
    with open_both(free_location("gloo")) as (prefill, decode):
        prefill.save(make_handoff("a", 2, 100))
        assert outcome(decode.load("a")) == 2


def test_tensors_are_released_after_they_arrived() -> None:
    with open_both(free_location("gloo")) as (prefill, decode):
        handoff = make_handoff("a")
        kept = weakref.ref(handoff.tensors["draft"])
        prefill.save(handoff)
        del handoff
        decode.load("a").result(LIMIT_S)
        prefill.save(make_handoff("b"))  # so that the threads hold another hand-off
        decode.load("b").result(LIMIT_S)
        gc.collect()
        assert kept() is None


def test_several_loads_of_one_key_get_the_same_hand_off() -> None:
    with open_both(free_location("gloo")) as (prefill, decode):
        loads = [decode.load("a") for _ in range(3)]
        prefill.save(make_handoff("a", 4)).result(LIMIT_S)
        assert [outcome(load) for load in loads] == [4, 4, 4]


def test_saving_again_replaces_a_hand_off_that_is_not_wanted_yet() -> None:
    with open_both(free_location("gloo")) as (prefill, decode):
        saves = [prefill.save(make_handoff("a", seed)) for seed in (1, 2)]
        assert outcome(decode.load("a")) == 2
        assert [outcome(save) for save in saves] == [None, None]


class TestGivingUp:
    def test_a_cancelled_load_ends_the_save(self) -> None:
        with open_both(free_location("gloo")) as (prefill, decode):
            assert decode.load("a").cancel()
            error = error_of(prefill.save(make_handoff("a")))
            assert (type(error), error.id, error.found) == (PeerUnreachable, "handoff-not-taken", "a")
            assert NOT_WANTED in error.message
            prefill.save(make_handoff("b", 6))
            assert outcome(decode.load("b")) == 6

    def test_cancelling_one_of_two_loads_keeps_the_other(self) -> None:
        with open_both(free_location("gloo")) as (prefill, decode):
            first, second = decode.load("a"), decode.load("a")
            assert first.cancel()
            prefill.save(make_handoff("a", 5))
            assert outcome(second) == 5

    def test_a_refusal_ends_earlier_and_later_loads(self) -> None:
        with open_both(free_location("gloo")) as (prefill, decode):
            before = decode.load("a")
            prefill.refuse("a", "no page is free")
            prefill.refuse("b", "no page is free")
            for key, loading in (("a", before), ("b", decode.load("b"))):
                error = error_of(loading)
                assert (type(error), error.id, error.found) == (PeerUnreachable, "handoff-refused", key)
                assert "no page is free" in error.message

    def test_a_later_save_replaces_a_refusal(self) -> None:
        with open_both(free_location("gloo")) as (prefill, decode):
            prefill.refuse("a", "no page is free")
            prefill.save(make_handoff("a", 3))
            prefill.refuse("a", "too late")
            assert outcome(decode.load("a")) == 3


class TestMalformedMessages:
    """A malformed message ends the futures of both sides, never the thread alone."""

    @pytest.mark.parametrize(
        ("data", "id"),
        [
            (b"[" * 200_000, "peer-gone"),
            (b'{"kind": {}}', "malformed-message"),
            (b'{"kind": "offer"}', "malformed-message"),
        ],
    )
    def test_all_futures_end(self, data: bytes, id: str) -> None:
        with open_both(free_location("gloo")) as (prefill, decode):
            assert isinstance(prefill, PeerConnector)
            loading = decode.load("a")
            prefill._channel._outbox.put(struct.pack(">I", len(data)) + data)
            assert outcome(loading) == f"PeerUnreachable {id}"
            assert outcome(decode.load("b")) == f"PeerUnreachable {id}"
            assert isinstance(prefill.save(make_handoff("a")).exception(LIMIT_S), PeerUnreachable)


class TestDamage:
    def test_damage_ends_one_load_and_not_the_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        send = GlooCarrier.send

        def damage(self: GlooCarrier, staged: Staged) -> None:
            if staged.tensors["state.number"] == 1:
                staged.tensors["draft"].view(torch.uint8).view(-1)[5] ^= 1
            send(self, staged)

        monkeypatch.setattr(GlooCarrier, "send", damage)
        with open_both(free_location("gloo")) as (prefill, decode):
            saves = [prefill.save(make_handoff(key, seed)) for seed, key in enumerate("abc")]
            loads = [decode.load(key) for key in "abc"]
            assert [outcome(loading) for loading in loads] == [0, "InvalidHandoff damaged", 2]
            error = error_of(loads[1])
            assert (error.path, error.field) == ("hand-off b", "tensors.draft")
            error = error_of(saves[1])
            assert (error.id, error.found) == ("handoff-not-taken", "b")
            assert "tensors.draft" in error.message
            assert [outcome(saves[0]), outcome(saves[2])] == [None, None]

    def test_a_wrong_header_is_refused_before_any_tensor_travels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "dflash_runtime.kv_transfer.sending._header", lambda handoff, staged: {"version": 2, "kind": "letter"}
        )
        with open_both(free_location("gloo")) as (prefill, decode):
            saving = prefill.save(make_handoff("a"))
            error = error_of(decode.load("a"))
            assert (type(error), error.path) == (InvalidHandoff, "hand-off a")
            assert (error.id, error.field, error.found) == ("wrong-value", "kind", "letter")
            monkeypatch.undo()
            assert isinstance(saving.exception(LIMIT_S), PeerUnreachable)
            prefill.save(make_handoff("b", 1))
            assert outcome(decode.load("b")) == 1

    def test_a_hand_off_without_room_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: GlooCarrier, specs: Any) -> Any:
            raise RuntimeError("out of memory")

        with open_both(free_location("gloo")) as (prefill, decode):
            monkeypatch.setattr(GlooCarrier, "allocate", fail)
            saving = prefill.save(make_handoff("a"))
            error = error_of(decode.load("a"))
            assert (type(error), error.id, error.found) == (CapacityError, "no-room-for-handoff", "a")
            assert outcome(saving) == "PeerUnreachable handoff-not-taken"
            monkeypatch.undo()
            prefill.save(make_handoff("b", 1))
            assert outcome(decode.load("b")) == 1

    def test_a_failure_to_stage_ends_both_sides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: GlooCarrier, tensors: Any) -> Any:
            raise RuntimeError("out of memory")

        with open_both(free_location("gloo")) as (prefill, decode):
            monkeypatch.setattr(GlooCarrier, "stage", fail)
            saving = prefill.save(make_handoff("a"))
            loading = decode.load("a")
            assert outcome(loading) == "PeerUnreachable handoff-refused"
            assert outcome(saving) == "CapacityError handoff-not-sent"
            for future in (loading, saving):
                assert "RuntimeError: out of memory" in error_of(future).message
