"""Time steps that verify trees beside plain decoding and blocks of several widths, at real shapes with random weights.

    python3 examples/benchmarks/trees.py [--shape qwen3-8b] [--batches 1,4] [--trees 15=3.918,31=4.133] [--out FILE]

All arms of a batch size are measured in turns. Acceptance is forced: each step draws the number of accepted tokens from
a truncated geometric distribution of the stated mean, along a path with rows that are spread over the tree. A narrower
block uses the block's distribution, cut at its width. The default means are of the bundled pair: 3.439 tokens per step
with blocks of 7 drafted tokens, and 3.516, 3.918, 4.133 and 4.427 with trees of 7, 15, 31 and 63. A tree has one row
more than nodes, and products work in tiles of 16 to 128 rows, so 8, 16, 32 and 64 would be one row too many.

Tokens per second are the expected tokens per step over the time per step, so that the draws add no noise. The last
column is this rate divided by the rate of the fastest block.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from timing.arguments import counts, open_device
from timing.draft_kinds import ROUNDS, KindTimes, measure_in_turns
from timing.engine_arms import PROFILED_STEPS, WARM_STEPS, Cell
from timing.forced import acceptance_rates
from timing.pairs import RandomPair, build_pair
from timing.report import Recorder, Row, table
from timing.shapes import BLOCK, SHAPES

COLUMNS = {
    "arm": "arm",
    "batch": "batch",
    "rows": "rows",
    "acceptance": "acceptance_expected",
    "drawn": "acceptance_achieved",
    "ms": "ms",
    "least": "least_ms",
    "most": "most_ms",
    "nodes": "nodes",
    "tokens/s": "tokens_per_second",
    "x plain": "gain",
    "x block": "block_gain",
}
"""Column of the table -> field of a row."""

PLAIN = "plain"


@dataclass(frozen=True)
class WayCell(Cell):
    """Steps of one arm. `room` is the number of tokens per step that a request may commit, equal for all arms.

    Engines of all arms are in memory together, so each has little room.
    """

    room: int = BLOCK

    @property
    def warm_steps(self) -> int:
        return WARM_STEPS

    @property
    def num_new_tokens(self) -> int:
        return (self.steps + WARM_STEPS + PROFILED_STEPS + ROUNDS + 8) * self.room + 4 * BLOCK

    @property
    def num_rows(self) -> int:
        """Rows of the target per request and step."""
        return 1 if not self.is_drafting else self.num_nodes + 1 if self.num_nodes else self.verify_width or BLOCK

    @property
    def expected_tokens(self) -> float:
        """Mean tokens of a step and request under the forced distribution."""
        if self.acceptance is None:
            return 1.0
        most = min(self.num_nodes or BLOCK - 1, BLOCK - 1) + 1
        return 1 + sum(acceptance_rates(self.acceptance, most)[: self.num_rows - 1])


def cells_of(options: argparse.Namespace, batch: int, *, has_graphs: bool) -> list[WayCell]:
    """The arms of a batch size: plain decoding, blocks of each width, and trees of each size."""
    room = min(BLOCK, round(1.6 * max(options.block, *options.trees.values())) + 1)
    cell = partial(WayCell, batch=batch, context=options.context, steps=options.steps, has_graphs=has_graphs, room=room)
    blocks = [cell(f"block {width}", acceptance=options.block, verify_width=width) for width in options.widths]
    trees = [
        cell(f"tree {number}", acceptance=mean, num_nodes=number) for number, mean in sorted(options.trees.items())
    ]
    return [cell(PLAIN), *blocks, *trees]


def measure(random: RandomPair, cells: Sequence[WayCell], shape: str, recorder: Recorder, *, has_profile: bool) -> None:
    """Record one row for each arm of a batch size."""
    found = measure_in_turns([(random, cell) for cell in cells], has_profile=has_profile)
    rates = {cell.arm: 1000 * cell.batch * cell.expected_tokens / found[cell.arm].ms for cell in cells}
    block = max(rate for name, rate in rates.items() if name.startswith("block"))
    for cell in cells:
        row = {"shape": shape, **_facts(cell, found[cell.arm]), "tokens_per_second": rates[cell.arm]}
        recorder.add("step", {**row, "gain": rates[cell.arm] / rates[PLAIN], "block_gain": rates[cell.arm] / block})


def _facts(cell: WayCell, times: KindTimes) -> Row:
    account = times.account
    return {
        "arm": cell.arm, "batch": cell.batch, "context": cell.context, "rows": cell.num_rows,
        "graphs": cell.has_graphs, "acceptance": "real" if cell.acceptance is None else "synthetic",
        "acceptance_expected": cell.expected_tokens, "acceptance_achieved": times.acceptance, "ms": times.ms,
        "least_ms": min(times.rounds), "most_ms": max(times.rounds), "rounds": times.rounds,
        "nodes": account.num_nodes if account is not None else None,
        "kernels_us": dict(account.kinds_us) if account is not None else None,
    }  # fmt: skip


def means(text: str) -> dict[int, float]:
    """Parse `15=3.918,31=4.133`: drafted tokens of a tree, and its tokens per step."""
    parts = (part.partition("=") for part in text.split(","))
    return {int(number): float(mean) for number, _, mean in parts}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--batches", type=counts, default="1,4")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--widths", type=counts, default="4,6,8,16", help="verified rows of blocks")
    parser.add_argument("--block", type=float, default=3.439, help="tokens per step of the whole block")
    parser.add_argument("--trees", type=means, default="7=3.516,15=3.918,31=4.133,63=4.427")
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--no-profile", action="store_true", help="do not count kernels of steps")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="write results as JSON lines")
    return parser.parse_args()


def main() -> int:
    options = parse()
    device = open_device(options.device)
    is_cuda = device.type == "cuda"
    cells = [cells_of(options, batch, has_graphs=is_cuda) for batch in options.batches]
    longest = max(cell.max_model_len for of_batch in cells for cell in of_batch)
    random = build_pair(SHAPES[options.shape], longest, device)
    with Recorder(options.out, device) as recorder:
        for of_batch in cells:
            call = partial(
                measure, random, of_batch, options.shape, recorder, has_profile=is_cuda and not options.no_profile
            )
            recorder.guard({"arm": "trees", "batch": of_batch[0].batch}, call)
        rows = recorder.of("step")
        print(table(tuple(COLUMNS), [[row[name] for name in COLUMNS.values()] for row in rows]))
    return 1 if recorder.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
