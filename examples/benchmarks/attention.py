"""Time attention of blocks over paged contexts, as a step calls it, with random keys that are in no cache.

    python3 examples/benchmarks/attention.py [--cases 8x16@520,64x8@64-4352] [--shape qwen3-8b] [--kv-dtype fp8]
                                           [--full] [--sweep] [--out attention.jsonl]

A case is requests x rows @ context. The context is one length for all requests, or two bounds with log-uniform lengths
between them. The layers of the target run one after another as one CUDA graph, each over its own part of the pages.
The floor is the bytes of queries, keys, values and results over the bandwidth of a copy. With `--kv-dtype fp8` pages
are in FP8. `--full` takes the heads of full layers, if a target has others there. The error is relative to
float64, for the first, middle and last request. With `--sweep`, a second table has the fastest other tilings per case;
tilings that do not fit the device are left out. Rows are JSON lines; tables come last. A case that fails prints one
line, the others continue, and the exit code is 1.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor

from dflash_kernels.attention import block_attention
from dflash_kernels.attention.attention_config import AttentionShape, BalancedShape
from dflash_kernels.launch import ceil_div
from dflash_kernels.launch_config import num_multiprocessors
from dflash_kernels.suite import REFERENCE, Kernels, pick_kernels
from dflash_runtime.device.setup.settings import resolve_kv_dtype
from timing.arguments import open_device, run_dtype
from timing.ceilings import device_ms, measure_rates
from timing.floors import Rates
from timing.pairs import log_uniform
from timing.report import Recorder, table
from timing.shapes import SHAPES, Shape

PAGE, CAPACITY = 16, 32_768
"""Tokens of a page, and of the longest text in the page table. The number of parts depends on CAPACITY."""

CASES = (
    "1x1@520,8x1@520,16x1@520,32x1@680,32x1@1360,64x1@680,64x1@64-4352,8x1@8200,"
    "1x8@520,8x8@520,16x8@520,4x8@1360,8x8@1360,32x8@1240-1480,64x8@1240-1480,64x8@64-4352,8x8@8200,"
    "1x16@520,2x16@520,4x16@520,8x16@520,16x16@520,32x16@520,64x16@520,16x16@1360,32x16@1490-1740,32x16@800-1800,"
    "32x16@64-4352,64x16@64-4352,1x16@8200,8x16@8200,1x16@30000,8x16@30000"
)
NUM_TURNS = 3
SHOWN = 5
"""Tilings per case in the table of a sweep."""

Tiling = AttentionShape | BalancedShape


@dataclass(frozen=True)
class Case:
    """Requests, rows of each, and the bounds of their contexts."""

    num_requests: int
    num_rows: int
    shortest: int
    longest: int

    @classmethod
    def parse(cls, text: str) -> Self:
        found = re.fullmatch(r"(\d+)x(\d+)@(\d+)(?:-(\d+))?", text.strip())
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r}: expected requests x rows @ context, such as 8x16@520")
        requests, rows, shortest, longest = (int(part or found[3]) for part in found.groups())
        if not (requests and rows and 0 < shortest <= longest <= CAPACITY - rows):
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 1, and contexts up to {CAPACITY} tokens")
        return cls(requests, rows, shortest, longest)

    @property
    def name(self) -> str:
        span = f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest}-{self.longest}"
        return f"{self.num_requests}x{self.num_rows}@{span}"

    def lengths(self) -> list[int]:
        """Context length of each request, the same in every run."""
        levels = torch.rand(self.num_requests, generator=torch.Generator().manual_seed(1))
        return log_uniform(levels, self.shortest, self.longest)


class Layers:
    """Queries, keys and values of all layers, and pages with a context for each request."""

    def __init__(self, case: Case, shape: Shape, like: Tensor, kv_dtype: torch.dtype) -> None:
        self._shape, self._lengths = shape, case.lengths()
        counts = [-(-length // PAGE) for length in self._lengths]
        order = torch.randperm(sum(counts)).add_(1).split(counts)
        rows = [torch.nn.functional.pad(pages, (0, CAPACITY // PAGE - len(pages))) for pages in order]
        self.page_table = torch.stack(rows).to(like.device)
        self.lens = torch.tensor(self._lengths, device=like.device)
        heads = shape.heads + 2 * shape.kv_heads
        block = (shape.layers, case.num_requests, case.num_rows, heads, shape.head_dim)
        self._blocks = like.new_empty(block).normal_()
        pages = (sum(counts) + 1, shape.layers, 2, PAGE, shape.kv_heads, shape.head_dim)
        self._pages = like.new_empty(pages).normal_().to(kv_dtype)

    @property
    def num_layers(self) -> int:
        return self._shape.layers

    @property
    def num_bytes(self) -> int:
        """Bytes that a layer must read and write."""
        shape, num_rows = self._shape, self._blocks.shape[1] * self._blocks.shape[2]
        in_block = 2 * (shape.heads + shape.kv_heads) * num_rows * self._blocks.element_size()
        in_pages = 2 * shape.kv_heads * sum(self._lengths) * self._pages.element_size()
        return (in_block + in_pages) * shape.head_dim

    def attend(self, kernels: Kernels) -> Tensor:
        """Run every layer -> the result of the last one."""
        for layer in range(self._shape.layers):
            out = kernels.block_attention(
                *self._block(layer), *self._caches(layer), self.page_table, self.lens, is_causal=True, window=None
            )
        return out

    def error(self, out: Tensor) -> float:
        """Relative error of the last layer's result."""
        checked = sorted({0, len(self._lengths) // 2, len(self._lengths) - 1})
        width = max(-(-self._lengths[index] // PAGE) for index in checked)
        exact = REFERENCE.block_attention(
            *(rows[checked].double() for rows in self._block(-1)), *(cache.double() for cache in self._caches(-1)),
            self.page_table[checked, :width], self.lens[checked], is_causal=True, window=None,
        )  # fmt: skip
        return float((out[checked].double() - exact).norm() / exact.norm())

    def _block(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self._shape.heads, self._shape.kv_heads
        queries, keys, values = torch.split(self._blocks[layer], [heads, kv_heads, kv_heads], dim=2)
        return queries, keys, values

    def _caches(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pages[:, layer, 0], self._pages[:, layer, 1]


def measure(recorder: Recorder, case: Case, layers: Layers, kernels: Kernels, rates: Rates) -> None:
    """Record microseconds per layer, the best of several turns."""
    error = layers.error(layers.attend(kernels))
    device, count = layers.lens.device, layers.num_layers
    turns = [device_ms(lambda: layers.attend(kernels), device) / count * 1000 for _ in range(NUM_TURNS)]
    floor = layers.num_bytes / rates.bandwidth * 1e6
    row = {"case": case.name, "us": min(turns), "floor_us": floor, "ratio": min(turns) / floor, "error": error}
    recorder.add("attention", {**row, "turns": turns})


def tilings(case: Case, shape: Shape, device: torch.device) -> Iterator[Tiling]:
    """Tilings to try: parts of each request's keys, or equal shares of all, for one or two programs at a time."""
    num_packed = case.num_rows * shape.heads // shape.kv_heads
    for rows, keys, num_stages, num_warps in product((16, 32, 64, 128), (16, 32, 64, 128), (1, 2, 3), (4, 8)):
        if rows > 16 and rows >= 4 * num_packed:
            continue
        places = [together * num_multiprocessors(device) for together in (1, 2)]
        num_columns = shape.kv_heads * ceil_div(num_packed, rows)
        for count in sorted({max(1, min(16, place // (num_columns * case.num_requests))) for place in places}):
            yield AttentionShape(rows, keys, count, num_stages, num_warps)
        for count in (place // num_columns for place in places):
            if count > 1 and case.num_requests > 1:
                whole = ceil_div(case.num_requests, count)
                yield BalancedShape(rows, keys, count, num_stages, num_whole=whole, num_warps=num_warps)


def using(tiling: Tiling) -> AbstractContextManager[Any]:
    """Let block attention use a tiling."""
    balanced = tiling if isinstance(tiling, BalancedShape) else None
    return patch.multiple(block_attention, balanced_shape=lambda *_: balanced, attention_shape=lambda *_: tiling)


def sweep(recorder: Recorder, case: Case, shape: Shape, layers: Layers, kernels: Kernels) -> None:
    """Record the time of other tilings, and the error of each."""
    device, count = layers.lens.device, layers.num_layers
    for tiling in tilings(case, shape, device):
        try:
            with using(tiling):
                error = layers.error(layers.attend(kernels))
                us = device_ms(lambda: layers.attend(kernels), device) / count * 1000
        except Exception as failure:  # Triton raises errors of many kinds if a tiling does not fit
            recorder.add("misfit", {"case": case.name, "tiling": str(tiling), "error": type(failure).__name__})
            continue
        recorder.add("sweep", {"case": case.name, "us": us, "tiling": str(tiling), "error": error})


def parse_cases(text: str) -> list[Case]:
    """Parse cases separated by commas."""
    return [Case.parse(item) for item in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--full", action="store_true", help="heads of full layers")
    parser.add_argument("--sweep", action="store_true", help="try other tilings, too")
    parser.add_argument("--cases", type=parse_cases, default=CASES, help="cases, such as 8x16@520,64x8@64-4352")
    parser.add_argument("--out", type=Path, help="write all rows as JSON lines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table. Returns 1 if a case failed."""
    given = make_parser().parse_args(arguments)
    device, shape = open_device(given.device), SHAPES[given.shape]
    dtype = run_dtype(device)
    kernels, rates = pick_kernels("auto", device, dtype), measure_rates(device, dtype)
    torch.manual_seed(0)
    like, kv_dtype = torch.empty(0, device=device, dtype=dtype), resolve_kv_dtype(given.kv_dtype) or dtype
    if given.full and shape.full_heads is not None:
        shape = replace(shape, kv_heads=shape.full_heads[0], head_dim=shape.full_heads[1])

    def run(case: Case) -> None:
        layers = Layers(case, shape, like, kv_dtype)
        measure(recorder, case, layers, kernels, rates)
        if given.sweep:
            sweep(recorder, case, shape, layers, kernels)

    with Recorder(given.out, device) as recorder:
        for case in given.cases:
            recorder.guard({"case": case.name}, partial(run, case))
        rows = [
            (row["case"], row["us"], row["floor_us"], row["ratio"], 100 * row["error"])
            for row in recorder.of("attention")
        ]
        print(table(("requests x rows @ context", "us per layer", "floor", "ratio", "error %"), rows))
        for case in given.cases if given.sweep else ():
            tried = sorted((row for row in recorder.of("sweep") if row["case"] == case.name), key=lambda row: row["us"])
            best = [(case.name, row["us"], 100 * row["error"], row["tiling"]) for row in tried[:SHOWN]]
            print(table(("requests x rows @ context", "us per layer", "error %", "tiling"), best))
        return 1 if recorder.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
