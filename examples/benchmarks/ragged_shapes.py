"""Compare tile shapes of prefill attention in bf16 at the shapes of Qwen3-8B: `RAGGED_SHAPES` in `ragged_config.py`.

    python3 examples/benchmarks/ragged_shapes.py [--out shapes.jsonl]
    python3 examples/benchmarks/ragged_shapes.py --heads 16,4,256 --only 2,048    # heads of Qwen3.5-4B

Needs a CUDA device. Every tile shape is compared with the reference in float32 and timed as a CUDA graph. For
comparison, attention of uniform blocks is called once for each prompt. A shape that does not fit the device is left
out. The last table has one line per shape, the best on average first. `TMA` loads tiles by descriptors; the number
after it is `num_together` of the shape. `*` marks the shape in use without context.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from dflash_kernels.attention.ragged_attention import Segment, plan_ragged
from dflash_kernels.attention.ragged_config import RaggedShape, ragged_shape
from dflash_kernels.suite import REFERENCE, triton_kernels
from timing.ceilings import median_us

PAGE, LAYERS = 16, 4

Heads = tuple[int, int, int]
"""Query heads, key heads, and their size."""

LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "600": ([600], [0]),
    "2,048": ([2048], [0]),
    "8,192": ([8192], [0]),
    "3 x 970": ([970] * 3, [0] * 3),
    "300 800 350": ([300, 800, 350], [0] * 3),
    "32 x 512": ([512] * 32, [0] * 32),
    "1,000 at 1,000": ([1000], [1000]),
    "4 x 500 at 500": ([500] * 4, [500] * 4),
    "2,048 at 2,048": ([2048], [2048]),
    "2,048 at 14,336": ([2048], [14_336]),
    "8,192 at 8,192": ([8192], [8192]),
    "64 at 14,336": ([64], [14_336]),
    "16 at 14,336": ([16], [14_336]),
    "mixed": ([1024, 7, 300, 512, 64, 141], [14_336, 4096, 0, 0, 30_000, 512]),
}
"""Name -> numbers of rows and context lengths of the prompts of one forward."""

LARGEST_ERROR = 1e-2
NUM_CALLS = 8
"""Calls in one timed graph."""


class Batch:
    """Prompts of one forward. Their context is in shuffled pages that also hold other layers."""

    def __init__(self, rows: list[int], contexts: list[int], heads: Heads) -> None:
        self.num_heads, self.num_kv, size = heads
        firsts = list(itertools.accumulate(rows, initial=0))
        self.segments = tuple(Segment(*item) for item in zip(firsts, rows, contexts, range(len(rows)), strict=False))
        num_pages = -(-max(map(sum, zip(rows, contexts, strict=True))) // PAGE)
        self.table = (torch.randperm(len(rows) * num_pages, device="cuda") + 1).view(len(rows), num_pages)
        self.block = [normal(sum(rows), count, size) for count in (self.num_heads, self.num_kv, self.num_kv)]
        self.caches = normal(len(rows) * num_pages + 1, LAYERS, 2, PAGE, self.num_kv, size)[:, 0].unbind(1)
        self.flops = sum(
            4 * self.num_heads * size * n * (context + (n + 1) / 2) for n, context in zip(rows, contexts, strict=True)
        )
        self.exact = self._attend_exactly()

    def together(self, shape: RaggedShape) -> Callable[[], Tensor]:
        """A call of the kernel. Its plan is already computed and on the device."""
        plan = plan_ragged(self.segments, self.num_heads, self.num_kv, shape, self.table.device)
        placed = torch.tensor(plan.ints, device="cuda")
        attend = triton_kernels().ragged_attention
        return lambda: attend(*self.block, *self.caches, self.table, plan, placed, window=None)

    def one_by_one(self) -> Callable[[], Tensor]:
        """A call of attention of uniform blocks for each prompt."""
        attend, calls = triton_kernels().block_attention, []
        for segment in self.segments:
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            num_pages = -(-(segment.context_len + segment.num_rows) // PAGE)
            table = self.table[segment.table_row : segment.table_row + 1, :num_pages].contiguous()
            lens = torch.tensor([segment.context_len], device="cuda")
            calls.append(([tensor[None, rows] for tensor in self.block], table, lens))
        return lambda: torch.cat(
            [attend(*block, *self.caches, table, lens, is_causal=True, window=None).flatten(0, 1)
             for block, table, lens in calls]
        )  # fmt: skip

    def error_of(self, out: Tensor) -> float:
        return float((out.float() - self.exact).norm() / self.exact.norm())

    def _attend_exactly(self) -> Tensor:
        plan = plan_ragged(self.segments, self.num_heads, self.num_kv, next(shapes()), self.table.device)
        block, caches = ([tensor.float() for tensor in tensors] for tensors in (self.block, self.caches))
        return REFERENCE.ragged_attention(*block, *caches, self.table, plan, self.table, window=None)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def shapes() -> Iterator[RaggedShape]:
    for rows, keys, num_warps, num_stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        yield RaggedShape(rows, keys, num_warps, num_stages)
    for keys, num_stages, num_together in itertools.product((64, 128), (2, 3), (1, 2)):
        yield RaggedShape(64, keys, 4, num_stages, num_together, has_descriptors=True)
        yield RaggedShape(128, keys, 8, num_stages, num_together, has_descriptors=True)


def time_shape(batch: Batch, shape: RaggedShape) -> float | None:
    """Microseconds, or None if the shape fails or is wrong on this device."""
    try:
        call = batch.together(shape)
        error = batch.error_of(call())
        if not error < LARGEST_ERROR:
            print(f"  WRONG: {shape}, relative error {error:.1e}", flush=True)
            return None
        return median_us(call, NUM_CALLS)
    except Exception as error:
        print(f"  left out: {shape}: {str(error)[:90]}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write results as JSON lines")
    parser.add_argument("--heads", default="32,8,128", help="query heads, key heads and their size")
    parser.add_argument("--only", help="measure this case only")
    given = parser.parse_args()
    torch.manual_seed(0)
    num_heads, num_kv, size = map(int, given.heads.split(","))
    cases = {given.only: LENGTHS[given.only]} if given.only else LENGTHS
    in_use = ragged_shape(size, 2, 0, torch.device("cuda", 0))
    found: dict[RaggedShape, dict[str, float]] = {shape: {} for shape in shapes()}
    before: dict[str, float] = {}
    flops: dict[str, float] = {}
    for name, (rows, contexts) in cases.items():
        batch = Batch(rows, contexts, (num_heads, num_kv, size))
        flops[name], before[name] = batch.flops, median_us(batch.one_by_one(), NUM_CALLS)
        print(f"{name}: one by one {before[name]:.1f} us", flush=True)
        for shape, times in found.items():
            if (us := time_shape(batch, shape)) is not None:
                times[name] = us
        del batch
        torch.cuda.empty_cache()
    if given.out is not None:
        lines = [{"shape": repr(shape), "us": times} for shape, times in found.items()]
        given.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_table(found, before, flops, in_use)


def print_table(
    found: dict[RaggedShape, dict[str, float]], before: dict[str, float], flops: dict[str, float], in_use: RaggedShape
) -> None:
    best = {name: min(times[name] for times in found.values() if name in times) for name in flops}

    def behind(item: tuple[RaggedShape, dict[str, float]]) -> float:
        """Mean of times over the best time. A shape without a time somewhere comes last."""
        times = item[1]
        return math.exp(statistics.mean(math.log(times[n] / best[n]) if n in times else 9.0 for n in flops))

    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, microseconds per layer")
    print(f"{'rows keys warps stages':28s}" + "".join(f"{name:>17s}" for name in flops) + f"{'x best':>9s}")
    print(f"{'one by one':28s}" + "".join(f"{before[name]:17.1f}" for name in flops))
    print(f"{'best, TFLOP/s':28s}" + "".join(f"{flops[name] / best[name] / 1e6:17.0f}" for name in flops))
    for shape, times in sorted(found.items(), key=behind):
        loads = f" TMA {shape.num_together}" if shape.has_descriptors else ""
        mark = " *" if shape == in_use else ""
        label = f"{shape.rows:4d} {shape.keys:4d} {shape.num_warps:5d} {shape.num_stages:6d}{loads}{mark}"
        row = "".join(f"{times[name]:17.1f}" if name in times else f"{'-':>17s}" for name in flops)
        print(f"{label:28s}{row}{behind((shape, times)):9.2f}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    main()
