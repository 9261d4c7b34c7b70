"""Time steps with a row budget beside whole blocks and one width for the batch, with two kinds of requests.

    python3 examples/benchmarks/row_budget.py [--batches 8,32,64] [--high 12] [--low 1.3] [--out row_budget.jsonl]

Weights are random with a real shape. Acceptance is forced: half of the requests accept `--high` tokens per step on
average, the others `--low`, from truncated geometric distributions. At small batches, further arms have one kind of
mean `--one`. The script replaces the draft's confidences, because confidences of random weights say nothing about
forced acceptance:

    perfect        0.999 for a token that will be accepted, 0.001 for other tokens
    measured       drawn by outcome, with the spread of the bundled pair's predictions
    uninformative  drawn at random, with the same spread

Everything else is as in production: the online refit, the predictions, the choice of the number of rows by measured
step times, and steps as CUDA graphs. Step times are measured for the one batch size of an engine.

Arms run one after another in engines of their own, and whole blocks a second time at the end. Tokens per second
count the tokens of the timed steps, scaled for each kind by the expected over the drawn acceptance. The scale removes
most of the noise of the draws. The last columns divide the rate by the mean rate of both arms of whole blocks, and by
the rate of adaptive width.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

from dflash_runtime.device import step_times
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.scheduling.request import Request
from timing.arguments import add_shape_options, counts, open_device, shape_of
from timing.engine_arms import FILL_ROWS, ROUNDS, Cell, engine_pair, num_tokens, ready_engine, time_rounds
from timing.forced_kinds import Feature, KindTables, force_kinds
from timing.gauges import Gauges
from timing.pairs import RandomPair, build_pair
from timing.report import Recorder, Row, table
from timing.shapes import BLOCK

WHOLE, AGAIN, ADAPTIVE = "whole blocks", "whole blocks again", "adaptive width"
FEATURES: tuple[Feature, ...] = ("perfect", "measured", "uninformative")
WARM_STEPS = 100
"""Untimed steps: adaptive widths learn, and the predictions are refitted three times."""

COLUMNS = {
    "requests": "requests",
    "batch": "batch",
    "arm": "arm",
    "rows": "rows_per_request",
    "tokens": "tokens_per_step",
    "ms": "ms",
    "least": "least_ms",
    "most": "most_ms",
    "tokens/s": "tokens_per_second",
    "x whole": "over_whole",
    "x width": "over_width",
    "W": "watts",
    "MHz": "mhz",
}
"""Column of the table -> field of a row."""


@dataclass(frozen=True)
class KindsCell(Cell):
    """Steps of requests with these mean acceptances, in turn. `feature` is None without a row budget."""

    means: tuple[float, ...] = ()
    feature: Feature | None = None
    num_draft_tokens: int = BLOCK - 1

    @property
    def warm_steps(self) -> int:
        return WARM_STEPS

    @property
    def num_new_tokens(self) -> int:
        num_steps = self.steps + WARM_STEPS + 2 * ROUNDS + -(-self.batch * self.context // FILL_ROWS)
        return int(num_steps * min(BLOCK, 1.1 * max(self.means) + 1)) + 4 * BLOCK

    @cached_property
    def tables(self) -> KindTables:
        return KindTables.draw(self.means, self.num_draft_tokens, self.feature or "uninformative")

    def engine_pair(self, random: RandomPair, **settings: Any) -> LoadedPair:
        """See `Cell`."""
        arm = "adaptive" if self.arm == ADAPTIVE else "dflash"
        pair = engine_pair(random, arm, None, **settings, row_budget=self.feature is not None)
        return force_kinds(pair, self.tables)


@dataclass(frozen=True)
class Counts:
    """Tokens and verified rows per step of the whole batch. `scaled` tokens have the expected acceptance."""

    tokens: float
    scaled: float
    rows: float


def cells_of(options: argparse.Namespace, *, has_graphs: bool) -> list[KindsCell]:
    """The arms of every batch size and kind of requests."""
    found = []
    for batch in options.batches:
        kinds = [(options.high, options.low), *([(options.one,)] if batch <= options.most_one else [])]
        for means in kinds:
            cell = partial(
                KindsCell, batch=batch, context=options.context, steps=options.steps, has_graphs=has_graphs,
                means=means, num_draft_tokens=options.block - 1,
            )  # fmt: skip
            budgets = [cell(f"budget, {feature}", feature=feature) for feature in FEATURES]
            found += [cell(WHOLE), cell(ADAPTIVE), *budgets, cell(AGAIN)]
    return found


def measure(random: RandomPair, cell: KindsCell, recorder: Recorder, gauges: Gauges) -> None:
    """Record one row of an arm."""
    with mock.patch.object(step_times, "measured_batches", lambda most: (most,)):
        llm = ready_engine(random, cell)
    try:
        requests = list(llm.engine.scheduler.live)
        before, began = [len(request.output_token_ids) for request in requests], time.time()
        rounds, _ = time_rounds(llm, requests, cell.steps)
        span = (began, time.time())
        if num_tokens(requests) >= sum(request.params.max_new_tokens for request in requests):
            raise RuntimeError("requests ended before the last step")
        counted = count(requests, before, cell.tables)
    finally:
        llm.close()
    ms = statistics.median(rounds)
    recorder.add("step", {
        "arm": cell.arm, "batch": cell.batch, "context": cell.context, "graphs": cell.has_graphs,
        "acceptance": "synthetic", "requests": " and ".join(f"{mean:g}" for mean in cell.means),
        "feature": cell.feature, "ms": ms, "least_ms": min(rounds), "most_ms": max(rounds), "rounds": rounds,
        "rows_per_request": counted.rows / cell.batch, "drawn_tokens_per_step": counted.tokens,
        "tokens_per_step": counted.scaled, "tokens_per_second": 1000 * counted.scaled / ms,
        **gauges.over([span]).fields(step=ms / 1000),
    })  # fmt: skip


def count(requests: Sequence[Request], before: Sequence[int], tables: KindTables) -> Counts:
    """Count the steps of requests after their first `before` output tokens.

    `Request.steps` leaves out steps of one row, which give one token each.
    """
    tokens, drawn, num_steps, rows = ([0.0] * len(tables.means) for _ in range(4))
    for request, first in zip(requests, before, strict=True):
        assert request.row is not None
        kind, steps = request.row % len(tables.means), {step.start: step for step in request.steps}
        start, starts = first, []
        while start < len(request.output_token_ids):
            starts.append(start)
            step = steps.get(start)
            rows[kind] += step.verify_width if step is not None else 1
            start += step.num_committed if step is not None else 1
        draws = tables.drawn(request.row, [request.params.max_new_tokens - start for start in starts])
        tokens[kind] += start - first
        drawn[kind] += sum(draws) + len(draws)
        num_steps[kind] += len(starts)
    share = len(requests) / sum(num_steps)
    scaled = [
        own * mean * steps / total
        for own, mean, steps, total in zip(tokens, tables.means, num_steps, drawn, strict=True)
    ]
    return Counts(share * sum(tokens), share * sum(scaled), share * sum(rows))


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows with their rate over whole blocks and over adaptive width; None if one of these is missing."""
    found = []
    for row in rows:
        rates = {
            item["arm"]: item["tokens_per_second"]
            for item in rows
            if (item["batch"], item["requests"]) == (row["batch"], row["requests"])
        }
        whole = [rates[arm] for arm in (WHOLE, AGAIN) if arm in rates]
        found.append({
            **row,
            "over_whole": row["tokens_per_second"] / statistics.fmean(whole) if whole else None,
            "over_width": row["tokens_per_second"] / rates[ADAPTIVE] if ADAPTIVE in rates else None,
        })  # fmt: skip
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser)
    parser.add_argument("--batches", type=counts, default="8,32,64")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--high", type=float, default=12, help="tokens per step of one half of the requests")
    parser.add_argument("--low", type=float, default=1.3, help="tokens per step of the other half")
    parser.add_argument("--one", type=float, default=4, help="tokens per step of requests of one kind")
    parser.add_argument("--most-one", type=int, default=8, help="largest batch with arms of one kind")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="write results as JSON lines")
    return parser.parse_args()


def main() -> int:
    options = parse()
    device = open_device(options.device)
    cells = cells_of(options, has_graphs=device.type == "cuda")
    random = build_pair(shape_of(options), max(cell.max_model_len for cell in cells), device)
    with ExitStack() as stack:
        recorder, gauges = stack.enter_context(Recorder(options.out, device)), stack.enter_context(Gauges(device))
        for cell in cells:
            facts = {"arm": cell.arm, "batch": cell.batch, "means": cell.means}
            recorder.guard(facts, partial(measure, random, cell, recorder, gauges))
        rows = compared(recorder.of("step"))
        print(table(tuple(COLUMNS), [[row[name] for name in COLUMNS.values()] for row in rows]))
    return 1 if recorder.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
