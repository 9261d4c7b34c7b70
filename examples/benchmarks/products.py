"""Time the matrix products of a layer in their chain, our kernels and a library's, with random weights of a real shape.

    python3 examples/benchmarks/products.py [--rows 8,16,1024] [--shape qwen3-8b] [--out products.jsonl]

A chain is a layer without attention, where each launch waits for the previous one: norm, qkv, rotation, output, norm,
gate and up, down. Ten layers with weights of their own are one CUDA graph. Products launched one after another would
overlap in a way that never happens in a step. For each product alone and for all together, the table says how many
microseconds per layer more our kernel takes than the library. A dash means that the library is used anyway. Rows are
JSON lines; the table comes last.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.products.activation import silu_mul, silu_mul_ref
from dflash_kernels.products.many_rows import cut_of_many_rows
from dflash_kernels.products.product_config import product_shape
from dflash_kernels.suite import REFERENCE, Kernels, pick_kernels
from timing.arguments import counts, open_device, run_dtype
from timing.ceilings import device_ms
from timing.report import Recorder, release, table
from timing.shapes import SHAPES, Shape

NUM_LAYERS, NUM_TURNS = 10, 3
EPS = 1e-6


@dataclass(frozen=True)
class Products:
    """The weights of one layer, [N, K] each."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


NAMES = tuple(field.name for field in fields(Products))


def make_layers(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Products]:
    """Random weights that keep the magnitude of the rows."""

    def weight(num_columns: int, depth: int) -> Tensor:
        return torch.randn(num_columns, depth, device=device, dtype=dtype).mul_(depth**-0.5)

    queries = shape.heads * shape.head_dim
    qkv = queries + 2 * shape.kv_heads * shape.head_dim
    return [
        Products(
            weight(qkv, shape.hidden), weight(shape.hidden, queries),
            weight(2 * shape.inner, shape.hidden), weight(shape.hidden, shape.inner),
        )
        for _ in range(NUM_LAYERS)
    ]  # fmt: skip


class Chain:
    """Layers, and the rows that pass through them."""

    def __init__(self, shape: Shape, kernels: Kernels, num_rows: int, layers: Sequence[Products]) -> None:
        self._shape, self._kernels, self._layers = shape, kernels, layers
        like = layers[0].o
        self._hidden, self._residual = (torch.randn(num_rows, shape.hidden).to(like) for _ in range(2))
        self._cos, self._sin = (torch.randn(num_rows, shape.head_dim).to(like) for _ in range(2))
        self._norm = torch.ones(shape.hidden).to(like)
        self._head_norms = torch.ones(shape.heads + shape.kv_heads, shape.head_dim).to(like)

    def run(self, ours: Sequence[str]) -> Tensor:
        """The last layer's parts [P, T, hidden], with our kernels for the products in `ours`."""
        kernels, parts, residual = self._kernels, self._hidden[None], self._residual
        for layer in self._layers:
            normed, residual = kernels.add_rms_norm(parts, residual, self._norm, EPS)
            projected = self._of("qkv", ours).product_parts(normed, layer.qkv)
            heads = kernels.rope_store(
                projected, self._head_norms, EPS, self._cos, self._sin, self._shape.kv_heads, None
            )  # fmt: skip
            # A copy replaces attention and has the same layout of rows.
            attended = heads[:, : self._shape.heads].flatten(1).contiguous()
            parts = self._of("o", ours).product_parts(attended, layer.o)
            normed, residual = kernels.add_rms_norm(parts, residual, self._norm, EPS)
            parts = self._of("down", ours).product_parts(self._gated(normed, layer.gate_up, ours), layer.down)
        return parts

    def has_own(self, name: str) -> bool:
        """Whether the kernels choose our product for `name`."""
        weight, is_gated = getattr(self._layers[0], name), name == "gate_up"
        num_columns, depth = len(weight) // (2 if is_gated else 1), weight.shape[1]
        sizes = (len(self._hidden), num_columns, depth, weight.element_size(), weight.device)
        is_cut = product_shape(*sizes, has_parts=not is_gated, is_gated=is_gated) is not None
        is_cut = is_cut or (is_gated and cut_of_many_rows(self._hidden, weight) is not None)
        return self._kernels is not REFERENCE and is_cut

    def _of(self, name: str, ours: Sequence[str]) -> Kernels:
        return self._kernels if name in ours else REFERENCE

    def _gated(self, normed: Tensor, weight: Tensor, ours: Sequence[str]) -> Tensor:
        """The gated product. The library's product is gated by our own launch, as in a step."""
        if "gate_up" in ours:
            return self._kernels.gated_product(normed, weight)
        gate = silu_mul_ref if self._kernels is REFERENCE else silu_mul
        return gate(functional.linear(normed, weight))


def measure(recorder: Recorder, shape: Shape, kernels: Kernels, num_rows: int, layers: Sequence[Products]) -> None:
    """Record microseconds per layer. All chains take turns; the median counts."""
    chain, device = Chain(shape, kernels, num_rows, layers), layers[0].o.device
    own = [name for name in NAMES if chain.has_own(name)]
    arms = {"library": [], **{name: [name] for name in own}, **({"all": own} if len(own) > 1 else {})}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(NUM_TURNS):
        for arm, ours in arms.items():
            times[arm].append(device_ms(lambda ours=ours: chain.run(ours), device) / len(layers) * 1000)  # type: ignore[misc]
    found = {arm: statistics.median(turns) for arm, turns in times.items()}
    recorder.add("products", {"rows": num_rows, "us": found, "turns": times})


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=counts, default="8,16,32,64,128,1024,8192")
    parser.add_argument("--out", type=Path, help="write all rows as JSON lines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table. Returns 1 if a number of rows failed."""
    given = make_parser().parse_args(arguments)
    device, shape = open_device(given.device), SHAPES[given.shape]
    dtype = run_dtype(device)
    kernels = pick_kernels("auto", device, dtype)
    torch.manual_seed(0)
    layers = make_layers(shape, device, dtype)
    with Recorder(given.out, device) as recorder:
        for num_rows in given.rows:
            recorder.guard(
                {"rows": num_rows},
                lambda count=num_rows: measure(recorder, shape, kernels, count, layers),  # type: ignore[misc]
            )
            release()
        rows = [
            (row["rows"], row["us"]["library"], *(gain(row["us"], name) for name in (*NAMES, "all")))
            for row in recorder.of("products")
        ]
        print(table(("rows", "library us", *NAMES, "all"), rows))
        return 1 if recorder.num_failures else 0


def gain(us: dict[str, float], name: str) -> float | None:
    """Microseconds per layer by which our product is slower than the library's."""
    return us[name] - us["library"] if name in us else None


if __name__ == "__main__":
    sys.exit(main())
