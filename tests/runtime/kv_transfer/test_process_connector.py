"""Hand-offs between two processes, over gloo: what arrives, in which order, what is given up, and what a death does."""

import gc
import random
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_runtime.errors import PeerUnreachable, UsageError
from dflash_runtime.kv_transfer import process_connector
from dflash_runtime.kv_transfer.carrier import Staged
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.kv_transfer.places import open_connector
from dflash_runtime.kv_transfer.process_connector import GlooCarrier
from dflash_testing.deadline import deadline
from dflash_testing.transfers import (
    LIMIT_S,
    Peers,
    are_same,
    free_place,
    make_handoff,
    open_both,
    outcome,
    transfer_threads,
)

OTHERS = ("prefill", "decode")


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    starter = Peers()
    yield starter
    starter.close()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test takes longer than it should, and none leaves a thread behind."""
    with deadline(120):
        yield
        assert not transfer_threads()


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


class TestMeeting:
    @pytest.mark.parametrize("role", OTHERS)
    def test_nobody_comes(self, role: Any) -> None:
        place = free_place("gloo")
        with pytest.raises(PeerUnreachable) as raised:
            open_connector(place, role, 0.2)
        address = place.removeprefix("gloo://")
        assert (
            raised.value.message
            == {
                "prefill": f"nobody connected to {address} within 0.2 s",
                "decode": f"no answer from {address} within 0.2 s",
            }[role]
        )

    def test_the_decode_side_may_come_first(self) -> None:
        place, opened = free_place("gloo"), []
        thread = threading.Thread(target=lambda: opened.append(open_connector(place, "decode", LIMIT_S)))
        thread.start()
        time.sleep(0.1)
        prefill = open_connector(place, "prefill", LIMIT_S)
        thread.join()
        prefill.close()
        opened[0].close()

    def test_a_port_that_is_taken(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
                open_connector(f"gloo://127.0.0.1:{port}", "prefill", 0.2)

    def test_two_of_another_kind_say_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place = free_place("gloo")
        errors: list[Exception] = []

        def open_prefill() -> None:
            try:
                open_connector(place, "prefill", LIMIT_S)
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=open_prefill)
        thread.start()
        monkeypatch.setattr(process_connector, "_check_backend", lambda backend: None)
        with pytest.raises(UsageError, match="the other side has carrier 'gloo', expected 'nccl'"):
            open_connector(place.replace("gloo", "nccl"), "decode", LIMIT_S)
        thread.join()
        assert "the other side has carrier 'nccl', expected 'gloo'" in str(errors[0])

    def test_strangers_who_connect_are_not_the_other_side(self) -> None:
        place = free_place("gloo")
        address = ("127.0.0.1", int(place.rpartition(":")[2]))

        def knock() -> None:
            for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02{}"):
                until = time.monotonic() + LIMIT_S
                while time.monotonic() < until:
                    try:
                        with socket.create_connection(address) as stranger:
                            stranger.sendall(words)
                        break
                    except ConnectionError:
                        time.sleep(0.01)

        stranger = threading.Thread(target=knock)
        stranger.start()
        opened: list[Any] = []
        opening = threading.Thread(target=lambda: opened.append(open_connector(place, "prefill", LIMIT_S)))
        opening.start()
        stranger.join()
        decode = open_connector(place, "decode", LIMIT_S)
        opening.join()
        opened[0].save(make_handoff("a", 7))
        assert outcome(decode.load("a")) == 7
        opened[0].close()
        decode.close()


class TestClosing:
    def test_twice_is_once_and_ends_what_is_open_on_both_sides(self) -> None:
        with open_both(free_place("gloo")) as (prefill, decode):
            saving, loading = prefill.save(make_handoff("a")), decode.load("b")
            started = time.monotonic()
            prefill.close()
            prefill.close()
            assert time.monotonic() - started < 2
            assert "was closed" in outcome(saving)
            assert outcome(loading).endswith("has closed")
            assert outcome(decode.load("c")).endswith("has closed")
            assert "was closed" in outcome(prefill.save(make_handoff("d")))

    def test_what_was_loaded_is_not_lost_by_closing_right_away(self) -> None:
        for _ in range(5):
            with open_both(free_place("gloo")) as (prefill, decode):
                saving = prefill.save(make_handoff("a", 1))
                assert outcome(decode.load("a")) == 1
                decode.close()
                assert outcome(saving) is None

    @pytest.mark.parametrize("closing", [0, 1])
    def test_while_a_transfer_stands_still(self, closing: int, monkeypatch: pytest.MonkeyPatch) -> None:
        has_begun = threading.Event()
        monkeypatch.setattr(GlooCarrier, "send", lambda self, staged: has_begun.set())
        with open_both(free_place("gloo")) as both:
            saving, loading = both[0].save(make_handoff("a")), both[1].load("a")
            assert has_begun.wait(LIMIT_S)
            time.sleep(0.1)  # so that the other side is within gloo
            assert not loading.cancel(), "it is too late for that"
            started = time.monotonic()
            both[closing].close()
            assert {type(future.exception(LIMIT_S)) for future in (saving, loading)} == {PeerUnreachable}
            both[1 - closing].close()
            assert time.monotonic() - started < 2
            assert not transfer_threads()

    def test_within_a_callback(self) -> None:
        with open_both(free_place("gloo")) as (prefill, decode):
            loading = decode.load("a")
            loading.add_done_callback(lambda done: decode.close())
            prefill.save(make_handoff("a", 1))
            assert outcome(loading) == 1
            decode.close()

    def test_each_side_does_its_own(self) -> None:
        with open_both(free_place("gloo")) as (prefill, decode):
            with pytest.raises(UsageError, match="this is the prefill side, expected the decode side"):
                prefill.load("a")
            for wrong in (lambda: decode.save(make_handoff("a")), lambda: decode.refuse("a", "")):
                with pytest.raises(UsageError, match="this is the decode side, expected the prefill side"):
                    wrong()


def open_beside(peers: Peers, role: str) -> tuple[Any, Any]:
    """A connector here, whose other side, in the role given, is a peer."""
    place = free_place("gloo")
    peer = peers.start(place, role)
    other: Any = "decode" if role == "prefill" else "prefill"
    return peer, open_connector(place, other, LIMIT_S)


@pytest.mark.parametrize("role", OTHERS)
def test_a_peer_that_is_killed_ends_all_futures_quickly(peers: Peers, role: str) -> None:
    peer, connector = open_beside(peers, role)
    futures: list[Future[Any]] = [
        connector.load(key) if role == "prefill" else connector.save(make_handoff(key)) for key in "abc"
    ]
    started = time.monotonic()
    peer.kill()
    found = {outcome(future) for future in futures}
    connector.close()
    assert time.monotonic() - started < 3
    assert found == {f"PeerUnreachable: the process at the other end of {connector.address} is gone"}


def kill_at_a_random_moment(peers: Peers, role: str, seed: int) -> None:
    """Keys on their way while the peer dies: each arrived whole or ends with PeerUnreachable, and nothing hangs."""
    generator = random.Random(seed)
    peer, connector = open_beside(peers, role)
    keys = [f"key-{number}" for number in range(generator.randint(1, 12))]
    sizes = [generator.choice([0, 1 << 20, 8 << 20]) for _ in keys]
    made = [make_handoff(key, number, size) for number, (key, size) in enumerate(zip(keys, sizes, strict=True))]
    futures: list[Future[Any]] = []
    for number, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        peer.tell(*(("save", key, number, size) if role == "prefill" else ("load", key)))
        futures.append(connector.load(key) if role == "prefill" else connector.save(made[number]))
    time.sleep(generator.uniform(0, 0.1))
    peer.kill()
    late = wait(futures, 5).not_done
    started = time.monotonic()
    connector.close()
    assert not late
    assert time.monotonic() - started < 5
    # Rarely a receive that begins as its peer dies is not told by gloo, and ends with the time limit of transfers.
    while transfer_threads() and time.monotonic() - started < LIMIT_S + 5:
        time.sleep(0.01)
    assert not transfer_threads()
    for number, future in enumerate(futures):
        error = future.exception()
        assert isinstance(error, PeerUnreachable | None)
        if error is None and role == "prefill":
            assert are_same(future.result(), made[number])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("role", OTHERS)
def test_a_peer_is_killed_at_a_random_moment(peers: Peers, role: str, seed: int) -> None:
    kill_at_a_random_moment(peers, role, seed)


@pytest.mark.slow
@pytest.mark.parametrize("role", OTHERS)
def test_peers_are_killed_at_many_random_moments(peers: Peers, role: str) -> None:
    for seed in range(100, 125):
        kill_at_a_random_moment(peers, role, seed)


def test_a_process_that_never_closes_ends_by_itself(peers: Peers) -> None:
    peer, prefill = open_beside(peers, "decode")
    saving = prefill.save(make_handoff("a"))
    peer.close()
    assert outcome(saving).endswith("has closed")
    prefill.close()


def test_a_refusal_reaches_another_process(peers: Peers) -> None:
    peer, decode = open_beside(peers, "prefill")
    loading: Future[Handoff] = decode.load("a")
    peer.tell("refuse", "a", "ended at its first token")
    assert outcome(loading) == "PeerUnreachable: hand-off a will not come: ended at its first token"
    assert peer.ask("close") == []
    decode.close()
