"""Hand-offs over NIXL's UCX backend, from host memory to host memory.

The test dependencies do not include NIXL, since its wheels have 130 MB. These tests run after `pip install nixl`, also
on machines without a GPU.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from dflash_runtime.errors import PeerUnreachable
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.kv_transfer.nixl_connector import NixlCarrier, _overlap
from dflash_testing.deadline import deadline
from dflash_testing.transfers import (
    LIMIT_S,
    Peers,
    are_same,
    error_of,
    free_location,
    make_handoff,
    open_both,
    outcome,
    transfer_threads,
)


def test_regions_overlap_if_they_share_a_byte_of_a_device() -> None:
    known = [(100, 10, 0), (300, 10, 1)]
    for region, expected in [((90, 10, 0), False), ((90, 11, 0), True), ((109, 1, 0), True), ((110, 5, 0), False),
                             ((100, 10, 1), False), ((305, 1, 1), True), ((0, 1000, 0), True)]:  # fmt: skip
        assert _overlap(known, [region]) is expected


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    pytest.importorskip("nixl")
    starter = Peers()
    yield starter
    starter.close()


class TestTransfers:
    @pytest.fixture(autouse=True)
    def _needs_nixl(self) -> Iterator[None]:
        pytest.importorskip("nixl")
        with deadline(120):
            yield
            assert not transfer_threads()

    def test_between_two_processes(self, peers: Peers) -> None:
        location = free_location("nixl")
        peer = peers.start(location, "prefill")
        decode = open_connector(location, "decode", LIMIT_S)
        sizes = [0, 10_000, 5 << 20, 0, 10_000, 5 << 20]
        for seed, size in enumerate(sizes):
            peer.tell("save", str(seed), seed, size)
        for seed, size in enumerate(sizes):
            assert are_same(decode.load(str(seed)).result(LIMIT_S), make_handoff(str(seed), seed, size))
            assert peer.ask("outcome", str(seed)) is None
        assert peer.ask("close") == []
        decode.close()

    def test_reused_memory_is_read_again(self) -> None:
        """The sender's tensors have the same addresses as the last ones, as with an allocator that reuses memory."""
        with open_both(free_location("nixl")) as (prefill, decode):
            handoff = make_handoff("a", 1)
            for turn in range(3):
                handoff.tensors["draft"].fill_(turn)
                saving = prefill.save(handoff)
                assert are_same(decode.load("a").result(LIMIT_S), handoff)
                saving.result(LIMIT_S)

    def test_a_refusal_and_a_load_that_is_given_up(self) -> None:
        with open_both(free_location("nixl")) as (prefill, decode):
            prefill.refuse("a", "out of pages")
            error = error_of(decode.load("a"))
            assert (type(error), error.id) == (PeerUnreachable, "handoff-refused")
            assert "out of pages" in error.message
            decode.load("b").cancel()
            assert outcome(prefill.save(make_handoff("b"))) == "PeerUnreachable handoff-not-taken"

    def test_damage_ends_one_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with open_both(free_location("nixl")) as (prefill, decode):
            monkeypatch.setattr(NixlCarrier, "receive", _after_damage(NixlCarrier.receive))
            prefill.save(make_handoff("a"))
            assert outcome(decode.load("a")) == "InvalidHandoff damaged"
            monkeypatch.undo()
            prefill.save(make_handoff("b", 2))
            assert outcome(decode.load("b")) == 2

    @pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_a_peer_is_killed_at_a_random_moment(self, peers: Peers, role: str, num_kills: int) -> None:
        generator = random.Random(num_kills)
        for _ in range(num_kills):
            location, other = free_location("nixl"), "decode" if role == "prefill" else "prefill"
            peer = peers.start(location, role)
            connector: Any = open_connector(location, other, LIMIT_S)  # type: ignore[arg-type]
            futures: list[Future[Any]] = []
            for number in range(6):
                peer.tell(*(("save", f"{number}", number, 8 << 20) if role == "prefill" else ("load", f"{number}")))
                made = make_handoff(f"{number}", number, 8 << 20)
                futures.append(connector.load(f"{number}") if role == "prefill" else connector.save(made))
            time.sleep(generator.uniform(0, 0.3))
            peer.kill()
            assert not wait(futures, 5).not_done
            started = time.monotonic()
            connector.close()
            assert time.monotonic() - started < 5
            assert not transfer_threads()
            for number, future in enumerate(futures):
                error = future.exception()
                assert isinstance(error, PeerUnreachable | None)
                if error is None and role == "prefill":
                    assert outcome(future) == number


def _after_damage(receive: Any) -> Any:
    def damaged(self: NixlCarrier, tensors: Any, directions: Any) -> None:
        receive(self, tensors, directions)
        tensors["draft"].view(-1)[3] += 1

    return damaged
