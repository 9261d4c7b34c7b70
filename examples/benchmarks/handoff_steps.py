"""Time decode steps while the KV of other requests is loaded, and without loads.

    python3 examples/benchmarks/handoff_steps.py [--shape qwen3-8b] [--prompt-len 4096] [--batch 8] [--steps 200]

Hand-offs are in the memory of this process, so only the engine's work is timed: copying to the device on a separate
stream, writing rows into pages, switching the request on. Each loaded request decodes briefly, which makes steps
longer by itself. Steps are therefore grouped by the number of requests that they decode, and compared with steps of
the same engine before any load.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from timing.arguments import open_device
from timing.pairs import build_pair, random_prompt
from timing.shapes import SHAPES
from timing.step_kinds import StepKinds

NUM_WARM = 20
"""Warm-up steps before each part."""


class HeldHandoffs:
    """A connector that keeps hand-offs in the memory of this process and returns each any number of times."""

    name = "memory"
    takes_device = False

    def __init__(self) -> None:
        self.handoffs: dict[str, Handoff] = {}

    def save(self, handoff: Handoff) -> "Future[None]":
        self.handoffs[handoff.key] = handoff
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def load(self, key: str) -> "Future[Handoff]":
        future: Future[Handoff] = Future()
        future.set_result(self.handoffs[key])
        return future

    def refuse(self, key: str, reason: str) -> None:
        """Do nothing: this connector refuses no hand-off."""

    def is_wanted(self, key: str) -> bool:
        return False

    def close(self) -> None:
        self.handoffs.clear()


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt-len", type=int, default=4096, help="tokens of each prompt that is loaded")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode meanwhile")
    parser.add_argument("--steps", type=int, default=200, help="steps of each part")
    parser.add_argument("--out", type=Path, help="write all times as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    given = make_parser().parse_args(arguments)
    device, shape = open_device(given.device), SHAPES[given.shape]
    max_len = max(given.prompt_len + 64, 512 + 20 * (2 * given.steps + 4 * NUM_WARM))
    made = build_pair(shape, min(max_len, shape.positions), device).pair
    limits = replace(made.limits, max_num_requests=given.batch + 2, max_model_len=min(max_len, shape.positions))
    config = EngineConfig(max_num_requests=given.batch + 2, prefix_cache=False)
    llm = LLM(replace(made, limits=limits, config=config))
    generator = torch.Generator().manual_seed(1)
    prompt = random_prompt(shape, given.prompt_len, generator)
    connector = HeldHandoffs()
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    llm.generate([prompt], params, handoffs=HandoffPlan(connector=connector, keys=("0",), is_sending=True))
    llm.warm_up(max_requests=given.batch + 2)
    decoding = [random_prompt(shape, 512, generator) for _ in range(given.batch)]
    alone, beside, loads = measure(llm, decoding, prompt, connector, given.steps)
    num_bytes = connector.handoffs["0"].num_bytes
    print(table(alone, beside, loads, num_bytes, given))
    if given.out is not None:
        found = {"num_bytes": num_bytes, "alone": asdict(alone), "beside": asdict(beside), "loads": loads}
        given.out.write_text(json.dumps(found))


@dataclass
class StepsOf:
    """Milliseconds of steps, and the number of requests that each decodes."""

    ms: list[float]
    batch: list[int]

    def of(self, num_requests: int) -> list[float]:
        return [ms for ms, batch in zip(self.ms, self.batch, strict=True) if batch == num_requests]


def measure(
    llm: LLM, decoding: Sequence[tuple[int, ...]], prompt: tuple[int, ...], connector: HeldHandoffs, num_steps: int
) -> tuple[StepsOf, StepsOf, list[float]]:
    """Steps without loads, steps during loads, and milliseconds of each load from its request to its last token."""
    engine = llm.engine
    long = SamplingParams(max_new_tokens=llm.limits.max_model_len, ignore_eos=True)
    for index, item in enumerate(decoding):
        engine.add(Request(index=index, prompt_token_ids=item, params=long))
    plan = HandoffPlan(connector=connector, keys=("0",))
    engine.open_transfers(plan, llm.fingerprint)
    while any(not request.output_token_ids for request in engine.scheduler.live):
        engine.step()
    alone = _steps(llm, num_steps)
    loads: list[float] = []
    beside = _steps(llm, num_steps, plan, prompt, loads)
    engine.close_transfers()
    engine.abort()
    return alone, beside, loads


def _steps(
    llm: LLM,
    num_steps: int,
    plan: HandoffPlan | None = None,
    prompt: tuple[int, ...] = (),
    loads: list[float] | None = None,
) -> StepsOf:
    """Time steps. With a plan, one request is always being loaded."""
    loading: Request | None = None
    params, begun = SamplingParams(max_new_tokens=2, ignore_eos=True), 0.0
    ms: list[float] = []
    seen = StepKinds()
    with seen.watching(llm.engine.runner):
        for _ in range(NUM_WARM + num_steps):
            if plan is not None and loads is not None and (loading is None or loading.is_finished):
                if loading is not None:
                    loads.append(1000 * (time.perf_counter() - begun))
                loading = plan.apply(Request(index=0, prompt_token_ids=prompt, params=params))
                begun = time.perf_counter()
                llm.engine.add(loading)
            started = time.perf_counter()
            llm.engine.step()
            ms.append(1000 * (time.perf_counter() - started))
    # A call waits for the step that was queued `delay` calls earlier.
    delay = llm.engine.max_in_flight
    waited = seen.steps[NUM_WARM - delay : len(ms) - delay]
    return StepsOf(ms[NUM_WARM:], [step.num_decoding for step in waited])


def table(alone: StepsOf, beside: StepsOf, loads: Sequence[float], num_bytes: int, given: argparse.Namespace) -> str:
    """Means and tails. Steps during loads are grouped by the number of decoding requests."""
    usual = alone.of(given.batch)
    rows = [f"{given.prompt_len} tokens, {num_bytes / 2**20:.0f} MiB each; ms per step", _row("alone", usual)]
    for size in sorted(set(beside.batch)):
        name = f"beside loads, {size}"
        share = f"  mean / alone {statistics.mean(beside.of(size)) / statistics.mean(usual):.3f}"
        rows.append(_row(name, beside.of(size)) + (share if size == given.batch else ""))
    if loads:
        load = statistics.median(loads)
        rows.append(f"{len(loads)} loads, each {load:.1f} ms with its tokens, {num_bytes / load / 1e6:.1f} GB/s")
    return "\n".join(rows)


def _row(name: str, values: Sequence[float]) -> str:
    tail = sorted(values)[int(0.95 * len(values))]
    median, mean = statistics.median(values), statistics.mean(values)
    return f"{name:16} {len(values):4} steps  median {median:7.3f}  mean {mean:7.3f}  95 of 100 {tail:7.3f}"


if __name__ == "__main__":
    main()
