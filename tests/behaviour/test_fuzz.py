"""Random faults in checkpoints end in a finding or a clear error with a documented exit code, within a time limit.

`pytest -m slow tests/behaviour/test_fuzz.py -s` runs ten thousand faults and prints the outcomes. `scripts/fuzz` runs
faults for any time, and continues where it stopped.
"""

import json
import resource
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest

from dflash_testing import fuzzing
from dflash_testing.fuzzing import WATCH
from dflash_testing.paths import ROOT

MEGABYTES = 1500
COUNT, ALL = 120, 10_000


def run_all(home: Path, num: int, seed: int) -> fuzzing.Totals:
    ground, totals = fuzzing.Ground(home), fuzzing.Totals()
    for index in range(num):
        ground.run(seed, index, totals)
    assert not totals.broken, "\n".join(f"{line}\n    {case}" for line, case in totals.broken.items())
    return totals


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_random_faults(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")  # each printed document is compared with its schema
    outcomes = run_all(tmp_path, COUNT, seed=1).outcomes
    codes = {code for _, code in outcomes}
    assert {0, 3, 5} <= codes, outcomes


@pytest.mark.slow
def test_ten_thousand_random_faults(tmp_path: Path) -> None:
    before = peak_megabytes()
    started = time.perf_counter()
    outcomes = run_all(tmp_path, ALL, seed=2).outcomes
    for (command, code), count in sorted(outcomes.items()):
        print(f"{command:10} exit {code}: {count}")
    print(f"{ALL} faults, {sum(outcomes.values())} runs, {time.perf_counter() - started:.0f} s, "
          f"peak memory {before:.0f} -> {peak_megabytes():.0f} MB")  # fmt: skip
    assert peak_megabytes() - before < MEGABYTES


def test_the_watch_sees_a_stray_read(tmp_path: Path) -> None:
    """The watch notices a read outside the checkpoint."""
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "config.json"
    file.write_text("{}")
    WATCH.opened.clear()
    WATCH.root = f"{tmp_path}/elsewhere"
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "link").read_text()
    WATCH.root = None
    assert WATCH.opened == {str(file)}


def test_a_bug_is_reported_by_its_code_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness reports an unexpected exception."""

    def broken(*args: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(fuzzing, "invoke", broken)
    totals = fuzzing.Totals()
    fuzzing.Ground(tmp_path).run(1, 0, totals)
    (line,) = totals.broken
    assert line.startswith("KeyError: 'a bug' (test_fuzz.py:")


def test_the_script_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonschema")  # each printed document is compared with its schema
    state = tmp_path / "state.json"
    script = str(ROOT / "scripts" / "fuzz")
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    for count, end in ((2, 2), (1, 3)):
        arguments = ["--state", str(state), "--seed", "3", "--chunk", "2", "--count", str(count)]
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        assert not ended.value.code
        found = json.loads(state.read_text())
        assert (found["seed"], found["next"], found["broken"]) == (3, end, {})
        assert 2 * end <= sum(found["outcomes"].values()) <= 3 * end  # a spoiled target also runs
        assert f"{end} checkpoints" in capsys.readouterr().out
