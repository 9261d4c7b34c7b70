"""Time steps of every published pair that fits one GPU, at its published sizes with random weights.

    python3 examples/benchmarks/pair_steps.py --list                        # without a GPU: shapes, bytes, reasons
    python3 examples/benchmarks/pair_steps.py --out steps.jsonl             # all shapes, on one GPU
    python3 examples/benchmarks/pair_steps.py --part 1/2 --out 1.jsonl      # half of the shapes, for one of two GPUs
    python3 examples/benchmarks/pair_steps.py --record 1.jsonl 2.jsonl      # into tests/data and docs/measurements

The pairs are in `tests/data/pairs.jsonl`, and the sizes of their targets in `tests/data/target_sizes.jsonl`. Pairs of
equal shape are measured once. Drafts of one target use the same weights of the target. Prompts have 512 tokens, and
forced acceptance commits 4 tokens per step on average. An engine has one number of requests, and captures only the
steps of this number. A row is written when it is known. A shape that fails prints one line, the others continue, and
the exit code is 1. After `--record`, run `python scripts/target_table.py > docs/reference/targets.md`.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels", "tests/helpers")]

from dflash_runtime.errors import DFlashError
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target
from dflash_testing.pair_ways import way_of
from dflash_testing.paths import ROOT
from dflash_testing.published_pairs import TABLE, PublishedPair, read_table
from dflash_testing.target_sizes import in_full, read_sizes
from timing.arguments import counts, open_device
from timing.draft_kinds import KindCell
from timing.engine_arms import measure_steps
from timing.real_pairs import RealPair, join, make_target, place, read_pair
from timing.report import Recorder, Row, release, say, table
from timing.shapes import BLOCK

CONTEXT, ACCEPTANCE, STEPS = 512, 4.0, 30
LOG = ROOT / "docs" / "measurements" / "pair-steps.md"
HEAD = """# Steps of published pairs

Milliseconds of a step at batch 1, 8 and 32 on one GPU, bfloat16, random weights at the published sizes of target and
draft, CUDA graphs where the target allows them. Prompts have 512 tokens. Acceptance is forced to 4 tokens per step.
`tests/data/target_sizes.jsonl` has the sizes and their sources. Drafts that state no layout of their blocks read them
anchor first. Pairs of equal shape share the line of the first pair. A dash is a batch without a time, such as for lack
of memory. The script prints why.

```sh
python3 examples/benchmarks/pair_steps.py --out steps.jsonl
python3 examples/benchmarks/pair_steps.py --record steps.jsonl
```

| draft | target | kind of draft | block | layers of the draft | runtime | batch 1 | batch 8 | batch 32 | GPU | date |
|---|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class SameShape:
    """Pairs with equal step times. `pair` is the first one."""

    pair: RealPair
    names: tuple[str, ...]


def same_shapes(pairs: Sequence[RealPair]) -> list[SameShape]:
    """One item per shape. Shapes with the same target are side by side."""
    groups: dict[str, dict[str, list[RealPair]]] = {}
    for pair in pairs:
        groups.setdefault(pair.target_shape, {}).setdefault(pair.shape, []).append(pair)
    return [
        SameShape(alike[0], tuple(pair.name for pair in alike)) for group in groups.values() for alike in group.values()
    ]


def part_of(shapes: Sequence[SameShape], index: int, num_parts: int) -> list[SameShape]:
    """The shapes of part `index`, counted from 1. A target is in one part, and parts have about as many shapes."""
    groups: dict[str, list[SameShape]] = {}
    for shape in shapes:
        groups.setdefault(shape.pair.target_shape, []).append(shape)
    parts: list[list[SameShape]] = [[] for _ in range(num_parts)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(group)
    return parts[index - 1]


def sized_pairs(folder: Path, only: Sequence[str]) -> tuple[list[RealPair], list[tuple[str, str]]]:
    """Pairs at their published sizes, and the names of the others with the reason."""
    found, left_out, sizes, numbers = [], [], read_sizes(), count()
    for pair in read_table():
        if only and not any(name in pair.name for name in only):
            continue
        home = folder / str(next(numbers))
        words = way_of(pair, home / "way").words
        if "refused" in words:
            left_out.append((pair.name, f"does not run here: {words}"))
        elif reason := sizes[pair.of].why_not:
            left_out.append((pair.name, reason))
        else:
            try:
                found.append(read_pair(in_full(pair, sizes[pair.of]), pair.name, home / "full"))
            except DFlashError as error:  # such as a release of transformers without this target
                left_out.append((pair.name, error.message.splitlines()[0]))
                say(": ".join(left_out[-1]))
    return found, left_out


def cell_of(batch: int, context: int) -> KindCell:
    """The measurement of a number of requests. Every shape has room for texts of the same length."""
    return KindCell("dflash", batch, context, STEPS, ACCEPTANCE, num_rows=BLOCK)


def measure_all(shapes: Sequence[SameShape], given: argparse.Namespace, recorder: Recorder) -> list[str]:
    """Record rows of all shapes. Returns the names of shapes for which no time was left."""
    began, late = time.monotonic(), []
    target = OneTarget(place(given.device, cell_of(1, given.context).max_model_len))
    for shape in shapes:
        if given.seconds is not None and time.monotonic() - began > given.seconds:
            late.append(shape.names[0])
            continue
        what = {"arm": shape.names[0]}
        recorder.guard(what, partial(measure_shape, shape, given, recorder, target))
    return late


class OneTarget:
    """The weights of the last target, for all drafts of this target."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._shape = ""
        self._target: Target | None = None

    def get(self, pair: RealPair) -> Target:
        """The target of a pair."""
        if self._target is not None and self._shape == pair.target_shape:
            return self._target
        self._target = None
        release()
        made = make_target(pair, self.placement)
        self._target, self._shape = made, pair.target_shape
        return made


def measure_shape(shape: SameShape, given: argparse.Namespace, recorder: Recorder, target: OneTarget) -> None:
    """Record a row for each number of requests."""
    pair, began = shape.pair, time.monotonic()
    with torch.no_grad():
        random = join(pair, target.get(pair), target.placement)
    loaded = time.monotonic()
    facts: Row = {
        "pairs": shape.names, "of": pair.of, "draft_kind": pair.kind, "block": pair.draft.block_size,
        "draft_layers": pair.draft.num_layers, "runtime": pair.runtime, "graphs": random.pair.has_graphs,
    }  # fmt: skip

    def measure(cell: KindCell) -> None:
        times = measure_steps(random, cell, has_profile=False)
        recorder.add("step", {
            **facts, "batch": cell.batch, "context": cell.context, "acceptance": "synthetic",
            "acceptance_achieved": times.acceptance, "ms": times.ms, "rounds": times.rounds,
            "tokens_per_second": times.tokens_per_second,
        })  # fmt: skip
        say(f"{shape.names[0]}, batch {cell.batch}: {times.ms:.3g} ms")

    for batch in given.batches:
        recorder.guard({"arm": shape.names[0], "batch": batch}, partial(measure, cell_of(batch, given.context)))
    say(f"{shape.names[0]}: made in {loaded - began:.0f} s, measured in {time.monotonic() - loaded:.0f} s")


def line_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The line of a shape in the log, from its rows of all batches."""
    first, ms = rows[0], {row["batch"]: f"{row['ms']:.3g}" for row in rows}
    times = [ms.get(batch, "-") for batch in (1, 8, 32)]
    shown = (
        first["pairs"][0],
        first["of"],
        *(first[name] for name in ("draft_kind", "block", "draft_layers", "runtime")),
    )
    return f"| {' | '.join(map(str, (*shown, *times, card(first), first['date'][:10])))} |"


def card(row: Mapping[str, Any]) -> str:
    """`H200` of `NVIDIA H200`."""
    return str(row["machine"]["device"]).removeprefix("NVIDIA ").partition(" ")[0]


def recorded(rows: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of pairs.jsonl, with `steps` of the measured pairs."""
    steps: dict[str, dict[str, Any]] = {}
    for names in dict.fromkeys(tuple(row["pairs"]) for row in rows):
        own = sorted((row for row in rows if tuple(row["pairs"]) == names), key=lambda row: row["batch"])
        ms = {str(row["batch"]): float(f"{row['ms']:.3g}") for row in own}
        entry = {"ms": ms, "card": card(own[0]), "log": LOG.name, "lines": [line_of(own)]}
        steps |= dict.fromkeys(names, entry)
    return [{**pair, **({"steps": steps[name]} if (name := _name(pair)) in steps else {})} for pair in pairs]


def _name(pair: Mapping[str, Any]) -> str:
    return PublishedPair(**pair).name


def log_text(pairs: Sequence[Mapping[str, Any]]) -> str:
    """The log with a line for each shape that was recorded."""
    lines = (line for pair in pairs if pair.get("steps", {}).get("log") == LOG.name for line in pair["steps"]["lines"])
    return HEAD + "".join(f"{line}\n" for line in dict.fromkeys(lines))


def record(files: Sequence[Path]) -> None:
    """Write the rows of results into pairs.jsonl and the log. Shapes that were not measured keep their lines."""
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    pairs = recorded([row for row in rows if row["kind"] == "step"], pairs)
    TABLE.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    LOG.write_text(log_text(pairs), encoding="utf-8")


def listing(shapes: Sequence[SameShape], left_out: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Tables of the shapes with their bytes of weights, and of the pairs that are left out."""
    headings = ("pair", "runtime", "GB", "equal pairs")
    rows = [
        [shape.names[0], shape.pair.runtime, shape.pair.num_bytes / 1e9, ", ".join(shape.names[1:])] for shape in shapes
    ]
    if rows:
        yield table(headings, rows) + "\n"
    if left_out:
        yield table(("left out", "why"), left_out)


def part(text: str) -> tuple[int, int]:
    """Parse `1/2`."""
    index, _, num_parts = text.partition("/")
    if not 1 <= int(index) <= int(num_parts):
        raise ValueError(text)
    return int(index), int(num_parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names of drafts, such as Qwen3-4B,gpt-oss")
    parser.add_argument("--part", type=part, default=(1, 1), help="such as 1/2, the first half of the shapes")
    parser.add_argument("--seconds", type=float, help="start no shape after this time")
    parser.add_argument("--batches", type=counts, default="1,8,32")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"tokens of each prompt (default: {CONTEXT})")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--list", action="store_true", help="print shapes and reasons, and measure nothing")
    parser.add_argument("--record", type=Path, nargs="+", metavar="FILE", help="write these results into the tables")
    parser.add_argument("--out", type=Path, help="write results as JSON lines")
    given = parser.parse_args()
    if given.record:
        record(given.record)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        pairs, left_out = sized_pairs(Path(folder), [name for name in given.only.split(",") if name])
        shapes = part_of(same_shapes(pairs), *given.part)
        if given.list:
            print(*listing(shapes, left_out), sep="\n")
            return 0
        given.device = open_device(given.device)
        with Recorder(given.out, given.device) as recorder:
            late = measure_all(shapes, given, recorder)
    for name in late:
        say(f"{name}: not measured, {given.seconds:g} s are over")
    rows = recorder.of("step")
    for names in dict.fromkeys(row["pairs"] for row in rows):
        print(line_of([row for row in rows if row["pairs"] == names]))
    return 1 if recorder.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
