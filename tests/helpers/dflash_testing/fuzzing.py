"""Spoil a checkpoint, run commands on it, and hold every outcome to what is promised.

A case is known by its seed and its index, so one that fails can be run again alone.
"""

import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_testing import checkpoints as support
from dflash_testing import mutations
from dflash_testing.deadline import deadline

DOCUMENTED = {0, 2, 3, 4, 5, 6}
SECONDS = 10.0
"""Of the processor's time, which a busy machine does not lengthen."""
LONGEST_S = 60.0
"""By the clock, for what waits and does not compute."""


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


@dataclass
class Totals:
    """Outcomes by command and exit code, and one case of each fault by the place in the code that it leads to."""

    outcomes: Counter[tuple[str, int]] = field(default_factory=Counter)
    broken: dict[str, str] = field(default_factory=dict)

    def add(self, other: "Totals") -> None:
        self.outcomes += other.outcomes
        self.broken = {**other.broken, **self.broken}


class Ground:
    """A directory with sound checkpoints to spoil, one case after another."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bases = mutations.bases(home / "bases")
        shutil.copytree(home / "bases" / "native", home / "elsewhere")
        self.target = support.make_target(home / "target")
        self.target_files = {item.name: item.read_bytes() for item in self.target.iterdir()}
        import torch  # noqa: F401  (a deadline that cuts its first import short leaves half of it behind)

    def run(self, seed: int, index: int, totals: Totals) -> None:
        """One case."""
        generator = random.Random(seed * 1_000_003 + index)
        spoils_target = generator.random() < 0.1
        spoiled = mutations.spoil(self.target_files if spoils_target else generator.choice(self.bases), generator)
        place = self.home / "case"
        spoiled.write(place)
        draft, target = (self.home / "bases" / "native", place) if spoils_target else (place, self.target)
        for command in commands(draft, target, self.home / "out", index):
            what = f"{seed}:{index}: {' '.join(spoiled.kinds)}: {' '.join(map(str, command))}"
            try:
                totals.outcomes[str(command[0]), held(command, what, self.home)] += 1
            except AssertionError as error:
                totals.broken.setdefault(where(error), str(error))
            shutil.rmtree(self.home / "out", ignore_errors=True)
        shutil.rmtree(place)


def commands(draft: Path, target: Path, out: Path, index: int) -> list[tuple[object, ...]]:
    """What is run on each: always validate, and by turns another command that reads the whole checkpoint."""
    level = "weights" if index % 7 == 0 else "headers"
    engines = "vllm,sglang,transformers,llama.cpp"
    others: list[tuple[object, ...]] = [
        ("inspect", draft, "--tensors"),
        ("inspect", draft, "--json"),
        ("convert", draft, out, "--to", "native", "--target", target, "--dry-run"),
        ("convert", draft, out, "--to", "speculators", "--target-name", "a/b"),
        ("launch", draft, "--target", target, "--engine", "vllm"),
        ("validate", draft, "--target", target, "--fix-out", out),
        ("inspect", draft, target.parent / "bases" / "native"),
        ("convert", draft, out, "--to", "sglang", "--target", target, "--allow-lossy", "--normalise-taps"),
        ("convert", target.parent / "bases" / "native", draft, "--to", "native", "--force"),
        ("convert", draft, out, "--to", "mlx", "--target", target, "--max-shard-size", "2k", "--verify", "none"),
    ]
    validate = ("validate", draft, "--target", target, "--engine", engines, "--level", level, "--json")
    return [validate, others[index % len(others)]]


def held(command: tuple[object, ...], what: str, home: Path) -> int:
    """Run one command; a traceback, an undocumented code, slowness, a stray read or a lost file is an error.

    Raises:
        AssertionError: naming the case.
    """
    replaced = Path(str(command[2])) if command[0] == "convert" and command[2] != home / "out" else None
    foreign = {item.name for item in replaced.iterdir()} if replaced is not None else set()
    WATCH.opened.clear()
    WATCH.root = f"{home}/elsewhere"
    try:
        started = time.process_time()
        with deadline(LONGEST_S):
            outcome = support.invoke(*command)
        if time.process_time() - started > SECONDS:
            raise TimeoutError(f"more than {SECONDS:g} s of computing")
    except BaseException as error:
        raise AssertionError(what) from error
    finally:
        WATCH.root = None
    assert outcome.code in DOCUMENTED, f"{what}: {outcome.code}\n{outcome.err}"
    assert outcome.code == 0 or outcome.out or outcome.err, what
    assert not WATCH.opened, f"{what}: read {WATCH.opened}"
    assert not (home / "out").exists() or outcome.code in (0, 3), what
    assert not [item for item in home.iterdir() if item.name.startswith(".")], f"{what}: left something behind"
    if replaced is not None:
        kept = {item.name for item in replaced.iterdir()}
        assert outcome.code == 0 or kept == foreign, f"{what}: lost {foreign - kept}"
    return outcome.code


def where(error: AssertionError) -> str:
    """The place in the code that broke the promise, by which the same fault found again is known."""
    cause = error.__cause__
    if cause is None:
        return str(error).partition(": ")[2]
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__}: {str(cause)[:200]} ({Path(frame.filename).name}:{frame.lineno})"
