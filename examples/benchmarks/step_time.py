"""Time decode steps and prefills at real shapes with random weights: our engine, device limits, other software.

    python3 examples/benchmarks/step_time.py [--shape qwen3-8b] [--batches 1,8,32] [--out steps.jsonl]
    python3 examples/benchmarks/step_time.py --acceptance 6.5,4.24 --arms ceilings,plain,dflash,adaptive
    python3 examples/benchmarks/step_time.py --acceptance 4 --arms drafts --blocks 8,16
    python3 examples/benchmarks/step_time.py --batches 1 --arms plain,plain-fp8,dflash,dflash-fp8,dflash-fp8-draft
    python3 examples/benchmarks/step_time.py --contexts 8192,32000 --arms plain,plain-kv-fp8,dflash,dflash-kv-fp8

A time is wall time per step of the real loop after prefill: scheduling, launches and commits included. Random weights
accept almost nothing, so a step commits about one token. `--acceptance` draws the number of accepted draft tokens
instead, and rows then say `synthetic`. The floor is the least time by formula at the rates measured here. Idle is wall
time minus the time in which a profiled step runs a kernel. Experts are the expected number of routed experts that the
rows of a step choose in a layer, and the part of the floor in which all layers read them. Rows are JSON lines, written
at once; tables come last. An arm that fails prints one line, the others continue, and the exit code is 1.

Watts and MHz are means over the measured steps. One `nvidia-smi` samples all arms of our engine and of vLLM. The joules
of a step are its seconds times the watts.

Arms: ceilings, plain, dflash, adaptive, prefill. Only on request: drafts (every kind of draft, measured in turns),
dflash-exact and dflash-at-once (ways of recurrent layers to run the rows of a block), transformers, reference (a loop
of drafting and verifying on transformers' modules), vllm-plain, vllm-dflash and vllm-adaptive (its adaptive
verification), in a subprocess, if vLLM can be imported. With an arm of vLLM or with `--pair`, one pair is written to
disk first, and both programs read its files. Both draw forced acceptance from the same distribution. In vLLM's mean, a
step counts once for every request in it, because answers of equal length take different numbers of steps.

Arms with weights in FP8, in blocks of 128: plain-fp8 and dflash-fp8 (the target's layers), dflash-fp8-draft (the draft
except q, k, v and the head), dflash-fp8-draft-all (all of the draft, with a head of its own), dflash-fp8-both (the
target's layers and the draft except q, k, v and the head). Arms with KV pages in FP8: plain-kv-fp8 and dflash-kv-fp8.
They have no floor.
"""

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from timing.arguments import add_shape_options, counts, open_device, run_dtype, shape_of
from timing.ceilings import measure_rates
from timing.draft_kinds import KINDS
from timing.engine_arms import RECURRENT_ROWS
from timing.fp8_arms import FP8_ARMS
from timing.gauges import Gauges
from timing.other_rows import measure_transformers, measure_vllm
from timing.own_rows import run_ours
from timing.pair_files import PAIR_HELP, written_pair
from timing.plan import OURS, Plan, title
from timing.report import Recorder, Row, plot_waterfalls, table, waterfall_text
from timing.vllm_arm import VLLM_ARMS, VllmRun, add_vllm_options, find_vllm, vllm_settings

STEP_COLUMNS = {
    "arm": "arm",
    "batch": "batch",
    "context": "context",
    "graphs": "graphs",
    "acceptance": "acceptance_achieved",
    "width": "verify_width",
    "ms": "ms",
    "floor": "floor_ms",
    "ratio": "ratio",
    "experts": "experts",
    "experts ms": "experts_ms",
    "idle ms": "idle_ms",
    "nodes": "nodes",
    "tokens/s": "tokens_per_second",
    "x plain": "gain",
    "W": "watts",
    "MHz": "mhz",
    "J/step": "joules_per_step",
}
"""Column of the last table -> field of a row."""

DRAFT_COLUMNS = {
    "draft": "arm",
    "block": "block",
    "batch": "batch",
    "acceptance": "acceptance_achieved",
    "ms": "ms",
    "least": "least_ms",
    "most": "most_ms",
    "ratio": "ratio",
    "lowest": "least_ratio",
    "highest": "most_ratio",
    "nodes": "nodes",
    "W": "watts",
    "MHz": "mhz",
    "J/step": "joules_per_step",
}
"""Column of the table of drafts -> field of a row. Least, most, lowest and highest are of the rounds."""

PREFILL_COLUMNS = {
    "prefill": "arm",
    "prompts": "prompts",
    "tokens": "tokens",
    "ms": "ms",
    "floor": "floor_ms",
    "W": "watts",
    "MHz": "mhz",
    "J": "joules_per_prefill",
}
"""Column of the table of prefills -> field of a row."""

RATIOS = ("ratio", "least_ratio", "most_ratio")

DEFAULT_ARMS = ("ceilings", *OURS, "prefill")
KNOWN_ARMS = (
    *DEFAULT_ARMS,
    "drafts",
    *RECURRENT_ROWS,
    *FP8_ARMS,
    "transformers",
    "reference",
    *VLLM_ARMS,
)


def run(plan: Plan) -> None:
    """Run all arms: ours first, then the device is freed for the others."""
    if any(arm in ("ceilings", "prefill", "drafts", *RECURRENT_ROWS, *OURS, *FP8_ARMS) for arm in plan.arms):
        plan.recorder.guard({"arm": "ours"}, partial(run_ours, plan))
    if "transformers" in plan.arms or "reference" in plan.arms:
        plan.recorder.guard({"arm": "transformers"}, partial(measure_transformers, plan))
    for arm in (item for item in VLLM_ARMS if item in plan.arms):
        for acceptance in [None] if arm == "vllm-plain" else plan.acceptances:
            plan.recorder.guard({"arm": arm}, partial(measure_vllm, plan, VllmRun(arm, acceptance)))


def show(plan: Plan, plot: Path | None) -> None:
    """Print waterfalls, then the tables."""
    rows = plan.recorder.of("step")
    falls = {title(row): row["waterfall"] for row in rows if "waterfall" in row}
    for name, levels in falls.items():
        print(waterfall_text(name, levels) + "\n")
    if plot is not None and falls:
        plot_waterfalls(plot, falls)
    failures = plan.recorder.of("failure")
    if failures:
        print(table(("failed", "why"), [_pick(row, ("what", "error")) for row in failures]) + "\n")
    prefills = plan.recorder.of("prefill")
    if prefills:
        print(table(tuple(PREFILL_COLUMNS), [_pick(row, tuple(PREFILL_COLUMNS.values())) for row in prefills]) + "\n")
    drafts = plan.recorder.of("draft")
    if drafts:
        shown = [{**row, **{name: f"{row[name]:.3f}" for name in RATIOS}} for row in drafts]
        print(table(tuple(DRAFT_COLUMNS), [_pick(row, tuple(DRAFT_COLUMNS.values())) for row in shown]) + "\n")
    rates = plan.rates
    print(f"copies {rates.bandwidth / 1e12:.2f} TB/s, large products {rates.operations / 1e12:.1f} T operations/s")
    if rows:
        print(table(tuple(STEP_COLUMNS), [_pick(row, tuple(STEP_COLUMNS.values())) for row in _against_plain(rows)]))


def _against_plain(rows: list[Row]) -> list[Row]:
    """Rows with `gain`, the factor over our plain decoding in tokens per second, if that was measured."""
    plain: dict[tuple[int, int], float] = {}
    for row in rows:
        if row["arm"] == "plain":  # with and without graphs: the row with graphs comes first
            plain.setdefault((row["batch"], row["context"]), row["tokens_per_second"])
    compared = []
    for row in rows:
        own = plain.get((row["batch"], row["context"]))
        compared.append({**row, "gain": row["tokens_per_second"] / own if own else None})
    return compared


def _pick(row: Row, names: tuple[str, ...]) -> list[object]:
    return [row.get(name) for name in names]


def _prefills(text: str) -> list[list[int]]:
    """Parse `2048,32x512`: one prompt of 2,048 tokens, and 32 of 512 together."""
    sets = (part.rpartition("x") for part in text.split(",") if part)
    return [[int(length)] * int(count or 1) for count, _, length in sets]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser)
    parser.add_argument("--batches", type=counts, default="1,8,32")
    parser.add_argument(
        "--context", "--contexts", type=counts, default="512", help="tokens of each prompt, such as 512,8192"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--arms", default=",".join(DEFAULT_ARMS))
    parser.add_argument(
        "--acceptance", help="force these mean acceptance lengths, such as 6.5,4.24; rows say synthetic"
    )
    parser.add_argument("--prefill", default="2048,16384,32x512", help="prompts of the prefill arm")
    parser.add_argument("--drafts", default="dflash,dflash2,dspark,dspark-anchor", help="kinds of the drafts arm")
    parser.add_argument("--blocks", type=counts, default="8,16", help="rows of a block of the drafts arm")
    parser.add_argument("--no-eager", action="store_true", help="time the captured steps only")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take the most time")
    parser.add_argument(
        "--device", default="cuda:0", help="device; cpu runs the loop with reference kernels, as a check"
    )
    add_vllm_options(parser)
    parser.add_argument("--pair", type=Path, help=PAIR_HELP)
    parser.add_argument("--plot", type=Path, help="draw the waterfalls to FILE.png")
    parser.add_argument("--out", type=Path, help="write results as JSON lines")
    return parser


def main() -> int:
    given = make_parser().parse_args()
    device = open_device(given.device)
    arms = given.arms.split(",")
    if unknown := sorted({*arms} - {*KNOWN_ARMS}):
        sys.exit(f"--arms {','.join(unknown)}: expected some of {', '.join(KNOWN_ARMS)}")
    kinds = given.drafts.split(",")
    if unknown := sorted({*kinds} - {*KINDS}):
        sys.exit(f"--drafts {','.join(unknown)}: expected some of {', '.join(KINDS)}")
    shape, vllm = shape_of(given), vllm_settings(given)
    if {*arms} & {*VLLM_ARMS} and not find_vllm(vllm.path):
        arms = [arm for arm in arms if arm not in VLLM_ARMS]
    rates = measure_rates(device, run_dtype(device))
    with ExitStack() as stack:
        recorder = stack.enter_context(Recorder(given.out, device))
        recorder.add("rates", {"arm": "device", "bandwidth": rates.bandwidth, "operations": rates.operations})
        has_files = given.pair is not None or {*arms} & {*VLLM_ARMS}
        plan = Plan(
            shape_name=given.shape, shape=shape, batches=given.batches, contexts=given.context,
            acceptances=[float(part) for part in given.acceptance.split(",")] if given.acceptance else [None],
            steps=given.steps, arms=arms, prefills=_prefills(given.prefill), has_eager=not given.no_eager,
            shows_kernels=given.profile, device=device, vllm=vllm,
            files=stack.enter_context(written_pair(shape, given.pair, device)) if has_files else None,
            recorder=recorder, gauges=stack.enter_context(Gauges(device)), rates=rates, kinds=kinds,
            blocks=given.blocks,
        )  # fmt: skip
        run(plan)
        show(plan, given.plot)
    return 1 if recorder.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
