"""How two processes connect and disconnect over gloo, and what happens to hand-offs when one of them dies."""

import errno
import os
import random
import socket
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

import pytest

from dflash_runtime.errors import PeerUnreachable, UsageError
from dflash_runtime.kv_transfer import process_connector
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.kv_transfer.process_connector import GlooCarrier
from dflash_testing.refusals import refuses
from dflash_testing.transfers import (
    LIMIT_S,
    ROLES,
    Peers,
    are_same,
    error_of,
    free_location,
    make_handoff,
    open_both,
    outcome,
    transfer_threads,
)

BUSY_S = 60.0
"""Time limit on a busy machine, within the deadline of `nothing_is_left`."""

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class TestConnecting:
    @pytest.mark.parametrize(("role", "problem"), [("prefill", "no-connection"), ("decode", "no-answer")])
    def test_the_other_side_does_not_connect(self, role: Any, problem: str) -> None:
        location = free_location("gloo")
        with refuses(PeerUnreachable, problem, found=location.removeprefix("gloo://")) as caught:
            open_connector(location, role, 0.2)
        assert "0.2 s" in caught.value.message

    def test_the_decode_side_may_open_first(self) -> None:
        location, opened = free_location("gloo"), []
        thread = threading.Thread(target=lambda: opened.append(open_connector(location, "decode", LIMIT_S)))
        thread.start()
        time.sleep(0.1)
        prefill = open_connector(location, "prefill", LIMIT_S)
        thread.join()
        prefill.close()
        opened[0].close()

    def test_a_port_that_is_taken_is_refused(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            with refuses(UsageError, "cannot-listen", found=address) as caught:
                open_connector(f"gloo://{address}", "prefill", 0.2)
            assert os.strerror(errno.EADDRINUSE) in caught.value.message

    def test_two_different_carriers_refuse_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        location = free_location("gloo")
        errors: list[UsageError] = []

        def open_prefill() -> None:
            try:
                open_connector(location, "prefill", 1.0)
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=open_prefill)
        thread.start()
        monkeypatch.setattr(process_connector, "_check_backend", lambda backend: None)
        with refuses(UsageError, "another-connector", field="carrier", found="gloo", expected="'nccl'"):
            open_connector(location.replace("gloo", "nccl"), "decode", LIMIT_S)
        thread.join()
        (error,) = errors
        assert (error.id, error.found, error.expected) == ("another-connector", "nccl", "'gloo'")

    def test_connections_of_other_programs_are_ignored(self) -> None:
        location = free_location("gloo")
        address = ("127.0.0.1", int(location.rpartition(":")[2]))

        def knock() -> None:
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02{}"):
                until = time.monotonic() + LIMIT_S
                while time.monotonic() < until:
                    try:
                        with socket.create_connection(address) as stranger:
                            stranger.sendall(data)
                        break
                    except ConnectionError:
                        time.sleep(0.01)

        stranger = threading.Thread(target=knock)
        stranger.start()
        opened: list[Any] = []
        opening = threading.Thread(target=lambda: opened.append(open_connector(location, "prefill", LIMIT_S)))
        opening.start()
        stranger.join()
        decode = open_connector(location, "decode", LIMIT_S)
        opening.join()
        opened[0].save(make_handoff("a", 7))
        assert outcome(decode.load("a")) == 7
        opened[0].close()
        decode.close()


class TestClosing:
    def test_closing_ends_open_futures_on_both_sides_and_may_be_repeated(self) -> None:
        with open_both(free_location("gloo")) as (prefill, decode):
            saving, loading = prefill.save(make_handoff("a")), decode.load("b")
            started = time.monotonic()
            prefill.close()
            prefill.close()
            assert time.monotonic() - started < 2
            assert outcome(saving) == "PeerUnreachable connection-closed"
            assert outcome(loading) == "PeerUnreachable peer-closed"
            assert outcome(decode.load("c")) == "PeerUnreachable peer-closed"
            assert outcome(prefill.save(make_handoff("d"))) == "PeerUnreachable connection-closed"

    def test_closing_right_after_a_load_does_not_fail_the_save(self) -> None:
        for _ in range(5):
            with open_both(free_location("gloo")) as (prefill, decode):
                saving = prefill.save(make_handoff("a", 1))
                assert outcome(decode.load("a")) == 1
                decode.close()
                assert outcome(saving) is None

    @pytest.mark.parametrize("closing", [0, 1])
    def test_closing_while_a_transfer_is_stalled(self, closing: int, monkeypatch: pytest.MonkeyPatch) -> None:
        has_begun = threading.Event()
        monkeypatch.setattr(GlooCarrier, "send", lambda self, staged: has_begun.set())
        with open_both(free_location("gloo")) as both:
            saving, loading = both[0].save(make_handoff("a")), both[1].load("a")
            assert has_begun.wait(LIMIT_S)
            time.sleep(0.1)  # so that the other side is inside gloo
            assert not loading.cancel(), "a running transfer was cancelled"
            started = time.monotonic()
            both[closing].close()
            assert {type(future.exception(LIMIT_S)) for future in (saving, loading)} == {PeerUnreachable}
            both[1 - closing].close()
            assert time.monotonic() - started < 2
            assert not transfer_threads()

    def test_closing_within_a_callback(self) -> None:
        """The callback runs on the thread that `close` would wait for. Only the test's deadline limits the waits."""
        is_closed = threading.Event()

        def close(done: Future[Handoff]) -> None:
            decode.close()
            is_closed.set()

        with open_both(free_location("gloo")) as (prefill, decode):
            loading = decode.load("a")
            loading.add_done_callback(close)
            prefill.save(make_handoff("a", 1))
            assert outcome(loading, BUSY_S) == 1
            assert is_closed.wait(BUSY_S)
            decode.close()

    def test_each_side_refuses_the_calls_of_the_other(self) -> None:
        with open_both(free_location("gloo")) as (prefill, decode):
            with refuses(UsageError, "wrong-side", found="prefill", expected="decode"):
                prefill.load("a")
            for wrong in (lambda: decode.save(make_handoff("a")), lambda: decode.refuse("a", "")):
                with refuses(UsageError, "wrong-side", found="decode", expected="prefill"):
                    wrong()


def open_with_peer(peers: Peers, role: str) -> tuple[Any, Any]:
    """A peer with this role, and a connector in this process that is the other side."""
    location = free_location("gloo")
    peer = peers.start(location, role)
    other: Any = "decode" if role == "prefill" else "prefill"
    return peer, open_connector(location, other, LIMIT_S)


@pytest.mark.parametrize("role", ROLES)
def test_killing_a_peer_ends_all_futures_quickly(peers: Peers, role: str) -> None:
    peer, connector = open_with_peer(peers, role)
    futures: list[Future[Any]] = [
        connector.load(key) if role == "prefill" else connector.save(make_handoff(key)) for key in "abc"
    ]
    started = time.monotonic()
    peer.kill()
    errors = [error_of(future) for future in futures]
    connector.close()
    assert time.monotonic() - started < 3
    assert {(type(error), error.id, error.found) for error in errors} == {
        (PeerUnreachable, "peer-gone", str(connector.address))
    }


def kill_at_a_random_moment(peers: Peers, role: str, seed: int) -> None:
    """Kill a peer during transfers. Each key arrives complete or ends with PeerUnreachable, and nothing hangs."""
    generator = random.Random(seed)
    peer, connector = open_with_peer(peers, role)
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
    # Rarely gloo does not notice that the peer died as a receive began. Then the receive ends at its time limit.
    while transfer_threads() and time.monotonic() - started < LIMIT_S + 5:
        time.sleep(0.01)
    assert not transfer_threads()
    for number, future in enumerate(futures):
        error = future.exception()
        assert isinstance(error, PeerUnreachable | None)
        if error is None and role == "prefill":
            assert are_same(future.result(), made[number])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("role", ROLES)
def test_a_peer_is_killed_at_a_random_moment(peers: Peers, role: str, seed: int) -> None:
    kill_at_a_random_moment(peers, role, seed)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_peers_are_killed_at_many_random_moments(peers: Peers, role: str) -> None:
    for seed in range(100, 125):
        kill_at_a_random_moment(peers, role, seed)


def test_a_process_that_never_closes_its_connector_can_still_end(peers: Peers) -> None:
    peer, prefill = open_with_peer(peers, "decode")
    saving = prefill.save(make_handoff("a"))
    peer.close()
    assert outcome(saving) == "PeerUnreachable peer-closed"
    prefill.close()


def test_a_refusal_reaches_another_process(peers: Peers) -> None:
    peer, decode = open_with_peer(peers, "prefill")
    loading: Future[Handoff] = decode.load("a")
    peer.tell("refuse", "a", "ended at its first token")
    error = error_of(loading)
    assert (type(error), error.id, error.found) == (PeerUnreachable, "handoff-refused", "a")
    assert "ended at its first token" in error.message
    assert peer.ask("close") == []
    decode.close()
