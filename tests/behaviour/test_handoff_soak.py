"""Two processes over a faulty connector: one prefills prompts and the other decodes them."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_testing import handoff_peer
from dflash_testing.handoff_peer import make_llm, make_requests, open_side, run_side
from dflash_testing.transfers import Peer, Peers, free_location


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    starter = Peers(handoff_peer.__name__)
    yield starter
    starter.close()


@contextmanager
def running_peer(peers: Peers, *arguments: Any) -> Iterator[Peer]:
    """A peer with a ready engine, for the arguments of `run_peer`."""
    peer = peers.start(*arguments)
    try:
        assert peer.hear() is True
        yield peer
    finally:
        peer.kill()


def assert_nothing_is_left(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert scheduler.pages.num_available == scheduler.pages.num_pages - 1


def traces(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.index, output.token_ids, output.finish_reason, output.drafts) for output in outputs]


@pytest.mark.parametrize("num_prompts", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["gloo", "folder"])
def test_every_prompt_is_answered_once(peers: Peers, num_prompts: int, kind: str, tmp_path: Any) -> None:
    """Hand-offs are late, overtake one another, arrive twice or not at all."""
    location = str(tmp_path / "handoffs") if kind == "folder" else free_location("gloo")
    llm = make_llm()
    with running_peer(peers, location, "prefill", num_prompts, 7, True):
        connector = open_side(location, "decode", 8, faults=True)
        found = run_side(llm, connector, "decode", num_prompts, 7)
        connector.close()
    assert traces(found) == traces(make_llm().generate(*make_requests(num_prompts, 7)))
    num_loaded = sum(output.num_loaded > 0 for output in found)
    assert num_prompts // 2 < num_loaded < num_prompts
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=() if (kind, seed) in (("gloo", 0), ("folder", 1)) else pytest.mark.slow)
        for kind in ("gloo", "folder")
        for seed in range(12)
    ],
)
def test_decoding_continues_when_the_prefill_side_is_killed(peers: Peers, seed: int, kind: str, tmp_path: Any) -> None:
    """The prefill side is killed at a random step. The decode side prefills the missing prompts itself."""
    num_prompts, generator = 40, random.Random(seed)
    location = str(tmp_path / "handoffs") if kind == "folder" else free_location("gloo")
    llm = make_llm()
    with running_peer(peers, location, "prefill", num_prompts, seed, False) as sender:
        connector = open_side(location, "decode", seed, faults=False)
        kill_in(llm, sender, generator.randint(1, 60))
        found = run_side(llm, connector, "decode", num_prompts, seed)
        connector.close()
    assert traces(found) == traces(make_llm().generate(*make_requests(num_prompts, seed)))
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_prefilling_ends_when_the_decode_side_is_killed(peers: Peers, seed: int) -> None:
    """Requests that nobody takes end with an error, and their pages are free."""
    num_prompts, generator = 40, random.Random(seed)
    location = free_location("gloo")
    llm = make_llm()
    with running_peer(peers, location, "decode", num_prompts, seed, False) as receiver:
        connector = open_side(location, "prefill", seed, faults=False)
        kill_in(llm, receiver, generator.randint(1, 30))
        found = run_side(llm, connector, "prefill", num_prompts, seed)
        connector.close()
    assert [output.index for output in found] == list(range(num_prompts))
    assert {output.exit_code for output in found} <= {0, 4}
    assert 4 in {output.exit_code for output in found}
    assert_nothing_is_left(llm)


def kill_in(llm: LLM, peer: Peer, num_steps: int) -> None:
    """Kill a peer before step `num_steps` from now, and wait until it has ended."""
    step, left = llm.engine.step, [num_steps]

    def watched() -> Any:
        left[0] -= 1
        if left[0] == 0:
            peer.kill()
            time.sleep(0.05)
        return step()

    llm.engine.step = watched  # type: ignore[method-assign]
