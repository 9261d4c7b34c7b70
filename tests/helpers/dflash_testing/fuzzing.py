"""Spoil a checkpoint, run commands on it, and check that every outcome keeps the documented promises.

A case is identified by its seed and its index, so a failed case can be run again alone.
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

from dflash_cli.terminal.safe_text import CONTROLS
from dflash_testing import checkpoints as support
from dflash_testing import mutations
from dflash_testing.command_line import invoke
from dflash_testing.deadline import deadline

DOCUMENTED = {0, 2, 3, 4, 5, 6}
SECONDS = 10.0
"""Limit on processor time, which does not depend on other load on the machine."""
LONGEST_S = 60.0
"""Limit on wall time, for commands that hang without computing."""


class Watch:
    """Records the files that Python opens below `root`. An audit hook cannot be removed, so `root` None disables it."""

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
    """The number of outcomes by command and exit code, and one failed case for each code line that fails."""

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
        targets = (self.target, make_hybrid(home / "hybrid"))
        self.targets = [{item.name: item.read_bytes() for item in target.iterdir()} for target in targets]
        (home / "prompts.jsonl").write_text('{"prompt_token_ids": [3, 4, 5]}')
        import torch  # noqa: F401  (a deadline during the first import would leave torch half imported)

    def run(self, seed: int, index: int, totals: Totals) -> None:
        """Run one case and add its outcomes to `totals`."""
        generator = random.Random(seed * 1_000_003 + index)
        spoils_target = generator.random() < 0.1
        spoiled = mutations.spoil(generator.choice(self.targets if spoils_target else self.bases), generator)
        case = self.home / "case"
        spoiled.write(case)
        draft, target = (self.home / "bases" / "native", case) if spoils_target else (case, self.target)
        running = [run_command(draft, target)] if spoils_target else []
        for command in (*commands(draft, target, self.home / "out", index), *running):
            what = f"{seed}:{index}: {' '.join(spoiled.kinds)}: {' '.join(map(str, command))}"
            try:
                totals.outcomes[str(command[0]), held(command, what, self.home)] += 1
            except AssertionError as error:
                totals.broken.setdefault(where(error), str(error))
            shutil.rmtree(self.home / "out", ignore_errors=True)
        shutil.rmtree(case)


def commands(draft: Path, target: Path, out: Path, index: int) -> list[tuple[object, ...]]:
    """The commands of a case: always validate, and in turn one other command that reads the whole checkpoint."""
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


def run_command(draft: Path, target: Path) -> tuple[object, ...]:
    """A command that loads and runs a pair."""
    prompts = target.parent / "prompts.jsonl"
    return ("generate", "-p", prompts, "-d", draft, "-t", target, "-n", 3, "--device", "cpu", "--output", "-")


def make_hybrid(path: Path) -> Path:
    """A target with recurrent layers that the drafts of `support.SMALL` fit."""
    from dflash_runtime.checkpoint.targets.hybrid_config import read_hybrid_config
    from dflash_runtime.models.families.qwen3_5 import Qwen35Target

    layers = ["linear_attention", "full_attention"] * (support.SMALL.target_layers // 2)
    config = support.target_config(
        model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], layer_types=layers, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=4, linear_conv_kernel_dim=3,
        partial_rotary_factor=0.5,
    )  # fmt: skip
    shapes = Qwen35Target.expected_shapes(read_hybrid_config(config, path))
    return support.write_checkpoint(path, config, support.random_arrays(shapes))


def held(command: tuple[object, ...], what: str, home: Path) -> int:
    """Run one command and return its exit code.

    Raises:
        AssertionError: a traceback, an undocumented exit code, a timeout, a read outside the case, or a lost file.
            Its message starts with `what`, which identifies the case.
    """
    replaced = Path(str(command[2])) if command[0] == "convert" and command[2] != home / "out" else None
    foreign = {item.name for item in replaced.iterdir()} if replaced is not None else set()
    WATCH.opened.clear()
    WATCH.root = f"{home}/elsewhere"
    try:
        started = time.process_time()
        with deadline(LONGEST_S):
            outcome = invoke(*command)
        if time.process_time() - started > SECONDS:
            raise TimeoutError(f"more than {SECONDS:g} s of computing")
    except BaseException as error:
        raise AssertionError(what) from error
    finally:
        WATCH.root = None
    assert outcome.code in DOCUMENTED, f"{what}: {outcome.code}\n{outcome.err}"
    assert outcome.code == 0 or outcome.out or outcome.err, what
    hostile = CONTROLS.search((outcome.out + outcome.err).replace("\n", ""))
    assert hostile is None, f"{what}: writes {hostile[0]!r}"
    assert not WATCH.opened, f"{what}: read {WATCH.opened}"
    assert not (home / "out").exists() or outcome.code in (0, 3), what
    assert not [item for item in home.iterdir() if item.name.startswith(".")], f"{what}: left something behind"
    if replaced is not None:
        kept = {item.name for item in replaced.iterdir()}
        assert outcome.code == 0 or kept == foreign, f"{what}: lost {foreign - kept}"
    return outcome.code


def where(error: AssertionError) -> str:
    """The exception and code line that failed, which identify a fault that several cases find."""
    cause = error.__cause__
    if cause is None:
        return str(error).partition(": ")[2]
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__}: {str(cause)[:200]} ({Path(frame.filename).name}:{frame.lineno})"
