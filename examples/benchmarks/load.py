"""Time a mixed offline load: many requests of different lengths arrive at once and are all answered.

    python3 examples/benchmarks/load.py [--arms plain,dflash,adaptive] [--acceptance 6.5] [--out load.jsonl]
    python3 examples/benchmarks/load.py --arms plain,adaptive,vllm-plain,vllm-adaptive --acceptance 6.5

Weights are random with a real shape. Prompts have 64 to 4,096 tokens (log-uniform) and answers 32 to 512 (uniform), the
same in every arm. An untimed run comes first and passes through all batch sizes, so that kernels are compiled and
graphs captured, and adaptive widths learn. It is the same in both programs. Random weights accept almost nothing.
`--acceptance` forces a mean, and rows then say `synthetic`; vLLM's own synthetic mode draws from the same distribution.
With an arm of vLLM or with `--pair`, one pair is written to disk first, and both programs read its files. Watts and MHz
are means of one `nvidia-smi` that samples every arm of both programs, over the timed run alone. Times to the first
token count from the start, when all requests arrive. Rows are JSON lines; the table comes last. An arm that fails
prints one line, the others continue, and the exit code is 1. With `--steps` our arms run the load once more, and a
table shows the time of each kind of step.
"""

import argparse
import math
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from dflash_cli.terminal.progress import Meter
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from timing.arguments import add_shape_options, open_device, shape_of
from timing.engine_arms import engine_pair, wait, why_not_adaptive
from timing.gauges import Gauges
from timing.pair_files import PAIR_HELP, read_pair, written_pair
from timing.pairs import RandomPair, build_pair, log_uniform, random_prompt
from timing.report import Recorder, Row, release, say, table
from timing.shapes import BLOCK, Shape
from timing.step_kinds import StepKinds
from timing.vllm_arm import VLLM_ARMS, VllmRun, add_vllm_options, find_vllm, run_vllm, vllm_settings

ARMS = ("plain", "dflash", "adaptive", *VLLM_ARMS)
SHORTEST_PROMPT, SHORTEST_ANSWER = 64, 32
COLUMNS = (
    "arm", "acceptance", "tokens/s", "seconds", "first token p50 s", "p95 s", "step p50 ms", "p95 ms", "p99 ms",
    "steps", "preemptions", "W", "MHz", "J/step", "J/token", "peak GB",
)  # fmt: skip
KIND_FIELDS = (
    "requests", "prompt_rows", "steps", "mean_block_rows", "mean_prompt_rows", "device_ms", "host_ms", "seconds",
)  # fmt: skip
KIND_COLUMNS = ("requests", "prompt rows", "steps", "rows of blocks", "of prompts", "ms", "host ms", "seconds")


@dataclass(frozen=True)
class Load:
    """Prompts, and the number of answer tokens of each."""

    prompts: list[tuple[int, ...]]
    output_lengths: list[int]

    @property
    def longest(self) -> int:
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lengths, strict=True))

    def requests(self) -> list[Request]:
        return [
            Request(index=index, prompt_token_ids=prompt, params=SamplingParams(max_new_tokens=length, ignore_eos=True))
            for index, (prompt, length) in enumerate(zip(self.prompts, self.output_lengths, strict=True))
        ]


def make_load(shape: Shape, num_requests: int, max_prompt: int, max_answer: int) -> Load:
    """A seeded load, the same in every run and every arm."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.rand(2, num_requests, generator=generator, dtype=torch.float64)
    prompts = log_uniform(levels[0], min(SHORTEST_PROMPT, max_prompt), max_prompt)
    answers = [round(SHORTEST_ANSWER + level * max(0, max_answer - SHORTEST_ANSWER)) for level in levels[1].tolist()]
    return Load([random_prompt(shape, length, generator) for length in prompts], answers)


def warm_load(load: Load, num_running: int, tokens_per_step: float) -> Load:
    """`num_running` requests with answers that end one after another, so that every batch size occurs."""
    prompts = load.prompts[:num_running]
    return Load(prompts, [BLOCK + round(1.5 * tokens_per_step * index) for index in range(len(prompts))])


def tokens_per_step(arm: str, acceptance: float | None) -> float:
    """Mean number of tokens that a request gets in a step, if it is forced; else 1."""
    return 1.0 if arm.endswith("plain") else acceptance or 1.0


@dataclass
class Run:
    """Measurements of one run of a load. `began` is the wall clock at its start."""

    began: float
    seconds: float
    num_steps: int
    first_token_s: list[float]
    num_tokens: int
    acceptance: float | None
    step_ms: list[float]  # between the ends of one step and the next, on the host

    @property
    def step_percentiles(self) -> dict[str, float]:
        """Median, 95th and 99th percentile of step times."""
        ordered = sorted(self.step_ms)
        return {f"step_p{percent}_ms": at_percentile(ordered, percent) for percent in (50, 95, 99)}


def at_percentile(ordered: Sequence[float], percent: int) -> float:
    """The percentile of sorted values: `percent` of them are at most as large."""
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1]


def run_load(llm: LLM, load: Load, title: str) -> Run:
    """Queue all requests and step until all are answered."""
    requests, first = load.requests(), dict[int, float]()
    engine, num_ended = llm.engine, 0
    wait(llm.device)
    with Meter(len(requests), title) as meter:
        began, started = time.time(), time.perf_counter()
        ends = [started]
        for request in requests:
            engine.add(request)
        while engine.scheduler.has_work:
            for committed in engine.step():
                if committed.token_ids:
                    first.setdefault(committed.request.index, time.perf_counter() - started)
                num_ended += committed.request.is_finished
            ends.append(time.perf_counter())
            meter.update(num_ended)
        seconds = time.perf_counter() - started
    failed = next((request.error for request in requests if request.error is not None), None)
    if failed is not None:
        raise failed
    num_tokens = sum(len(request.output_token_ids) for request in requests)
    counts = [step.num_accepted + 1 for request in requests for step in request.steps]
    step_ms = [(end - begin) * 1000 for begin, end in pairwise(ends)]
    acceptance = statistics.fmean(counts) if counts else None
    return Run(began, seconds, len(step_ms), list(first.values()), num_tokens, acceptance, step_ms)


def measure_ours(
    random: RandomPair, arm: str, load: Load, acceptance: float | None, num_running: int, *, has_steps: bool
) -> Row:
    """Measure one of our arms with the default memory settings."""
    pair = engine_pair(
        random, arm, acceptance, max_num_requests=num_running, prefix_cache=False,
        max_model_len=random.pair.limits.max_model_len,
    )  # fmt: skip
    is_cuda = pair.placement.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(pair.placement.device)
    with LLM(pair) as llm:
        llm.warm_up()
        run_load(llm, warm_load(load, num_running, tokens_per_step(arm, acceptance)), f"{arm}: warm-up requests")
        before = llm.engine.scheduler.num_preemptions
        run = run_load(llm, load, f"{arm}: requests")
        num_preemptions = llm.engine.scheduler.num_preemptions - before
        kinds = StepKinds()
        if has_steps:
            with kinds.watching(llm.engine.runner):
                run_load(llm, load, f"{arm}: requests, every step timed")
            wait(llm.device)
    peak = torch.cuda.max_memory_reserved() if is_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": run.seconds, "num_tokens": run.num_tokens, "tokens_per_second": run.num_tokens / run.seconds,
        "first_token_s": run.first_token_s, "num_steps": run.num_steps, "num_preemptions": num_preemptions,
        "peak_memory_bytes": peak, "acceptance_achieved": run.acceptance,
        "num_pages": llm.engine.scheduler.pages.num_pages, "spans": [(run.began, run.began + run.seconds)],
        "kinds": kinds.rows(), **run.step_percentiles,
    }  # fmt: skip


def measure_vllm(shape: Shape, run: VllmRun, load: Load, files: Path, given: argparse.Namespace) -> Row:
    """Start vLLM and measure the same load after the same warm-up."""
    warm = warm_load(load, given.max_num_requests, tokens_per_step(run.arm, run.acceptance))
    cell: Row = {
        "kind": "load", "prompts": load.prompts, "output_lengths": load.output_lengths,
        "warm_prompts": warm.prompts, "warm_output_lengths": warm.output_lengths,
    }  # fmt: skip
    say(f"{run.arm}: starting")
    (found,) = run_vllm(
        shape, [cell], run, vllm_settings(given), files=files, max_model_len=load.longest + 4 * BLOCK,
        max_num_requests=given.max_num_requests,
    )  # fmt: skip
    if "error" in found:
        raise RuntimeError(found["error"])
    return {**found, "kind": "load", "acceptance_note": run.acceptance_note}


def add_row(
    recorder: Recorder, gauges: Gauges, arm: str, files: Path | None, found: Row, given: argparse.Namespace
) -> None:
    """Add the common fields to a row, record it and print a line."""
    first, steps, tokens, seconds = (found[key] for key in ("first_token_s", "num_steps", "num_tokens", "seconds"))
    first = sorted(first)
    is_forced = given.acceptance is not None and "plain" not in arm
    row = {
        **found, "arm": arm, "shape": given.shape, "block": given.block, "requests": given.requests,
        "files": None if files is None else str(files), "max_num_requests": given.max_num_requests,
        "prompt_lengths": [SHORTEST_PROMPT, given.max_prompt], "answer_lengths": [SHORTEST_ANSWER, given.max_answer],
        "acceptance": "synthetic" if is_forced else "real", "acceptance_asked": given.acceptance if is_forced else None,
        "first_token_p50_s": statistics.median(first) if first else None,
        "first_token_p95_s": at_percentile(first, 95) if first else None,
        **gauges.over(found["spans"]).fields(step=seconds / steps if steps else None, token=seconds / tokens),
    }  # fmt: skip
    recorder.add("load", row)
    say(f"{arm}: {row['tokens_per_second']:.0f} tokens/s, {row['seconds']:.1f} s")


def show(recorder: Recorder) -> None:
    names = (
        "arm", "acceptance_achieved", "tokens_per_second", "seconds", "first_token_p50_s", "first_token_p95_s",
        "step_p50_ms", "step_p95_ms", "step_p99_ms", "num_steps", "num_preemptions", "watts", "mhz", "joules_per_step",
        "joules_per_token",
    )  # fmt: skip
    failures = [(row["what"], row["error"]) for row in recorder.of("failure")]
    if failures:
        print(table(("failed", "why"), failures) + "\n")
    rows = [
        (*(row.get(name) for name in names), row["peak_memory_bytes"] / 1e9 if row["peak_memory_bytes"] else None)
        for row in recorder.of("load")
    ]
    print(table(COLUMNS, rows))
    for row in recorder.of("load"):
        kinds = [[kind[name] for name in KIND_FIELDS] for kind in row.get("kinds", ())]
        if kinds:
            print(f"\n{row['arm']}\n{table(KIND_COLUMNS, kinds)}")


def run_arms(
    recorder: Recorder, gauges: Gauges, arms: Sequence[str], files: Path | None, given: argparse.Namespace,
    device: torch.device,
) -> None:  # fmt: skip
    """Run our arms on one pair of models, free the device, then run vLLM's arms on the same files."""
    shape = shape_of(given)
    load = make_load(shape, given.requests, given.max_prompt, given.max_answer)
    ours = [arm for arm in arms if arm not in VLLM_ARMS]
    why_not = why_not_adaptive(device)
    if "adaptive" in ours and why_not:
        say(f"adaptive: skipped, {why_not}")
        ours.remove("adaptive")
    random, max_model_len = None, load.longest + 4 * BLOCK
    if ours and files is None:
        random = build_pair(shape, max_model_len, device)
    elif ours and files is not None:
        random = read_pair(shape, files, max_model_len, device)
    for arm in ours:

        def measure(arm: str = arm) -> None:
            assert random is not None
            found = measure_ours(random, arm, load, given.acceptance, given.max_num_requests, has_steps=given.steps)
            add_row(recorder, gauges, arm, files, found, given)

        recorder.guard({"arm": arm}, measure)
    random = None
    release()
    for arm in (item for item in arms if item in VLLM_ARMS):

        def measure_theirs(arm: str = arm) -> None:
            assert files is not None
            found = measure_vllm(shape, VllmRun(arm, given.acceptance), load, files, given)
            add_row(recorder, gauges, arm, files, found, given)

        recorder.guard({"arm": arm}, measure_theirs)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_options(parser)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-prompt", type=int, default=4096)
    parser.add_argument("--max-answer", type=int, default=512)
    parser.add_argument("--max-num-requests", type=int, default=64, help="requests that run at a time")
    parser.add_argument("--arms", default="plain,dflash,adaptive")
    parser.add_argument("--acceptance", type=float, help="force this mean acceptance length; rows say synthetic")
    parser.add_argument("--steps", action="store_true", help="time each kind of step in another run")
    parser.add_argument("--device", default="cuda:0")
    add_vllm_options(parser)
    parser.add_argument("--pair", type=Path, help=PAIR_HELP)
    parser.add_argument("--out", type=Path, help="write results as JSON lines")
    return parser


def main() -> int:
    given = make_parser().parse_args()
    device = open_device(given.device)
    arms = given.arms.split(",")
    if unknown := sorted({*arms} - {*ARMS}):
        sys.exit(f"--arms {','.join(unknown)}: expected some of {', '.join(ARMS)}")
    if {*arms} & {*VLLM_ARMS} and not find_vllm(given.vllm_path):
        arms = [arm for arm in arms if arm not in VLLM_ARMS]
    has_files = given.pair is not None or {*arms} & {*VLLM_ARMS}
    with ExitStack() as stack:
        recorder = stack.enter_context(Recorder(given.out, device))
        files = stack.enter_context(written_pair(shape_of(given), given.pair, device)) if has_files else None
        run_arms(recorder, stack.enter_context(Gauges(device)), arms, files, given, device)
        show(recorder)
    return 1 if recorder.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
