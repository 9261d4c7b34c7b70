"""Time the steps of every candidate of `dflash tune` at a real shape with random weights, for `--step-times`.

    python3 examples/benchmarks/tune_times.py [--shape qwen3-8b] [--batches 1,8,32] [--out step-times.json]

The time of a step depends on shapes, not on acceptance, so the file serves any draft of the shape on the same GPU.
Random weights accept almost nothing: a step commits about one token.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from dflash_cli.documents.atomic_file import json_line
from dflash_cli.generation.loaded_pair import device_name
from dflash_cli.tuning.candidates import candidates_for, default_numbers
from dflash_cli.tuning.speed import SpeedRequest
from dflash_cli.tuning.step_timing import measure_step_costs, num_timed_rounds
from dflash_runtime.engine_config import EngineConfig
from timing.arguments import counts, open_device
from timing.pairs import build_pair, random_prompt
from timing.shapes import BLOCK, SHAPES


def main() -> int:
    options = parse()
    device, shape = open_device(options.device), SHAPES[options.shape]
    max_model_len = options.context + options.steps + 4 * BLOCK
    config = EngineConfig(device=str(device), max_model_len=max_model_len)
    pair = replace(build_pair(shape, max_model_len, device).pair, config=config)
    generator = torch.Generator().manual_seed(0)
    prompts = [random_prompt(shape, options.context, generator) for _ in range(max(options.batches))]
    request = SpeedRequest(
        prompts=prompts, batches=options.batches, max_new_tokens=options.steps, num_rounds=options.rounds
    )
    candidates = candidates_for(default_numbers(BLOCK - 1), BLOCK - 1)
    total = num_timed_rounds(candidates, request)
    costs = measure_step_costs(
        pair, candidates, request, config, lambda done: print(f"{done} of {total} rounds", end="\r", file=sys.stderr)
    )
    source = f"{options.shape} shape, {options.context} tokens of context, {device_name(device)}"
    options.out.write_text(json_line(replace(costs.times, source=source)))
    print(f"{options.out}: milliseconds per step of {source}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--batches", type=counts, default="1,8,32")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("step-times.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
