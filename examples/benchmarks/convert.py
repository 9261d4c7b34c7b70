"""Time a conversion against `cp` of the same weights, hashing apart, and measure its memory.

    python3 examples/benchmarks/convert.py [--gigabytes 10] [--repeats 5] [--directory DIR]

Writes a draft of that size with random bytes, so that the file is not sparse, then copies and converts it in turn. Copy
and conversion read from the page cache as far as it holds the file, and end before all data is on the disk. Medians of
interleaved runs are compared. The conversion runs in a new process, and its peak memory comes from that process's /proc
entry. getrusage is not used: for a child it starts with the memory of its parent.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.layout import body_shapes
from dflash_runtime.checkpoint.stored.safetensors_header import DTYPE_BYTES
from dflash_runtime.draft_config import DraftConfig
from timing.shape_configs import model_configs
from timing.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
PIECE = 64 * 1024 * 1024
BAR_SPEED, BAR_MEGABYTES = 0.8, 256

MEASURED = r"""
import json, re, sys
from pathlib import Path
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
source, out, to, verification = sys.argv[1:]
plan = plan_conversion(open_draft(Path(source)), ConversionSpec(to=to, verifier="acme/target"))
manifest = convert_draft(plan, Path(out), verification=verification)
peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps({**manifest.timings, "peak_megabytes": peak / 1024}))
"""


def draft_of(gigabytes: float) -> DraftConfig:
    """A draft of the 8B shape with enough layers for the size."""
    shape = SHAPES["qwen3-8b"]
    _, draft = model_configs(shape)

    def make(num_layers: int) -> DraftConfig:
        return replace(
            draft, num_layers=num_layers, causal=(False,) * num_layers, windows=(None,) * num_layers,
            num_target_layers=shape.layers, dtype="bfloat16",
        )  # fmt: skip

    sizes = [num_bytes(make(count)) for count in (1, 2)]
    return make(max(1, round((gigabytes * 1e9 - sizes[0]) / (sizes[1] - sizes[0])) + 1))


def num_bytes(config: DraftConfig) -> int:
    """Bytes of a draft's weights in bfloat16."""
    return sum(rows * columns * 2 for rows, columns in _matrices(config))


def _matrices(config: DraftConfig) -> list[tuple[int, int]]:
    shapes = body_shapes(config).values()
    return [(shape[0], shape[1] if len(shape) > 1 else 1) for shape in shapes]


def write_draft(path: Path, config: DraftConfig) -> None:
    """Write a native checkpoint with random bytes as weights."""
    from dflash_cli.formats.native import Native

    path.mkdir()
    (path / "config.json").write_text(json.dumps(Native().write_config(config, {})))
    entries: dict[str, Any] = {}
    position = 0
    for name, shape in body_shapes(config).items():
        size = int(DTYPE_BYTES["BF16"])
        for count in shape:
            size *= count
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        while position:
            piece = os.urandom(min(PIECE, position))
            stream.write(piece)
            position -= len(piece)


def copy(source: Path, out: Path) -> float:
    """Seconds of `cp` on the weights."""
    started = time.perf_counter()
    subprocess.run(["cp", str(source / "model.safetensors"), str(out)], check=True)
    return time.perf_counter() - started


def convert(source: Path, out: Path, to: str, verification: str) -> dict[str, float]:
    """The timings of one conversion and its peak memory."""
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "runtime", "kernels"))
    command = [sys.executable, "-c", MEASURED, str(source), str(out), to, verification]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Run copy and conversion in turn and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--directory", type=Path, default=None, help="folder for temporary files (default: the system's)"
    )
    parser.add_argument("--to", default="speculators", help="dialect, as for dflash convert")
    arguments = parser.parse_args()
    config = draft_of(arguments.gigabytes)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        home = Path(directory)
        write_draft(home / "source", config)
        os.sync()
        size = (home / "source" / "model.safetensors").stat().st_size
        copies, conversions = [], []
        for _ in range(arguments.repeats):
            copies.append(copy(home / "source", home / "copy"))
            (home / "copy").unlink()
            os.sync()
            conversions.append(convert(home / "source", home / "out", arguments.to, "none"))
            shutil.rmtree(home / "out")
            os.sync()
        verified = convert(home / "source", home / "out", arguments.to, "roundtrip")
    report(size, copies, conversions, verified)


def report(size: int, copies: list[float], conversions: list[dict[str, float]], verified: dict[str, float]) -> None:
    """Print the table."""
    copied = statistics.median(copies)
    converted = statistics.median(item["copy_s"] for item in conversions)
    hashed = statistics.median(item["hash_s"] for item in conversions)
    peak = max(item["peak_megabytes"] for item in [*conversions, verified])
    print(f"{size / 1e9:.2f} GB of weights, medians of {len(copies)} interleaved runs")
    print(f"cp                  {copied:8.2f} s  {size / copied / 1e9:6.2f} GB/s   {spread(copies)}")
    seconds = [item["copy_s"] for item in conversions]
    print(f"convert, copying    {converted:8.2f} s  {size / converted / 1e9:6.2f} GB/s   {spread(seconds)}")
    print(f"convert, hashing    {hashed:8.2f} s   source and result, apart")
    print(f"convert, round trip {verified['verify_s']:8.2f} s   apart")
    print(f"speed against cp    {copied / converted:8.2f}    bar {BAR_SPEED}")
    print(f"peak memory         {peak:8.0f} MB bar {BAR_MEGABYTES}")


def spread(seconds: list[float]) -> str:
    """Seconds of all runs, in ascending order."""
    return " ".join(f"{item:.2f}" for item in sorted(seconds))


if __name__ == "__main__":
    main()
