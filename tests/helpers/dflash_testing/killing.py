"""Kill conversions at random moments: `python -m dflash_testing.killing DIRECTORY COUNT SEED`.

This process has no threads and forks a child for each kill. The child converts one draft after another, with and
without --force, until it is killed. Prints the states of all destinations as JSON.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
from dflash_cli.conversion.staging import clear_remains
from dflash_testing import checkpoints as support

LONGEST_S = 0.2


def convert_for_ever(home: Path, kill: int) -> None:
    """Convert two drafts in turn, each over the same destination and into a new one, until killed."""
    plans = [plan_conversion(open_draft(home / name), ConversionSpec(to="native")) for name in ("one", "two")]
    for turn in count():
        convert_draft(plans[turn % 2], home / "out", force=True)
        convert_draft(plans[turn % 2], home / f"new-{kill}-{turn}")


def is_whole(path: Path) -> bool:
    """Whether a result can be opened, and its weights have the digests of its manifest."""
    manifest = json.loads((path / "conversion.json").read_text())
    open_draft(path).select_tensors()
    stated = manifest["weights"]["result"]
    return all(hashlib.sha256((path / name).read_bytes()).hexdigest() == stated[name]["sha256"] for name in stated)


def look(home: Path, kill: int, found: Counter[str]) -> None:
    """Count the states of destinations after a kill, and check that each destination is whole or absent."""
    for path in (home / "out", *home.glob(f"new-{kill}-*")):
        state = "whole" if path.exists() else "absent"
        assert state == "absent" or is_whole(path), f"{path} is neither whole nor absent after kill {kill}"
        found[f"{path.name.partition('-')[0]} {state}"] += 1
    hidden = [item for item in home.iterdir() if item.name.startswith(".")]
    found["kills that left something hidden"] += bool(hidden)
    named = [*clear_remains(home / "out")]
    for item in hidden:
        destination = home / item.name[1:].rpartition(".")[0]
        named += clear_remains(destination) if destination != home / "out" else []
    for item in hidden:
        assert any(str(item) in sentence for sentence in named), f"{item} is not named"
        found["remains removed" if not item.exists() else "remains only named"] += 1
        shutil.rmtree(item, ignore_errors=True)


def main(home: Path, num_kills: int, seed: int) -> None:
    generator = random.Random(seed)
    support.make_native(home / "one")
    support.make_native(home / "two", support.Shape(vocab=40, draft_vocab=40))
    found: Counter[str] = Counter()
    for kill in range(num_kills):
        child = os.fork()
        if not child:
            convert_for_ever(home, kill)
        time.sleep(generator.uniform(0, LONGEST_S))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the conversion ended by itself"
        look(home, kill, found)
    print(json.dumps({"kills": num_kills, **dict(sorted(found.items()))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
