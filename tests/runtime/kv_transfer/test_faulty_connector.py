"""The faults that soak tests are given, and that a connector under them loses nothing that it was not told to lose."""

from collections import Counter
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.errors import PeerUnreachable
from dflash_runtime.kv_transfer.places import open_connector
from dflash_testing.deadline import deadline
from dflash_testing.faulty_connector import FaultyConnector
from dflash_testing.transfers import LIMIT_S, free_place, make_handoff, open_both, outcome

NUM_KEYS = 40


def run(prefill: Any, decode: Any) -> Counter[str]:
    """Save and load all keys through faults; what came of the loads, and of the saves."""
    loads = {number: decode.load(str(number)) for number in range(NUM_KEYS)}
    saves = [prefill.save(make_handoff(str(number), number)) for number in range(NUM_KEYS)]
    waited = wait([*loads.values(), *saves], 1.0)
    found = Counter[str]()
    for number, load in loads.items():
        if load in waited.not_done:
            assert load.cancel()
            found["never came"] += 1
        else:
            assert outcome(load) == number, "what comes is what was saved"
            found["came"] += 1
    saved = wait(saves, LIMIT_S)
    assert not saved.not_done, "a load that was given up ends its save too"
    assert {type(save.exception()) for save in saves} <= {type(None), PeerUnreachable}
    return found


@pytest.mark.parametrize("seed", range(2))
def test_what_is_lost_is_what_was_to_be_lost(seed: int) -> None:
    with deadline(60), open_both(free_place("gloo")) as (prefill, decode):
        faulty = FaultyConnector(prefill, seed), FaultyConnector(decode, seed + 100)
        found = run(*faulty)
        num_lost = [one.num_faults["lost"] for one in faulty]
        assert max(num_lost) <= found["never came"] <= sum(num_lost)
        assert min(one.num_faults["doubled"] for one in faulty) > 0


def test_delays_and_doubles_alone_lose_nothing(tmp_path: Path) -> None:
    with deadline(60), open_both(free_place("gloo")) as (prefill, decode):
        found = run(FaultyConnector(prefill, 1, lost=0, doubled=0.5), FaultyConnector(decode, 2, lost=0, doubled=0.5))
        assert found == {"came": NUM_KEYS}
    folder = open_connector(str(tmp_path), "prefill")
    faulty = FaultyConnector(folder, 3, lost=0, doubled=0.5)
    assert run(faulty, faulty) == {"came": NUM_KEYS}
    faulty.close()


def test_the_same_seed_has_the_same_faults(tmp_path: Path) -> None:
    folder = open_connector(str(tmp_path), "prefill")
    drawn = [FaultyConnector(folder, seed)._draw() for seed in (5, 5, 6)]
    folder.close()
    assert drawn[0] == drawn[1] != drawn[2]
