"""The faulty connector of the soak tests, and that a connector under it loses nothing else."""

from concurrent.futures import wait
from pathlib import Path

import pytest

from dflash_runtime.errors import PeerUnreachable
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_testing.deadline import deadline
from dflash_testing.faulty_connector import FaultyConnector
from dflash_testing.transfers import LIMIT_S, free_location, make_handoff, open_both, outcome

NUM_KEYS = 40


def run(prefill: FaultyConnector, decode: FaultyConnector) -> None:
    """Save and load all keys through faults. Each arrives as it was saved, except the lost keys."""
    loads = {str(number): decode.load(str(number)) for number in range(NUM_KEYS)}
    saves = [prefill.save(make_handoff(key, int(key))) for key in loads]
    lost = prefill.lost_keys | decode.lost_keys
    for key, load in loads.items():
        if key in lost:
            assert load.cancel(), "a lost hand-off arrived"
        else:
            assert outcome(load) == int(key)
    assert not wait(saves, LIMIT_S).not_done, "a cancelled load did not end its save"
    assert {type(save.exception()) for save in saves} <= {type(None), PeerUnreachable}


@pytest.mark.parametrize("seed", range(2))
def test_exactly_the_lost_keys_are_missing(seed: int) -> None:
    with deadline(60), open_both(free_location("gloo")) as (prefill, decode):
        faulty = FaultyConnector(prefill, seed), FaultyConnector(decode, seed + 100)
        run(*faulty)
        assert all(one.lost_keys and one.num_doubled for one in faulty)


def test_delays_and_duplicates_lose_nothing(tmp_path: Path) -> None:
    with deadline(60), open_both(free_location("gloo")) as (prefill, decode):
        run(FaultyConnector(prefill, 1, lost=0, doubled=0.5), FaultyConnector(decode, 2, lost=0, doubled=0.5))
    folder = open_connector(str(tmp_path), "prefill")
    faulty = FaultyConnector(folder, 3, lost=0, doubled=0.5)
    try:
        run(faulty, faulty)
    finally:
        faulty.close()


def test_equal_seeds_give_equal_faults(tmp_path: Path) -> None:
    folder = open_connector(str(tmp_path), "prefill")
    drawn = [FaultyConnector(folder, seed)._draw("a") for seed in (5, 5, 6)]
    folder.close()
    assert drawn[0] == drawn[1] != drawn[2]
