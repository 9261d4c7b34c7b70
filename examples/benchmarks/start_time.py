"""Time the start of a pair (import, load, warm-up), and compare the memory kept for steps with the memory they take.

    python3 examples/benchmarks/start_time.py FOLDER [--shape qwen3-8b] [--max-num-requests 32] [--max-model-len 8192]
        [--plain]

Writes a pair with random weights into FOLDER if it is missing. Starts it in new processes: once with an empty Triton
cache, then twice with a full one. `read` is the time to read the same bytes from disk or file cache.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COLUMNS = ("import", "load", "read", "engine", "warm-up", "first", "total", "kept GiB", "taken GiB")


def write_pair(folder: Path, name: str) -> None:
    """Write a pair of the named shape, with small random matrices and norm weights of 1."""
    import torch
    from safetensors.torch import save_file

    from dflash_runtime.checkpoint.layout import owned_shapes
    from dflash_runtime.models.families.qwen3 import Qwen3Target
    from timing.shape_configs import hf_config, hf_draft_config, model_configs
    from timing.shapes import SHAPES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[name]
    target, draft = model_configs(shape)
    for role, config, tensor_shapes in (
        ("target", hf_config(shape), Qwen3Target.expected_shapes(target)),
        ("draft", hf_draft_config(shape) | {"is_causal": False}, owned_shapes(draft)),
    ):
        path = folder / role
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        tensors = {}
        for tensor_name, size in tensor_shapes.items():
            scale = 0.02 if len(size) > 1 else 0.0
            tensor = torch.randn(size, device=device, dtype=torch.bfloat16) * scale + (len(size) == 1)
            tensors[tensor_name] = tensor.cpu()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def read_files(folder: Path) -> None:
    """Read every byte of the weights in large pieces."""
    piece = memoryview(bytearray(2**24))
    for path in sorted(folder.glob("*/*.safetensors")):
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass


def measure(folder: Path, max_num_requests: int, max_model_len: int, *, is_plain: bool) -> dict[str, float]:
    """Start the pair, or its target alone, in this process -> seconds of each part, and GiB of memory."""
    seconds: dict[str, float] = {}
    begin = last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now

    import torch

    from dflash_cli import LLM, SamplingParams, load_pair, open_draft, open_target
    from dflash_runtime.device.capacity.memory import scratch_bytes
    from dflash_runtime.engine_config import EngineConfig

    lap("import")
    config = EngineConfig(max_num_requests=max_num_requests, max_model_len=max_model_len)
    draft = None if is_plain else open_draft(folder / "draft")
    pair = load_pair(open_target(folder / "target"), draft, config)
    lap("load")
    llm = LLM(pair)
    lap("engine")
    device = pair.placement.device
    before = free_bytes(device)
    llm.warm_up()
    lap("warm-up")
    taken = before - free_bytes(device)
    llm.generate([[1, 2, 3]] * max_num_requests, SamplingParams(max_new_tokens=2, ignore_eos=True))
    lap("first")
    seconds["total"] = last - begin
    read_files(folder)
    seconds["read"] = time.perf_counter() - last
    draft_config = pair.draft.config if pair.draft is not None else None
    kept = scratch_bytes(pair.config, pair.target.config, draft_config, pair.limits, pair.placement)
    graphs = llm.engine.runner.graphs
    print(f"graphs: {[bucket for bucket, _ in graphs.captured] if graphs else None}", file=sys.stderr)
    print(f"tokens in KV: {llm.engine.scheduler.pages.num_pages * config.page_size}; {llm.warnings}", file=sys.stderr)
    assert torch.isfinite(pair.target.embedding[:1]).all()
    return seconds | {"kept GiB": kept / 2**30, "taken GiB": taken / 2**30}


def free_bytes(device: Any) -> int:
    """Free bytes of a GPU; 0 on the CPU."""
    import torch

    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=("qwen3-8b", "qwen3-4b", "small"), default="qwen3-8b")
    parser.add_argument("--max-num-requests", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--plain", action="store_true", help="start the target without its draft")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        print(json.dumps(measure(given.folder, given.max_num_requests, given.max_model_len, is_plain=given.plain)))
        return
    if not (given.folder / "draft" / "model.safetensors").exists():
        write_pair(given.folder, given.shape)
    cache = given.folder / f"triton-{time.time_ns()}"
    rows = []
    for name in ("empty cache", "full cache", "again"):
        command = [sys.executable, __file__, *sys.argv[1:], "--child"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"TRITON_CACHE_DIR": str(cache)}
        )
        rows.append((name, json.loads(done.stdout.splitlines()[-1])))
    print(" " * 12, *(f"{column:>9}" for column in COLUMNS))
    for name, row in rows:
        print(f"{name:12}", *(f"{row[column]:9.2f}" for column in COLUMNS))


if __name__ == "__main__":
    main()
