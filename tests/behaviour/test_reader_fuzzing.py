"""Random inputs for every reader of files and messages from outside. `scripts/fuzz_readers` runs any number of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_runtime.errors import DFlashError
from dflash_testing.fuzzed_readers import make_readers
from dflash_testing.paths import ROOT
from dflash_testing.reader_fuzzing import Reader, Totals, fuzz

FEW, MANY = 4, 2000
STRANGER = "greetings"
"""The reader without a proof in its inputs, so that it refuses sound inputs too."""


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    pytest.importorskip("pyarrow")
    return make_readers(tmp_path_factory.mktemp("readers"))


def run(readers: dict[str, Reader], count: int, seed: int) -> dict[str, Totals]:
    found = {name: Totals() for name in readers}
    for name, reader in readers.items():
        fuzz(name, reader, seed, range(count), found[name])
    assert not (faults := {place: what for totals in found.values() for place, what in totals.faults.items()}), faults
    return found


def test_sound_inputs_are_accepted(readers: dict[str, Reader]) -> None:
    for name, reader in readers.items():
        if name == STRANGER:
            with pytest.raises(DFlashError):
                reader.read(reader.bases[0])
        else:
            reader.read(reader.bases[0])


def test_random_inputs(readers: dict[str, Reader]) -> None:
    found = run(readers, FEW, seed=1)
    assert sum(totals.outcomes["refused"] for totals in found.values()) > len(readers)


@pytest.mark.slow
def test_many_random_inputs(readers: dict[str, Reader]) -> None:
    run(readers, MANY, seed=2)


def test_a_fault_is_reported_by_its_code_line() -> None:
    def broken(data: bytes) -> None:
        raise KeyError("a bug")

    totals = Totals()
    fuzz("broken", Reader([b"{}"], broken), 1, range(3), totals)
    (place,) = totals.faults
    assert place.startswith("broken: KeyError (test_reader_fuzzing.py:")
    assert totals.outcomes == {"fault": 3}


def test_a_refusal_of_a_known_kind_is_no_fault() -> None:
    totals = Totals()
    fuzz("numbers", Reader([b"1"], lambda data: int(data), (ValueError,)), 1, range(20), totals)
    assert not totals.faults
    assert totals.outcomes["refused"] > 0


@pytest.mark.slow
def test_the_script_continues_where_it_stopped(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    command = [sys.executable, str(ROOT / "scripts" / "fuzz_readers"), "--state", str(tmp_path / "state.json")]
    for count in (4, 6):
        done = subprocess.run(
            [*command, "--readers", "frames,json", "--count", str(count)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "state.json").read_text())
        assert {name: item["next"] for name, item in found.items()} == {"frames 1": count, "json 1": count}
