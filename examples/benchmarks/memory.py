"""Compare the memory that `dflash inspect --max-model-len` estimates with the memory that an engine takes on a GPU.

    python3 examples/benchmarks/memory.py [--shape qwen3-8b] [--runs 8x4096,32x2048] [--pair DIR] [--out FILE]

A run is the number of requests and the longest text. The pair is written to disk and loaded as the commands of
`dflash` do. The engine captures its steps, and all requests run at once, each with a prompt near the longest text.
"allocated" and "reserved" are the most bytes of PyTorch's allocator. "device" is everything that this process added to
the GPU's memory, with CUDA's own context and graphs. The last column divides "device" by the estimate.
"""

import argparse
import random
import sys
from functools import partial
from pathlib import Path

import torch

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_runtime.device.capacity.memory_estimate import estimate_memory, plan_for_gpu
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from timing.arguments import add_shape_options, open_device, shape_of
from timing.pair_files import PAIR_HELP, written_pair
from timing.report import Recorder, Row, release, table

ANSWER = 64
COLUMNS = ("requests", "length", "estimate", "allocated", "reserved", "device", "device_over_estimate")


def run_of(text: str) -> tuple[int, int]:
    """Parse `8x4096`."""
    requests, length = text.split("x")
    return int(requests), int(length)


def runs(text: str) -> list[tuple[int, int]]:
    return [run_of(part) for part in text.split(",")]


def measure(folder: Path, num_requests: int, length: int, device: torch.device, recorder: Recorder) -> None:
    """Record one run: bytes in GiB."""
    target, draft = open_target(folder / "target"), open_draft(folder / "draft")
    config = EngineConfig(device=str(device), max_model_len=length, max_num_requests=num_requests)
    plan = plan_for_gpu(target, draft, config)
    estimate = estimate_memory(plan, draft="draft", target="target")
    # The engine gets a pool of the estimated size. Without a size it would take all memory that is free.
    config = EngineConfig(
        device=str(device), max_model_len=length, max_num_requests=num_requests,
        kv_memory_bytes=estimate.parts["kv_pages"] + estimate.parts["snapshots"],
    )  # fmt: skip
    release()
    torch.cuda.reset_peak_memory_stats(device)
    free = torch.cuda.mem_get_info(device)[0]
    llm = LLM(target, draft, config)
    params = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    llm.warm_up([params])
    generator = random.Random(0)
    room = length - ANSWER - 32
    prompts = [[generator.randrange(1000, 100_000) for _ in range(room)] for _ in range(num_requests)]
    llm.generate(prompts, params)
    taken: Row = {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "device": free - torch.cuda.mem_get_info(device)[0],
    }
    in_gib = {name: value / 2**30 for name, value in {"estimate": estimate.total_bytes, **taken}.items()}
    recorder.add("memory", {
        "requests": num_requests, "length": length, **in_gib, "parts": dict(estimate.parts),
        "device_over_estimate": taken["device"] / estimate.total_bytes,
    })  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=runs, default="8x4096,32x2048")
    parser.add_argument("--device", default="cuda:0")
    add_shape_options(parser)
    parser.add_argument("--pair", type=Path, help=PAIR_HELP)
    parser.add_argument("--out", type=Path, help="write results as JSON lines")
    given = parser.parse_args()
    device = open_device(given.device)
    torch.empty(1, device=device)  # CUDA's context is not memory of the engine
    with written_pair(shape_of(given), given.pair, device) as folder, Recorder(given.out, device) as recorder:
        release()
        for requests, length in given.runs:
            what = {"requests": requests, "length": length}
            recorder.guard(what, partial(measure, folder, requests, length, device, recorder))
    print(table(COLUMNS, [[row[name] for name in COLUMNS] for row in recorder.of("memory")]))
    return 1 if recorder.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
