"""Time `dflash validate` for an 8B pair from headers alone, on one core.

    python examples/benchmarks/headers.py [--runs 20] [--limit 0.3] [--profile]

The pair has the shapes of Qwen3-8B (36 layers, 399 tensors in 5 shards, 16.4 GB) and of its b16 draft (5 layers, 58
tensors, 2.1 GB). The files are sparse: their headers are real, and their data takes no disk space. Our own time is the
time of the command minus the time of an interpreter that does nothing, the median of all runs but the first. Byte code
is kept between runs, as for an installed package, whatever the environment says.
"""

import argparse
import json
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.models.families.qwen3 import Qwen3Target
from timing.shape_configs import hf_config, hf_draft_config, model_configs
from timing.shapes import SHAPES

SHAPE, NUM_SHARDS = SHAPES["qwen3-8b"], 5


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file with a real header and sparse data."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def make_pair(home: Path) -> tuple[Path, Path]:
    """Write the checkpoints of target and draft."""
    draft, target = home / "Qwen3-8B-DFlash-b16", home / "Qwen3-8B"
    draft.mkdir()
    target.mkdir()
    target_config, draft_config = model_configs(SHAPE)
    (draft / "config.json").write_text(json.dumps(hf_draft_config(SHAPE) | {"is_causal": False}))
    write_sparse(draft / "model.safetensors", owned_shapes(draft_config))
    (target / "config.json").write_text(json.dumps(hf_config(SHAPE)))
    shapes = Qwen3Target.expected_shapes(target_config)
    weight_map: dict[str, str] = {}
    names = list(shapes)
    for shard in range(NUM_SHARDS):
        file = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        members = names[shard * len(names) // NUM_SHARDS : (shard + 1) * len(names) // NUM_SHARDS]
        write_sparse(target / file, {name: shapes[name] for name in members})
        weight_map |= dict.fromkeys(members, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return draft, target


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(home / "bytecode")}


def seconds(command: list[str], env: dict[str, str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--limit", type=float, help="exit with 3 if our own time is longer, in seconds")
    parser.add_argument("--profile", action="store_true", help="print the slowest imports instead")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as home:
        draft, target = make_pair(Path(home))
        env = environment(Path(home))
        arguments = ["-m", "dflash_cli", "validate", str(draft), "--target", str(target), "--engine", "vllm,sglang"]
        if options.profile:
            seconds([sys.executable, *arguments], env)
            command = [sys.executable, "-X", "importtime", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
            lines = [line.removeprefix("import time:") for line in done.stderr.splitlines() if "|" in line]
            print("\n".join(sorted(lines[1:], key=lambda line: int(line.split("|")[0]))[-25:]))
            return
        seconds([sys.executable, *arguments], env)
        whole = statistics.median(seconds([sys.executable, *arguments], env) for _ in range(options.runs))
        bare = statistics.median(seconds([sys.executable, "-c", "pass"], env) for _ in range(options.runs))
    own = whole - bare
    print(f"validate an 8B pair from headers: {whole:.3f} s, bare interpreter {bare:.3f} s, own time {own:.3f} s")
    if options.limit is not None and own > options.limit:
        sys.exit(3)


if __name__ == "__main__":
    main()
