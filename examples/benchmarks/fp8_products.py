"""Time the products of a layer in FP8 with several launch parameters, beside bfloat16, with weights of a real shape.

    python3 examples/benchmarks/fp8_products.py [--rows 1,16,128,512] [--shape qwen3-8b] [--form block] [--sweep]
    python3 examples/benchmarks/fp8_products.py --rounded qkv,gate_up

Each product runs over weights of ten layers in one CUDA graph, so that caches stay cold. GB/s are the bytes of the
weight per second. Rows of products in `--rounded` are rounded before, as by the norm of a step. The first table has the
parameters that the runtime chooses, and the product in bfloat16 by our kernel or a library. With `--sweep`, a second
table has the fastest other parameters per product and number of rows. A sweep stops after `--seconds`; parameters that
do not fit the device are left out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dflash_kernels.fp8 import fp8_product
from dflash_kernels.fp8.fp8_config import Fp8Shape, fp8_product_shape
from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rounded, Rows, plain_rows, round_rows_ref, to_fp8
from dflash_kernels.suite import REFERENCE, Kernels, pick_kernels
from timing.arguments import counts, open_device, run_dtype
from timing.ceilings import device_ms
from timing.report import Recorder, release, table
from timing.shapes import SHAPES, Shape

NUM_LAYERS = 10
FORMS = {"block": (128, 128), "channel": (1, 1 << 30)}
SHOWN = 4
"""Parameters per product and number of rows in the table of a sweep."""


@dataclass(frozen=True)
class Product:
    """One product of a layer, with the weights of several layers."""

    name: str
    plain: list[Tensor]
    weights: list[Fp8Weight]

    @property
    def is_gated(self) -> bool:
        return self.name == "gate_up"

    @property
    def num_columns(self) -> int:
        return len(self.weights[0]) // (2 if self.is_gated else 1)

    @property
    def depth(self) -> int:
        return self.weights[0].shape[1]

    def chosen(self, rows: Rows) -> Fp8Shape:
        """The runtime's parameters."""
        plain = plain_rows(rows)
        return fp8_product_shape(
            len(plain), self.num_columns, self.depth, self.weights[0].block[1], plain.element_size(), plain.device,
            has_parts=not self.is_gated, is_gated=self.is_gated, is_rounded=isinstance(rows, Rounded),
        )  # fmt: skip

    def run_plain(self, kernels: Kernels, rows: Tensor) -> None:
        for weight in self.plain:
            (kernels.gated_product if self.is_gated else kernels.product_parts)(rows, weight)

    def run(self, kernels: Kernels, rows: Rows, shape: Fp8Shape) -> None:
        for weight in self.weights:
            if kernels is REFERENCE:
                (kernels.fp8_gated_product if self.is_gated else kernels.fp8_product_parts)(rows, weight)
            else:
                fp8_product.launch_product(rows, weight, shape, has_parts=not self.is_gated, is_gated=self.is_gated)


def make_products(shape: Shape, form: tuple[int, int], device: torch.device, dtype: torch.dtype) -> list[Product]:
    """Random weights that keep the magnitude of the rows."""
    queries = shape.heads * shape.head_dim
    sizes = {
        "qkv": (queries + 2 * shape.kv_heads * shape.head_dim, shape.hidden), "o": (shape.hidden, queries),
        "gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner),
    }  # fmt: skip
    products = []
    for name, (num_columns, depth) in sizes.items():
        plain = [
            torch.randn(num_columns, depth, device=device, dtype=dtype).mul_(depth**-0.5) for _ in range(NUM_LAYERS)
        ]
        products.append(Product(name, plain, [to_fp8(weight, form) for weight in plain]))
    return products


def make_rows(product: Product, count: int, *, is_rounded: bool) -> Rows:
    """Random rows [count, K]."""
    rows = torch.randn(count, product.depth).to(product.plain[0])
    return round_rows_ref(rows, product.weights[0]) if is_rounded else rows


def candidates(chosen: Fp8Shape, num_rows: int, *, is_gated: bool) -> Iterator[Fp8Shape]:
    """Other parameters. The parameters with the largest effect come first."""
    if num_rows <= 32:
        for columns, num_warps, num_stages in (
            (64, 4, 4), (128, 4, 4), (128, 8, 4), (64, 4, 8), (128, 4, 3), (128, 8, 6), (32, 4, 6), (64, 8, 6),
            (64, 2, 4), (32, 2, 4), (128, 2, 3), (64, 2, 6),
        ):  # fmt: skip
            for num_parts in (chosen.num_parts,) if is_gated else (chosen.num_parts, 2 * chosen.num_parts):
                yield replace(
                    chosen, columns=columns, num_warps=num_warps, num_stages=num_stages, num_parts=num_parts
                )  # fmt: skip
        yield replace(chosen, rounds_in_place=not chosen.rounds_in_place)
        if num_rows <= 8:
            yield replace(chosen, rows=16)
        return
    for rows, columns, num_warps, num_stages in (
        (64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 8, 4), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3),
        (128, 128, 8, 4), (256, 64, 8, 3), (256, 128, 8, 3),
    ):  # fmt: skip
        yield replace(chosen, rows=rows, columns=columns, num_warps=num_warps, num_stages=num_stages)
        if not is_gated and num_rows <= 128:
            yield replace(
                chosen, rows=rows, columns=columns, num_warps=num_warps, num_stages=num_stages,
                num_parts=2 * chosen.num_parts,
            )  # fmt: skip


def measure(recorder: Recorder, product: Product, kernels: Kernels, rows: Rows, shape: Fp8Shape, kind: str) -> None:
    """Record microseconds per product."""
    plain = plain_rows(rows)
    us = time_us(lambda: product.run(kernels, rows, shape), plain.device)
    weight = product.weights[0]
    num_bytes = weight.values.numel() + 4 * weight.scales.numel()
    recorder.add(kind, {
        "product": product.name, "rows": len(plain), "us": us, "gb_per_s": num_bytes / us / 1000,
        "shape": _text(shape) + (" by the norm" if plain is not rows else ""),
    })  # fmt: skip


def measure_plain(recorder: Recorder, product: Product, kernels: Kernels, rows: Tensor) -> None:
    us = time_us(lambda: product.run_plain(kernels, rows), rows.device)
    num_bytes = product.plain[0].numel() * product.plain[0].element_size()
    recorder.add("plain", {"product": product.name, "rows": len(rows), "us": us, "gb_per_s": num_bytes / us / 1000})


def time_us(call: object, device: torch.device) -> float:
    """Microseconds per product, the median of three measurements."""
    return statistics.median(device_ms(call, device, 7) for _ in range(3)) * 1000 / NUM_LAYERS  # type: ignore[arg-type]


def _text(shape: Fp8Shape) -> str:
    place = "in place" if shape.rounds_in_place else "before"
    return (
        f"{shape.rows}x{shape.columns}x{shape.depth} parts {shape.num_parts} stages {shape.num_stages} "
        f"warps {shape.num_warps} rounded {place}"
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--form", choices=FORMS, default="block", help="blocks of 128 x 128, or a scale per row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=counts, default="1,16,128,512")
    parser.add_argument("--products", default="qkv,o,gate_up,down", help="products to measure")
    parser.add_argument("--rounded", default="", help="products whose rows are rounded before")
    parser.add_argument("--sweep", action="store_true", help="also try other launch parameters")
    parser.add_argument("--seconds", type=float, default=200, help="longest sweep (default: 200)")
    parser.add_argument("--out", type=Path, help="write all rows as JSON lines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print tables. Returns 1 if the runtime's parameters failed."""
    given = make_parser().parse_args(arguments)
    device = open_device(given.device)
    dtype = run_dtype(device)
    kernels = pick_kernels("auto", device, dtype)
    torch.manual_seed(0)
    wanted, rounded = given.products.split(","), given.rounded.split(",")
    products = make_products(SHAPES[given.shape], FORMS[given.form], device, dtype)
    inputs = {
        (product.name, count): make_rows(product, count, is_rounded=product.name in rounded)
        for product in products for count in given.rows
    }  # fmt: skip
    products = [product for product in products if product.name in wanted]
    with Recorder(given.out, device) as recorder:
        for product in products:
            for count in given.rows:
                rows = inputs[product.name, count]
                plain = plain_rows(rows)
                recorder.guard(
                    {"product": product.name, "rows": count},
                    lambda p=product, r=rows: measure(recorder, p, kernels, r, p.chosen(r), "fp8"),  # type: ignore[misc]
                )
                recorder.guard(
                    {"plain product": product.name, "rows": count},
                    lambda p=product, r=plain: measure_plain(recorder, p, kernels, r),  # type: ignore[misc]
                )
        num_failures = recorder.num_failures
        _show(recorder)
        if given.sweep and kernels is not REFERENCE:
            sweep(recorder, products, kernels, inputs, given.rows, given.seconds)
        release()
    return 1 if num_failures else 0


def sweep(
    recorder: Recorder, products: Sequence[Product], kernels: Kernels, inputs: dict[tuple[str, int], Rows],
    all_rows: Sequence[int], seconds: float,
) -> None:  # fmt: skip
    """Try other parameters for every product in turns until the time is over, and print the fastest."""
    started = time.perf_counter()
    waiting = []
    for count in all_rows:
        for product in products:
            rows = inputs[product.name, count]
            waiting.append((product, rows, candidates(product.chosen(rows), count, is_gated=product.is_gated)))
    while waiting and time.perf_counter() - started < seconds:
        product, rows, shapes = waiting.pop(0)
        shape = next(shapes, None)
        if shape is None:
            continue
        waiting.append((product, rows, shapes))
        try:
            measure(recorder, product, kernels, rows, shape, "sweep")
        except Exception as error:
            recorder.add(
                "left out",
                {
                    "product": product.name,
                    "rows": len(plain_rows(rows)),
                    "shape": _text(shape),
                    "why": repr(error)[:200],
                },
            )
    print(f"sweep: {time.perf_counter() - started:.0f} s, {len(waiting)} of its lists not finished")
    found = [*recorder.of("sweep"), *recorder.of("fp8")]
    listed = []
    for product in products:
        for count in all_rows:
            own = [row for row in found if (row["product"], row["rows"]) == (product.name, count)]
            listed += sorted(own, key=lambda row: float(row["us"]))[:SHOWN]
    print(table(("product", "rows", "us", "GB/s", "parameters"), [_cells(row) for row in listed]))


def _show(recorder: Recorder) -> None:
    plain = {(row["product"], row["rows"]): row for row in recorder.of("plain")}
    rows = []
    for row in recorder.of("fp8"):
        beside = plain.get((row["product"], row["rows"]), {})
        rows.append((*_cells(row)[:4], beside.get("us"), beside.get("gb_per_s"), row["shape"]))
    print(table(("product", "rows", "fp8 us", "GB/s", "bf16 us", "bf16 GB/s", "parameters"), rows))


def _cells(row: dict[str, object]) -> tuple[object, ...]:
    return (row["product"], row["rows"], row["us"], row["gb_per_s"], row["shape"])


if __name__ == "__main__":
    sys.exit(main())
