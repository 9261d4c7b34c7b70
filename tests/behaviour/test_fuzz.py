"""Random faults end in a finding or a clear error with a documented exit code, soon, and read nothing elsewhere.

`pytest -m slow tests/cli/test_fuzz.py -s` runs ten thousand of them and prints the outcomes.
"""

import os
import random
import resource
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_testing import checkpoints as support
from dflash_testing import mutations
from dflash_testing.deadline import deadline

DOCUMENTED = {0, 2, 3, 4, 5, 6}
SECONDS = 10.0
MEGABYTES = 1500
COUNT, ALL = 200, 10_000


class Watch:
    """Notes every file that Python opens below a directory. An audit hook cannot be taken away, so it is switched."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.opened: set[str] = set()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self.root is None or not isinstance(arguments[0], str | bytes):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(self.root) or path in ("/etc/passwd", "/dev/zero"):
            self.opened.add(path)


WATCH = Watch()


def commands(draft: Path, target: Path, out: Path, index: int) -> list[tuple[object, ...]]:
    """What is run on each: always validate, and by turns another command that reads the whole checkpoint."""
    level = "weights" if index % 7 == 0 else "headers"
    engines = "vllm,sglang,transformers,llama.cpp"
    others: list[tuple[object, ...]] = [
        ("inspect", draft, "--tensors"),
        ("inspect", draft, "--json"),
        ("convert", draft, out, "--to", "native", "--target", target, "--dry-run"),
        ("convert", draft, out, "--to", "speculators", "--verifier", "a/b"),
        ("launch", draft, "--target", target, "--engine", "vllm"),
        ("validate", draft, "--target", target, "--fix-out", out),
    ]
    validate = ("validate", draft, "--target", target, "--engine", engines, "--level", level, "--json")
    return [validate, others[index % len(others)]]


def run_all(home: Path, num: int, seed: int) -> Counter[tuple[str, int]]:
    """Spoil, run, and hold every outcome to what is promised."""
    found = mutations.bases(home / "bases")
    elsewhere = home / "elsewhere"
    shutil.copytree(home / "bases" / "native", elsewhere)
    sound = support.make_target(home / "target")
    target_files = {item.name: item.read_bytes() for item in sound.iterdir()}
    outcomes: Counter[tuple[str, int]] = Counter()
    broken: dict[str, str] = {}
    for index in range(num):
        generator = random.Random(seed * 1_000_003 + index)
        spoils_target = generator.random() < 0.1
        spoiled = mutations.spoil(target_files if spoils_target else generator.choice(found), generator)
        place = home / "case"
        spoiled.write(place)
        draft, target = (home / "bases" / "native", place) if spoils_target else (place, sound)
        for command in commands(draft, target, home / "out", index):
            what = f"{index}: {' '.join(spoiled.kinds)}: {' '.join(map(str, command))}"
            try:
                outcomes[str(command[0]), held(command, what, home)] += 1
            except AssertionError as error:
                broken.setdefault(where(error), str(error))
            shutil.rmtree(home / "out", ignore_errors=True)
        shutil.rmtree(place)
    assert not broken, "\n".join(f"{place}\n    {what}" for place, what in broken.items())
    return outcomes


def where(error: AssertionError) -> str:
    """The place in the code that broke the promise, by which the same fault found again is known."""
    cause = error.__cause__
    if cause is None:
        return str(error).partition(": ")[2]
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__}: {cause} ({Path(frame.filename).name}:{frame.lineno})"


def held(command: tuple[object, ...], what: str, home: Path) -> int:
    """Run one command; a traceback, an undocumented code, slowness or a stray read fails the test."""
    WATCH.opened.clear()
    WATCH.root = f"{home}/elsewhere"
    try:
        with deadline(SECONDS):
            outcome = support.invoke(*command)
    except BaseException as error:
        raise AssertionError(what) from error
    finally:
        WATCH.root = None
    assert outcome.code in DOCUMENTED, f"{what}: {outcome.code}\n{outcome.err}"
    assert outcome.code == 0 or outcome.out or outcome.err, what
    assert not WATCH.opened, f"{what}: read {WATCH.opened}"
    assert not (home / "out").exists() or outcome.code in (0, 3), what
    return outcome.code


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_random_faults(tmp_path: Path) -> None:
    outcomes = run_all(tmp_path, COUNT, seed=1)
    codes = {code for _, code in outcomes}
    assert {0, 3, 5} <= codes, outcomes


@pytest.mark.slow
def test_ten_thousand_random_faults(tmp_path: Path) -> None:
    before = peak_megabytes()
    started = time.perf_counter()
    outcomes = run_all(tmp_path, ALL, seed=2)
    for (command, code), count in sorted(outcomes.items()):
        print(f"{command:10} exit {code}: {count}")
    print(f"{ALL} faults, {sum(outcomes.values())} runs, {time.perf_counter() - started:.0f} s, "
          f"peak memory {before:.0f} -> {peak_megabytes():.0f} MB")  # fmt: skip
    assert peak_megabytes() - before < MEGABYTES


def test_the_watch_sees_a_stray_read(tmp_path: Path) -> None:
    """The guard itself: reading beside the checkpoint is noticed."""
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "config.json"
    file.write_text("{}")
    WATCH.opened.clear()
    WATCH.root = f"{tmp_path}/elsewhere"
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "link").read_text()
    WATCH.root = None
    assert WATCH.opened == {str(file)}
