"""Hand-offs between two processes, over gloo: what arrives, in which order, what is given up, and what a death does."""

import gc
import random
import time
import weakref
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_runtime.errors import PeerUnreachable
from dflash_runtime.kv_transfer import process_connector
from dflash_runtime.kv_transfer.carrier import Staged
from dflash_runtime.kv_transfer.places import open_connector
from dflash_runtime.kv_transfer.process_connector import GlooCarrier
from dflash_testing.transfers import (
    LIMIT_S,
    Peers,
    are_same,
    free_place,
    make_handoff,
    open_both,
    outcome,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_what_is_saved_in_one_process_is_loaded_in_another(peers: Peers) -> None:
    place = free_place("gloo")
    peer = peers.start(place, "prefill")
    decode = open_connector(place, "decode", LIMIT_S)
    for seed, key in enumerate("abc"):
        peer.tell("save", key, seed, 0)
    for seed, key in enumerate("abc"):
        assert are_same(decode.load(key).result(LIMIT_S), make_handoff(key, seed))
        assert peer.ask("outcome", key) is None
    decode.close()


@pytest.mark.parametrize("is_wanted_first", [False, True])
def test_a_key_is_saved_before_or_after_it_is_wanted(is_wanted_first: bool) -> None:
    with open_both(free_place("gloo")) as (prefill, decode):
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
    with open_both(free_place("gloo")) as (prefill, decode):
        ended = replace(make_handoff("a"), tensors={})
        prefill.save(ended)
        assert are_same(decode.load("a").result(LIMIT_S), ended)


def test_many_keys_out_of_order() -> None:
    keys = [f"key-{number}" for number in range(60)]
    generator = random.Random(1)
    with open_both(free_place("gloo")) as (prefill, decode):
        loads = {key: decode.load(key) for key in generator.sample(keys, 30)}
        saves = [prefill.save(make_handoff(key, number)) for number, key in generator.sample([*enumerate(keys)], 60)]
        loads |= {key: decode.load(key) for key in generator.sample(keys, 60) if key not in loads}
        assert [outcome(loads[key]) for key in keys] == list(range(60))
        assert not wait(saves, LIMIT_S).not_done


@pytest.mark.slow
def test_a_payload_of_many_pieces_travels(peers: Peers) -> None:
    place, num_bytes = free_place("gloo"), 3 * process_connector.PIECE_BYTES + 5
    peer = peers.start(place, "decode")
    prefill = open_connector(place, "prefill", LIMIT_S)
    saving = prefill.save(make_handoff("a", 9, num_bytes))
    peer.tell("load", "a")
    assert peer.ask("outcome", "a") == 9
    saving.result(LIMIT_S)
    prefill.close()


def test_pieces_are_put_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_connector, "PIECE_BYTES", 37)
    with open_both(free_place("gloo")) as (prefill, decode):
        prefill.save(make_handoff("a", 2, 100))
        assert outcome(decode.load("a")) == 2


def test_what_has_arrived_is_let_go_of() -> None:
    with open_both(free_place("gloo")) as (prefill, decode):
        handoff = make_handoff("a")
        kept = weakref.ref(handoff.tensors["draft"])
        prefill.save(handoff)
        del handoff
        decode.load("a").result(LIMIT_S)
        prefill.save(make_handoff("b"))  # so that the threads hold another one
        decode.load("b").result(LIMIT_S)
        gc.collect()
        assert kept() is None


def test_loading_twice_at_once_is_loading_once() -> None:
    with open_both(free_place("gloo")) as (prefill, decode):
        loads = [decode.load("a") for _ in range(3)]
        prefill.save(make_handoff("a", 4)).result(LIMIT_S)
        assert [outcome(load) for load in loads] == [4, 4, 4]


def test_saving_anew_replaces_what_nobody_wanted_yet() -> None:
    with open_both(free_place("gloo")) as (prefill, decode):
        saves = [prefill.save(make_handoff("a", seed)) for seed in (1, 2)]
        assert outcome(decode.load("a")) == 2
        assert [outcome(save) for save in saves] == [None, None]


class TestGivingUp:
    def test_a_load_that_is_cancelled_ends_the_save(self) -> None:
        with open_both(free_place("gloo")) as (prefill, decode):
            assert decode.load("a").cancel()
            saving = prefill.save(make_handoff("a"))
            assert outcome(saving) == "PeerUnreachable: hand-off a was not taken: it is no longer wanted"
            prefill.save(make_handoff("b", 6))
            assert outcome(decode.load("b")) == 6

    def test_one_of_two_that_wait_is_no_reason_to_give_up(self) -> None:
        with open_both(free_place("gloo")) as (prefill, decode):
            first, second = decode.load("a"), decode.load("a")
            assert first.cancel()
            prefill.save(make_handoff("a", 5))
            assert outcome(second) == 5

    def test_a_refusal_is_known_at_once_before_and_after_the_want(self) -> None:
        with open_both(free_place("gloo")) as (prefill, decode):
            before = decode.load("a")
            prefill.refuse("a", "no page is free")
            prefill.refuse("b", "no page is free")
            assert outcome(before) == "PeerUnreachable: hand-off a will not come: no page is free"
            assert outcome(decode.load("b")) == "PeerUnreachable: hand-off b will not come: no page is free"

    def test_what_is_saved_after_all_takes_the_place_of_a_refusal(self) -> None:
        with open_both(free_place("gloo")) as (prefill, decode):
            prefill.refuse("a", "no page is free")
            prefill.save(make_handoff("a", 3))
            prefill.refuse("a", "too late")
            assert outcome(decode.load("a")) == 3


class TestDamage:
    def test_it_ends_one_load_and_not_the_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        send = GlooCarrier.send

        def damage(self: GlooCarrier, staged: Staged) -> None:
            if staged.tensors["state.number"] == 1:
                staged.tensors["draft"].view(torch.uint8).view(-1)[5] ^= 1
            send(self, staged)

        monkeypatch.setattr(GlooCarrier, "send", damage)
        with open_both(free_place("gloo")) as (prefill, decode):
            saves = [prefill.save(make_handoff(key, seed)) for seed, key in enumerate("abc")]
            found = [outcome(decode.load(key)) for key in "abc"]
            reason = "tensors.draft: damaged, its checksum is not that of the header"
            assert found == [0, f"InvalidHandoff: hand-off b: {reason}", 2]
            assert outcome(saves[1]) == f"PeerUnreachable: hand-off b was not taken: {reason}"
            assert [outcome(saves[0]), outcome(saves[2])] == [None, None]

    def test_a_header_that_is_wrong_is_refused_before_any_tensor_travels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dflash_runtime.kv_transfer.sending._header", lambda handoff, staged: {"kind": "letter"})
        with open_both(free_place("gloo")) as (prefill, decode):
            saving = prefill.save(make_handoff("a"))
            assert outcome(decode.load("a")) == ("InvalidHandoff: hand-off a: kind: found 'letter', expected 'handoff'")
            monkeypatch.undo()
            assert isinstance(saving.exception(LIMIT_S), PeerUnreachable)
            prefill.save(make_handoff("b", 1))
            assert outcome(decode.load("b")) == 1

    def test_what_has_no_room_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: GlooCarrier, specs: Any) -> Any:
            raise RuntimeError("out of memory")

        with open_both(free_place("gloo")) as (prefill, decode):
            monkeypatch.setattr(GlooCarrier, "allocate", fail)
            prefill.save(make_handoff("a"))
            assert outcome(decode.load("a")).startswith("CapacityError: hand-off a: no room for its ")
            monkeypatch.undo()
            prefill.save(make_handoff("b", 1))
            assert outcome(decode.load("b")) == 1

    def test_what_cannot_be_staged_is_known_on_both_sides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: GlooCarrier, tensors: Any) -> Any:
            raise RuntimeError("out of memory")

        with open_both(free_place("gloo")) as (prefill, decode):
            monkeypatch.setattr(GlooCarrier, "stage", fail)
            saving = prefill.save(make_handoff("a"))
            assert outcome(decode.load("a")) == (
                "PeerUnreachable: hand-off a will not come: RuntimeError: out of memory"
            )
            assert outcome(saving) == "CapacityError: hand-off a: not sent: RuntimeError: out of memory"
