"""Products of few rows, whole, in parts and gated: close to float64. A library computes most products of many rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_kernels import launch_config
from dflash_kernels.launch_config import has_tile_loads, num_multiprocessors
from dflash_kernels.products import product as module
from dflash_kernels.products import product_config
from dflash_kernels.products.activation import GELU, Gate, gate_ref, silu_mul_ref
from dflash_kernels.products.many_rows import cut_of_many_rows, gate_many_rows, multiply_many_rows
from dflash_kernels.products.product import gated_product, gated_product_ref, product, product_parts, product_parts_ref
from dflash_kernels.products.product_config import (
    GATED_ROWS,
    MAX_PRODUCT_ROWS,
    WIDE_PRODUCT_ROWS,
    ManyRowsShape,
    ProductShape,
    many_rows_shape,
    product_shape,
)
from dflash_testing.tensors import DEVICE, assert_rows_close, normal

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""The kernel is made for bfloat16, which the interpreter cannot multiply."""

needs_tile_loads = pytest.mark.skipif(not has_tile_loads(DEVICE), reason="the GPU has no unit that loads tiles")

SHAPES = [(1, 1, 1), (3, 70, 40), (16, 64, 1024), (17, 200, 1000), (32, 129, 2048)]
"""Rows, columns and inner width."""


@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), SHAPES)
def test_products(num_rows: int, num_columns: int, depth: int) -> None:
    hidden, weight = normal(num_rows, depth, dtype=DTYPE), normal(num_columns, depth, dtype=DTYPE, seed=1)
    exact = hidden.double() @ weight.double().T
    assert_rows_close(product(hidden, weight), exact, DTYPE)
    parts = product_parts(hidden, weight)
    assert_rows_close(parts.sum(0).to(DTYPE), exact, DTYPE)
    assert_rows_close(product_parts_ref(hidden, weight).sum(0), exact, DTYPE)
    assert len(parts) == 1 or parts.dtype == torch.float32


@pytest.mark.parametrize(("num_rows", "width", "depth"), SHAPES)
def test_gated_products(num_rows: int, width: int, depth: int) -> None:
    hidden, weight = normal(num_rows, depth, dtype=DTYPE), normal(2 * width, depth, dtype=DTYPE, seed=1) * depth**-0.5
    gate_up = (hidden.double() @ weight.double().T).to(DTYPE)
    assert_rows_close(gated_product(hidden, weight), silu_mul_ref(gate_up.double()), DTYPE)
    assert_rows_close(gated_product_ref(hidden, weight), silu_mul_ref(gate_up.double()), DTYPE)


def test_a_bias_is_added_once() -> None:
    """The inner width is cut into parts, and only one of them has the bias."""
    hidden, weight, bias = (normal(*shape, dtype=DTYPE, seed=len(shape)) for shape in ((3, 2048), (64, 2048), (64,)))
    exact = hidden.double() @ weight.double().T + 50 * bias.double()
    assert_rows_close(product(hidden, weight, 50 * bias), exact, DTYPE)
    parts = product_parts(hidden, weight, 50 * bias)
    assert len(parts) > 1
    assert_rows_close(parts.sum(0).to(DTYPE), exact, DTYPE)


def test_a_product_with_another_gate() -> None:
    hidden, weight = normal(17, 1000, dtype=DTYPE), normal(2 * 200, 1000, dtype=DTYPE, seed=1) * 1000**-0.5
    gate_up = (hidden.double() @ weight.double().T).to(DTYPE)
    assert_rows_close(gated_product(hidden, weight, GELU), gate_ref(gate_up.double(), GELU), DTYPE)


PLACES = num_multiprocessors(DEVICE)


def launched_shapes(monkeypatch: pytest.MonkeyPatch) -> list[ProductShape]:
    """Record the cuts of all products from now on, except products of a library."""
    seen: list[ProductShape] = []
    launch = module._launch

    def watched(hidden: torch.Tensor, weight: torch.Tensor, shape: ProductShape, **options: Any) -> torch.Tensor:
        seen.append(shape)
        return launch(hidden, weight, shape, **options)

    monkeypatch.setattr(module, "_launch", watched)
    return seen


@needs_tile_loads
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth"),
    [(33, 64 * PLACES, 96), (64, 64 * PLACES - 32, 2048), (100, 64 * PLACES, 130 * 8), (128, 32 * PLACES, 1024 + 64)],
)
def test_products_of_33_to_128_rows(
    num_rows: int, num_columns: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part or two. The last part and the tiles extend beyond rows, columns and depth."""
    seen = launched_shapes(monkeypatch)
    hidden = normal(num_rows, depth, dtype=DTYPE)
    weight = normal(num_columns, depth, dtype=DTYPE, seed=1) * depth**-0.5
    exact = hidden.double() @ weight.double().T
    parts = product_parts(hidden, weight)
    assert_rows_close(parts.sum(0).to(DTYPE), exact, DTYPE)
    both = torch.cat((weight, weight.flip(0)))
    wanted = silu_mul_ref((hidden.double() @ both.double().T).to(DTYPE).double())
    assert_rows_close(gated_product(hidden, both), wanted, DTYPE)
    assert [shape.has_descriptors for shape in seen] == [True] * len(seen)
    assert seen
    assert seen[0].num_parts == len(parts) == (2 if num_columns < 64 * PLACES - 32 else 1)


def cuts_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> list[ManyRowsShape]:
    """Record the cuts of gated products of many rows from now on, if they take one launch."""
    seen: list[ManyRowsShape] = []

    def watched(hidden: torch.Tensor, weight: torch.Tensor, shape: ManyRowsShape, gate: Gate) -> torch.Tensor:
        seen.append(shape)
        return gate_many_rows(hidden, weight, shape, gate)

    monkeypatch.setattr(module, "gate_many_rows", watched)
    return seen


@needs_tile_loads
@pytest.mark.parametrize(
    ("num_rows", "depth", "tiles_together"),
    [(GATED_ROWS, 64, 8), (GATED_ROWS + 126, 200, 9), (25 * 128, 72, 13), (51 * 128 - 5, 40, 17)],
)
def test_gated_products_of_many_rows(
    num_rows: int, depth: int, tiles_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch. Tiles extend beyond rows, columns and depth. The last group may have fewer tiles."""
    seen = cuts_of_many_rows(monkeypatch)
    width = 128 * PLACES - 24
    hidden = normal(num_rows, depth, dtype=DTYPE)
    weight = normal(2 * width, depth, dtype=DTYPE, seed=1) * depth**-0.5
    wanted = silu_mul_ref((hidden.double() @ weight.double().T).to(DTYPE).double())
    assert_rows_close(gated_product(hidden, weight), wanted, DTYPE)
    assert [shape.tiles_together for shape in seen] == [tiles_together]


TWO_LAUNCHES = {
    "too few rows": (GATED_ROWS - 1, 128 * PLACES, 40),
    "padded rows": (GATED_ROWS + 1, 128 * PLACES, 40),
    "a last round with few tiles": (GATED_ROWS + 128, 128 * (PLACES // 9 + 1), 40),
    "inputs without descriptors": (GATED_ROWS, 128 * PLACES, 41),
    "a result without a descriptor": (GATED_ROWS, 128 * PLACES - 1, 40),
}
"""Rows, width and depth of gated products for which one launch would be slower or impossible."""


@needs_tile_loads
def test_many_rows_take_one_launch_if_they_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def factors(num_rows: int, width: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = normal(num_rows, depth, dtype=DTYPE), normal(2 * width, depth, dtype=DTYPE, seed=1)
        return hidden, weight * depth**-0.5

    assert cut_of_many_rows(*factors(GATED_ROWS, 128 * PLACES, 40)) is not None
    for name, sizes in TWO_LAUNCHES.items():
        assert cut_of_many_rows(*factors(*sizes)) is None, name
    seen = cuts_of_many_rows(monkeypatch)
    hidden, weight = factors(*TWO_LAUNCHES["a last round with few tiles"])
    wanted = silu_mul_ref((hidden.double() @ weight.double().T).to(DTYPE).double())
    assert_rows_close(gated_product(hidden, weight), wanted, DTYPE)
    assert not seen


@needs_tile_loads
@pytest.mark.parametrize(("num_bytes", "is_cut"), [(227 * 1024, True), (99 * 1024, False)])
def test_many_rows_take_two_launches_with_little_shared_memory(
    num_bytes: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_config, "shared_memory", lambda device: num_bytes)
    assert (many_rows_shape(GATED_ROWS, 128 * PLACES, 2, DEVICE) is not None) == is_cut


@needs_tile_loads
@pytest.mark.parametrize("num_rows", [512, 481, 479, 513])
def test_some_numbers_of_rows_of_a_head_are_not_left_to_a_library(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles extend beyond rows and columns."""
    monkeypatch.setattr(product_config, "MANY_COLUMNS", 600)
    seen: list[ManyRowsShape] = []

    def watched(hidden: torch.Tensor, weight: torch.Tensor, shape: ManyRowsShape) -> torch.Tensor:
        seen.append(shape)
        return multiply_many_rows(hidden, weight, shape)

    monkeypatch.setattr(module, "multiply_many_rows", watched)
    hidden, weight = normal(num_rows, 40, dtype=DTYPE), normal(600, 40, dtype=DTYPE, seed=1) * 40**-0.5
    assert_rows_close(product(hidden, weight), hidden.double() @ weight.double().T, DTYPE)
    product(hidden, weight[:592])
    product(hidden, weight, weight[:, 0].contiguous())
    assert [shape.tiles_together for shape in seen] == ([4] if 480 <= num_rows <= 512 else [])


def test_misaligned_rows_are_loaded_by_pointers_or_multiplied_by_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = launched_shapes(monkeypatch)
    depth, width = 41, 128 * PLACES
    weight = normal(2 * width, depth, dtype=DTYPE, seed=1) * depth**-0.5
    for num_rows in (3, 40):
        hidden = normal(num_rows, depth, dtype=DTYPE)
        wanted = silu_mul_ref((hidden.double() @ weight.double().T).to(DTYPE).double())
        assert_rows_close(gated_product(hidden, weight), wanted, DTYPE)
    assert [shape.has_descriptors for shape in seen] == [False]


def test_rows_may_be_views_of_a_wider_tensor() -> None:
    wide, weight = normal(5, 3, 64, dtype=DTYPE), normal(33, 64, dtype=DTYPE, seed=1)
    assert_rows_close(product(wide[:, 1], weight), wide[:, 1].double() @ weight.double().T, DTYPE)


@pytest.mark.reference
def test_a_long_sum_is_cut_until_the_device_is_full() -> None:
    def num_parts(num_columns: int, depth: int, *, has_parts: bool = True) -> int:
        shape = product_shape(16, num_columns, depth, 2, DEVICE, has_parts=has_parts)
        assert shape is not None
        return shape.num_parts

    fills = num_multiprocessors(DEVICE) // 4
    assert num_parts(64, 16384) == 8
    assert num_parts(64 * fills, 16384) == 4
    assert num_parts(64, 1000) == 1
    assert num_parts(64, 16384, has_parts=False) == 1
    assert num_parts(64 * 10_000, 16384) == 1


@pytest.mark.parametrize("call", [product, product_parts, gated_product])
def test_a_library_multiplies_many_rows(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also 33 rows if their tiles would not fill the device."""
    seen = launched_shapes(monkeypatch)
    weight = normal(64, 128, dtype=DTYPE, seed=1)
    for num_rows in (MAX_PRODUCT_ROWS, MAX_PRODUCT_ROWS + 1):
        call(normal(num_rows, 128, dtype=DTYPE), weight)
    assert [shape.rows for shape in seen] == [MAX_PRODUCT_ROWS]
    wide = normal(2 * 64 * PLACES, 64, dtype=DTYPE, seed=1)
    call(normal(WIDE_PRODUCT_ROWS + 1, 64, dtype=DTYPE), wide)
    assert len(seen) == 1


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    hidden, weight = normal(2, 8, dtype=DTYPE), normal(3, 8, dtype=DTYPE)
    with pytest.raises(ValueError, match=r"^weight: "):
        product(hidden, weight[:, :7])
    with pytest.raises(TypeError, match="float16"):
        product(hidden, weight.half())
    with pytest.raises(ValueError, match=r"^weight: "):
        gated_product(hidden, weight)
