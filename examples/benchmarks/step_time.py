"""Time the engine's decode steps at real shapes with random weights: plain and DFlash, with CUDA graphs and without.

    python3 examples/benchmarks/step_time.py [--shape qwen3-8b] [--batches 1,8,32] [--out steps.jsonl]

Needs a CUDA device. A time is wall time of the real loop a step, after the prompts are in: scheduling, launches and
commits included. Random weights accept next to nothing, so a step commits about one token. `--profile` prints where the
device's time goes in one step.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_kernels.suite import triton_kernels
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.config import DraftConfig, EngineConfig, RopeConfig, TargetConfig
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.llm import LLM
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.qwen3 import Qwen3Target
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.request import Request, SamplingParams

DEVICE = torch.device("cuda:0")
BLOCK = 16
WARM_STEPS = 8
ROUNDS = 5


@dataclass(frozen=True)
class Shape:
    """Sizes of a target; its draft has five layers of the same kind."""

    hidden: int
    inner: int
    layers: int
    heads: int
    taps: tuple[int, ...]
    is_tied: bool


SHAPES = {
    "qwen3-8b": Shape(4096, 12288, 36, 32, (1, 9, 17, 25, 33), is_tied=False),
    "qwen3-4b": Shape(2560, 9728, 36, 32, (1, 9, 17, 25, 33), is_tied=True),
    "small": Shape(512, 1024, 4, 8, (0, 2), is_tied=True),
}


def normal_weights(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Random matrices and norms of one, made on the device."""
    for name, shape in shapes.items():
        scale = 0.02 if len(shape) > 1 else 0.0
        yield name, torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * scale + (len(shape) == 1)


def build_pair(shape: Shape, max_model_len: int) -> LoadedPair:
    """A pair with random weights on the GPU."""
    common: dict[str, Any] = {
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_heads": shape.heads, "num_kv_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope": RopeConfig(theta=1e6),
        "vocab_size": 151936,
    }  # fmt: skip
    target_config = TargetConfig(
        model_type="qwen3", num_layers=shape.layers, tie_word_embeddings=shape.is_tied,
        windows=(None,) * shape.layers, eos_token_ids=(), **common,
    )  # fmt: skip
    draft_config = DraftConfig(
        num_layers=5, block_size=BLOCK, target_layer_ids=shape.taps, mask_token_id=151669, draft_vocab_size=151936,
        causal=(False,) * 5, windows=(None,) * 5, **common,
    )  # fmt: skip
    placement = Placement(DEVICE, torch.bfloat16, triton_kernels(), max_model_len + BLOCK)
    target_weights = stack_projections(normal_weights(Qwen3Target.expected_shapes(target_config)))
    target = Qwen3Target(target_config, target_weights, placement)
    draft = DFlashDraft(draft_config, stack_projections(normal_weights(owned_shapes(draft_config))), target, placement)
    limits = Limits(
        num_draft_tokens=BLOCK - 1, max_model_len=max_model_len, max_num_requests=1, vocab_size=151936,
        max_batched_tokens=2048,
    )  # fmt: skip
    return LoadedPair(target=target, draft=draft, placement=placement, limits=limits, config=EngineConfig())


def ready_engine(pair: LoadedPair, batch: int, context: int, steps: int, *, has_graphs: bool) -> LLM:
    """An engine whose requests have all been prefilled and decode, kernels compiled and graphs captured."""
    num_tokens = context + (steps + WARM_STEPS) * BLOCK + 64
    pages = batch * -(-num_tokens // 16) + 1
    config = EngineConfig(max_num_requests=batch, num_pages=pages, prefix_cache=False, graphs=has_graphs)
    llm = LLM(replace(pair, config=config, limits=replace(pair.limits, max_num_requests=batch)))
    generator = torch.Generator().manual_seed(batch)
    params = SamplingParams(max_new_tokens=num_tokens - context - 64, ignore_eos=True)
    for index in range(batch):
        prompt = torch.randint(1000, 150000, (context,), generator=generator).tolist()
        llm.engine.add(Request(index=index, prompt_token_ids=tuple(prompt), params=params))
    requests = llm.engine.scheduler.live
    while any(len(request.output_token_ids) < WARM_STEPS for request in requests):
        llm.engine.step()
    return llm


def step_ms(llm: LLM, steps: int) -> list[float]:
    """Milliseconds a step, of each round."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps // ROUNDS):
            llm.engine.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1000 / (steps // ROUNDS))
    return times


def profile(llm: LLM, steps: int = 10) -> None:
    """Where the device's time goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            llm.engine.step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda item: -item.self_device_time_total)
    launches = sum(item.count for item in rows) / steps
    busy = sum(item.self_device_time_total for item in rows) / steps / 1000
    print(f"  busy {busy:.2f} ms in {launches:.0f} launches a step")
    for item in rows[:22]:
        share = item.self_device_time_total / steps
        print(f"  {share:8.1f} us {item.count / steps:6.1f} x  {item.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--arms", default="dflash,plain")
    parser.add_argument("--no-eager", action="store_true", help="time the captured steps only")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="results as JSON Lines")
    given = parser.parse_args()
    max_model_len = given.context + (given.steps + WARM_STEPS) * BLOCK + 256
    pair = build_pair(SHAPES[given.shape], max_model_len)
    rows = []
    for arm in given.arms.split(","):
        chosen = pair if arm == "dflash" else pair.without_draft()
        for batch in map(int, given.batches.split(",")):
            for has_graphs in (True,) if given.no_eager else (True, False):
                llm = ready_engine(chosen, batch, given.context, given.steps, has_graphs=has_graphs)
                times = step_ms(llm, given.steps)
                row = {
                    "shape": given.shape, "arm": arm, "batch": batch, "context": given.context, "graphs": has_graphs,
                    "ms": statistics.median(times), "rounds": times, "device": torch.cuda.get_device_name(DEVICE),
                    "torch": torch.__version__,
                }  # fmt: skip
                rows.append(row)
                print(f"{arm:6} batch {batch:3} graphs {has_graphs!s:5} {row['ms']:.2f} ms a step", flush=True)
                if given.profile and has_graphs:
                    profile(llm)
                llm.close()
                del llm
                torch.cuda.empty_cache()
    if given.out is not None:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
