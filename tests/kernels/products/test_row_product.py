"""Products of one row, in parts and gated: close to float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_kernels.launch_config import has_tile_loads, num_multiprocessors
from dflash_kernels.products import product as module
from dflash_kernels.products.activation import GELU, SILU, Gate, gate_ref
from dflash_kernels.products.product import gated_product, product_parts
from dflash_kernels.products.product_config import MANY_COLUMNS, MOST_ROW_TILES, ROW_DEPTH, row_shape
from dflash_kernels.products.row_product import cut_of_row, row_product
from dflash_testing.tensors import DEVICE, assert_rows_close, normal

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""The kernel is made for bfloat16, which the interpreter cannot multiply."""

needs_tile_loads = pytest.mark.skipif(not has_tile_loads(DEVICE), reason="the kernel is used on GPUs that load tiles")

PLACES = num_multiprocessors(DEVICE)
SIZES = [(1, 1), (64, 256), (70, 40), (96, 1100), (33, 2048), (32 * PLACES, 1000), (80 * PLACES, 130)]
"""Columns and inner width: whole tiles, tiles beyond columns and depth, and parts with few or no elements."""


def factors(num_columns: int, depth: int) -> tuple[Tensor, Tensor]:
    return normal(1, depth, dtype=DTYPE), normal(num_columns, depth, dtype=DTYPE, seed=1) * depth**-0.5


@needs_tile_loads
@pytest.mark.parametrize(("num_columns", "depth"), SIZES)
def test_parts_of_one_row(num_columns: int, depth: int) -> None:
    hidden, weight = factors(num_columns, depth)
    bias = normal(num_columns, dtype=DTYPE, seed=2)
    shape, exact = cut_of_row(hidden, weight), hidden.double() @ weight.double().T
    assert shape is not None
    parts = row_product(hidden, weight, shape)
    assert len(parts) == shape.num_parts
    assert parts.dtype == (DTYPE if len(parts) == 1 else torch.float32)
    assert_rows_close(parts.sum(0).to(DTYPE), exact, DTYPE)
    assert_rows_close(row_product(hidden, weight, shape, bias=bias).sum(0).to(DTYPE), exact + bias.double(), DTYPE)
    assert torch.equal(product_parts(hidden, weight), parts)
    beside = row_product(hidden, weight, shape, is_beside=True, lets_next_begin=False)
    assert torch.equal(beside, parts)


@needs_tile_loads
@pytest.mark.parametrize("gate", [SILU, GELU])
@pytest.mark.parametrize(("width", "depth"), [size for size in SIZES if size[0] <= 32 * PLACES])
def test_gated_product_of_one_row(width: int, depth: int, gate: Gate) -> None:
    hidden, weight = factors(2 * width, depth)
    wanted = gate_ref((hidden.double() @ weight.double().T).to(DTYPE).double(), gate)
    shape = cut_of_row(hidden, weight, is_gated=True)
    assert shape is not None
    assert_rows_close(row_product(hidden, weight, shape, gate=gate)[0], wanted, DTYPE)
    assert torch.equal(gated_product(hidden, weight, gate), row_product(hidden, weight, shape, gate=gate)[0])


@needs_tile_loads
def test_sums_are_cut_until_two_programs_share_each_multiprocessor() -> None:
    def num_parts(num_columns: int, depth: int) -> int:
        shape = row_shape(num_columns, depth, DEVICE)
        assert shape is not None
        return shape.num_parts

    assert num_parts(32, 16384) == 8
    assert num_parts(32 * PLACES, 8192) == 2
    assert num_parts(32 * PLACES + 32, 4096) == 1
    assert num_parts(32, 1000) == 1


@needs_tile_loads
def test_other_kernels_compute_long_sums_and_wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    deepest = MOST_ROW_TILES * ROW_DEPTH
    assert row_shape(64 * PLACES, deepest, DEVICE) is not None
    assert row_shape(64 * PLACES, deepest + 1, DEVICE) is None
    assert row_shape(MANY_COLUMNS, 128, DEVICE) is None
    assert row_shape(32 * PLACES, 128, DEVICE, is_gated=True) is not None
    assert row_shape(32 * PLACES + 1, 128, DEVICE, is_gated=True) is None
    assert cut_of_row(normal(2, 8, dtype=DTYPE), normal(3, 8, dtype=DTYPE)) is None
    monkeypatch.setattr(module, "row_product", None)
    hidden, weight = factors(64 * PLACES, deepest + 8)
    assert_rows_close(product_parts(hidden, weight).sum(0).to(DTYPE), hidden.double() @ weight.double().T, DTYPE)


@needs_tile_loads
def test_the_row_may_be_a_view() -> None:
    wide, weight = normal(3, 64, dtype=DTYPE), normal(40, 32, dtype=DTYPE, seed=1)
    hidden = wide[1:2, 32:]
    assert_rows_close(product_parts(hidden, weight).sum(0).to(DTYPE), hidden.double() @ weight.double().T, DTYPE)


@needs_tile_loads
@pytest.mark.parametrize("call", [product_parts, gated_product])
def test_arguments_that_do_not_fit_together_are_refused(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    hidden, weight = normal(1, 8, dtype=DTYPE), normal(3, 8, dtype=DTYPE)
    with pytest.raises(ValueError, match=r"^weight: "):
        call(hidden, weight[:, :7])
    with pytest.raises(TypeError, match="float16"):
        call(hidden, weight.half())
