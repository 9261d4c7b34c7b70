"""Time decode steps of a target split over several GPUs, beside one GPU, at real shapes with random weights.

    python3 examples/benchmarks/tensor_parallel.py [--shape qwen3-8b] [--ranks 2] [--batches 1,8] [--out steps.jsonl]
    python3 examples/benchmarks/tensor_parallel.py --all-reduce one-shot --arms plain --sums

The command starts one process per GPU. First the whole pair is timed on GPU 0, then its shares on all GPUs, with each
way of adding up their parts (`--all-reduce`). All have the same weights, made on the devices. A time is wall time per
step of the real loop after prefill. The ratio is this time over the time of one GPU. `--sums` also times sums, alone
and with the norm after them, 64 in a CUDA graph. Rows are JSON lines, written at once; the table comes last. The exit
code is 1 if an arm failed.
"""

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash_kernels.suite import triton_kernels
from dflash_runtime.errors import DFlashError, PeerUnreachable
from dflash_runtime.models.layers import RMSNorm
from dflash_runtime.ranks.exchanges import NcclExchange, connect_store, join, open_store
from dflash_runtime.ranks.rank_group import Ranks
from timing.arguments import counts, open_device
from timing.engine_arms import Cell, measure_steps
from timing.pairs import RandomPair, build_pair
from timing.report import Recorder, release, say, table
from timing.shapes import BLOCK, SHAPES

WAYS = ("one-shot", "nccl")
ARMS = ("plain", "dflash")
NUM_SUMS = 64
COLUMNS = ("arm", "batch", "all_reduce", "ms", "one_gpu_ms", "ratio", "tokens_per_second")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs that share the target")
    parser.add_argument("--batches", type=counts, default="1,8")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--all-reduce", default=",".join(WAYS), help="ways to add up parts, in this order")
    parser.add_argument("--sums", action="store_true", help="time sums and norms alone, too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs gloo, as a check")
    parser.add_argument("--out", type=Path, help="write results as JSON lines")
    parser.add_argument("--profile", action="store_true", help="print the time of each kind of kernel on GPU 0")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def cells_of(given: argparse.Namespace) -> list[Cell]:
    """The cells of one pair, with graphs on a GPU."""
    has_graphs = given.device == "cuda"
    return [
        Cell(arm, batch, given.context, given.steps, None, has_graphs)
        for batch in given.batches for arm in given.arms.split(",")
    ]  # fmt: skip


def measure(given: argparse.Namespace, random: RandomPair, recorder: Recorder, way: str) -> None:
    """Time every cell of a pair. All ranks call this together."""
    ones = {(row["arm"], row["batch"]): row["ms"] for row in recorder.of("step") if row["all_reduce"] == "one GPU"}
    for cell in cells_of(given):
        times = measure_steps(random, cell, has_profile=given.profile)
        own = ones.get((cell.arm, cell.batch))
        row = {
            "arm": cell.arm, "batch": cell.batch, "context": cell.context, "shape": given.shape, "all_reduce": way,
            "ranks": random.pair.placement.ranks.size, "ms": times.ms, "rounds": times.rounds, "one_gpu_ms": own,
            "ratio": times.ms / own if own else None, "tokens_per_second": times.tokens_per_second,
        }  # fmt: skip
        if times.account is not None:
            row |= {"busy_ms": times.account.busy_ms, "kernels_us": dict(times.account.kinds_us)}
        recorder.add("step", row)
        release()
        if not given.rank:
            say(f"{cell.arm} batch {cell.batch}, {way}: {times.ms:.3f} ms per step")
            for kind, us in row.get("kernels_us", {}).items():
                say(f"  {us:9.1f} us  {kind}")


def time_sums(ranks: Ranks, device: torch.device, hidden: int, recorder: Recorder, way: str) -> None:
    """Time sums of [parts, rows, hidden], alone and with the norm after them, captured in a graph."""
    wide, narrow = torch.float32, torch.bfloat16
    norm = RMSNorm(torch.ones(hidden, dtype=narrow, device=device), 1e-6, triton_kernels())
    for num_parts, num_rows, dtype in ((1, 1, narrow), (4, 1, wide), (4, 16, wide), (1, 16, narrow), (1, 128, narrow)):
        numbers = torch.zeros((num_parts, num_rows, hidden), dtype=dtype, device=device)  # repeated sums stay finite
        residual = numbers[0].to(narrow)
        num_bytes = numbers.numel() * numbers.element_size()
        for arm, call in (
            ("sum", partial(ranks.total, numbers)),
            ("sum and norm", partial(norm.add, numbers, residual, ranks)),
        ):
            us = time_in_graph(call, device)
            recorder.add("sum", {"arm": arm, "all_reduce": way, "bytes": num_bytes, "us": us})
            if not ranks.rank:
                say(f"{arm} of {num_bytes} bytes, {way}: {us:.2f} us")


def time_in_graph(call: Callable[[], object], device: torch.device) -> float:
    """The time of a call in us, in a graph of many."""
    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_SUMS):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 100 / NUM_SUMS


def run_shares(
    given: argparse.Namespace, ranks: Ranks, exchange: Any, device: torch.device, recorder: Recorder
) -> None:
    """Time the shares of all ranks with each way to add up parts."""
    random = build_pair(SHAPES[given.shape], max_len(given), device, ranks)
    fast = exchange.one_shot if isinstance(exchange, NcclExchange) else None
    for way in given.all_reduce.split(",") if device.type == "cuda" else ["gloo"]:
        if way == "one-shot" and fast is None:
            say(f"rank {ranks.rank}: one-shot skipped, these GPUs cannot do it")
            continue
        if device.type == "cuda":
            exchange.one_shot = fast if way == "one-shot" else None
            if given.sums:
                time_sums(ranks, device, SHAPES[given.shape].hidden, recorder, way)
        measure(given, random, recorder, way)


def max_len(given: argparse.Namespace) -> int:
    """The longest text of all cells."""
    return max(cell.max_model_len for cell in cells_of(given)) + BLOCK


def start_others(given: argparse.Namespace, port: int) -> list[subprocess.Popen[bytes]]:
    """Start ranks 1 and up with the arguments of this command. They end when it ends."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--port", str(port)]
    others = range(1, given.ranks)
    return [subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.PIPE) for rank in others]


def follow(given: argparse.Namespace) -> int:
    """Be one of ranks 1 and up, until rank 0 ends."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    device = _device(given)
    ranks = join(given.rank, given.ranks, device, connect_store(given.port), "auto")
    with Recorder(None, device) as recorder:
        ranks.least(1)  # after rank 0 has timed the whole pair
        run_shares(given, ranks, ranks.on_device, device, recorder)
        ranks.least(1)
    return 0


def lead(given: argparse.Namespace) -> int:
    """Be rank 0: time one GPU, then all."""
    device, store = _device(given), open_store()
    others = start_others(given, store.port)
    try:
        with Recorder(given.out, device) as recorder:
            ranks = join(0, given.ranks, device, store, "auto", lambda _: _ended(others))
            recorder.guard({"arm": "one GPU"}, partial(_run_whole, given, device, recorder))
            release()
            ranks.least(1)
            shares = partial(run_shares, given, ranks, ranks.on_device, device, recorder)
            recorder.guard({"arm": f"{given.ranks} GPUs"}, shares)
            if not recorder.num_failures:
                ranks.least(1)
            print(table(COLUMNS, [[row.get(name) for name in COLUMNS] for row in recorder.of("step")]))
            return 1 if recorder.num_failures else 0
    finally:
        for other in others:
            other.kill()
            other.communicate()


def _ended(others: list[subprocess.Popen[bytes]]) -> DFlashError | None:
    """An error if a process has ended."""
    return PeerUnreachable("another rank has ended") if any(item.poll() is not None for item in others) else None


def _run_whole(given: argparse.Namespace, device: torch.device, recorder: Recorder) -> None:
    measure(given, build_pair(SHAPES[given.shape], max_len(given), device), recorder, "one GPU")


def _device(given: argparse.Namespace) -> torch.device:
    return open_device("cpu" if given.device == "cpu" else f"cuda:{given.rank}")


def main() -> int:
    given = make_parser().parse_args()
    return lead(given) if given.rank == 0 else follow(given)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # torch would wait for GPUs that other processes have left.
    os._exit(code)
