"""Norms that round their rows: the numbers of a norm, then of `round_rows_ref`."""

import pytest
import torch
from torch import Tensor

from dflash_kernels import launch_config
from dflash_kernels.fp8 import fp8_config
from dflash_kernels.fp8.fp8_config import fp8_product_shape
from dflash_kernels.fp8.fp8_norm import add_round_norm, add_round_norm_ref
from dflash_kernels.fp8.fp8_product import (
    fp8_gated_product,
    fp8_gated_product_ref,
    fp8_product,
    fp8_product_parts,
    launch_product,
    uses_fp8,
)
from dflash_kernels.fp8.fp8_weight import FP8, Fp8Weight, Rounded, round_rows_ref, rounded_ref, to_fp8
from dflash_kernels.norms.rope_norm import add_rms_norm
from dflash_testing.tensors import DEVICE, assert_rows_close, normal

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""The interpreter cannot compute in bfloat16."""

DYNAMIC, STATIC, NONE = "dynamic", "static", "none"
FORMS = [
    (512, (128, 128), DYNAMIC),
    (300, (128, 128), DYNAMIC),  # the last group is cut
    (40, (16, 16), DYNAMIC),
    (384, (1, 128), DYNAMIC),
    (1000, (1, 4096), DYNAMIC),
    (256, (64, 4096), STATIC),
]
"""Inner width, block with one scale, and rounding of activations."""


def weight(num_columns: int, depth: int, block: tuple[int, int], rounding: str = DYNAMIC) -> Fp8Weight:
    made = to_fp8(normal(num_columns, depth, seed=1) * depth**-0.5, block)
    fixed = {DYNAMIC: None, STATIC: torch.tensor([0.01], device=DEVICE), NONE: torch.zeros(0, device=DEVICE)}[rounding]
    return Fp8Weight(made.values, made.scales, fixed)


def assert_rounded(found: Rounded, plain: Tensor, reader: Fp8Weight) -> None:
    """The same numbers and scales as the reference makes of the plain rows."""
    wanted = round_rows_ref(plain, reader)
    assert torch.equal(found.plain, plain)
    assert torch.equal(found.rows.float(), wanted.rows.float())
    assert torch.equal(found.scales, wanted.scales)
    assert found.rows.dtype == (FP8 if uses_fp8(reader) else plain.dtype)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("width", "block", "rounding"), FORMS)
def test_a_norm_rounds_its_rows(num_rows: int, width: int, block: tuple[int, int], rounding: str) -> None:
    """The sum and the normalised rows are those of the norm without rounding. A row of zeros has the least scale."""
    parts, residual, scale = (
        normal(3, num_rows, width),
        normal(num_rows, width, dtype=DTYPE),
        normal(width, dtype=DTYPE),
    )
    parts[:, 0], residual[0] = 0, 0
    reader = weight(64, width, block, rounding)
    normed, total = add_rms_norm(parts, residual, scale, 1e-6)
    found, found_total = add_round_norm(parts, residual, scale, 1e-6, reader)
    assert torch.equal(found_total, total)
    assert_rounded(found, normed, reader)
    wanted, wanted_total = add_round_norm_ref(parts, residual, scale, 1e-6, reader)
    torch.testing.assert_close(found_total, wanted_total)
    torch.testing.assert_close(found.plain, wanted.plain)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 20])
@pytest.mark.parametrize(("width", "block", "rounding"), FORMS)
def test_rounded_rows_give_the_same_product(num_rows: int, width: int, block: tuple[int, int], rounding: str) -> None:
    """Bit for bit, if programs round in place or a launch rounds before."""
    parts, residual, scale = (
        normal(1, num_rows, width),
        normal(num_rows, width, dtype=DTYPE),
        normal(width, dtype=DTYPE),
    )
    reader = weight(96, width, block, rounding)
    rows, _ = add_round_norm(parts, residual, scale, 1e-6, reader)
    for is_gated in (False, True):  # the same tiles, so that sums have the same order
        shape = fp8_product_shape(
            num_rows, 96, width, reader.block[1], 4, DEVICE, has_parts=not is_gated, is_gated=is_gated
        )  # fmt: skip
        found, wanted = (
            launch_product(each, reader, shape, has_parts=not is_gated, is_gated=is_gated)
            for each in (rows, rows.plain)
        )
        assert torch.equal(found, wanted)


def test_products_read_rounded_rows() -> None:
    """With the tiles of rounded rows, the products of `round_rows_ref`."""
    for num_rows in (1, 16, 20):
        parts, residual, scale = normal(2, num_rows, 512), normal(num_rows, 512, dtype=DTYPE), normal(512, dtype=DTYPE)
        reader = weight(320, 512, (128, 128))
        rows, _ = add_round_norm(parts, residual, scale, 1e-6, reader)
        wanted = rounded_ref(rows, reader).double() @ reader.dequantised(torch.float64).T
        assert_rows_close(fp8_product(rows, reader), wanted, DTYPE)
        assert_rows_close(fp8_product_parts(rows, reader).sum(0).to(DTYPE), wanted, DTYPE)
        gated = fp8_gated_product_ref(rows, reader).double()
        assert_rows_close(fp8_gated_product(rows, reader), gated, DTYPE)


def test_arguments_that_do_not_fit_are_refused() -> None:
    parts, residual, scale = normal(1, 2, 64), normal(2, 64, dtype=DTYPE), normal(64, dtype=DTYPE)
    with pytest.raises(ValueError, match="reader"):
        add_round_norm(parts, residual, scale, 1e-6, weight(32, 128, (128, 128)))
    with pytest.raises(ValueError, match="rounded activations"):
        add_round_norm(parts, residual, scale, 1e-6, weight(32, 64, (1, 4096), NONE))
    rows, _ = add_round_norm(parts, residual, scale, 1e-6, weight(32, 64, (16, 16)))
    with pytest.raises(ValueError, match="rounded for the weight"):
        fp8_product_parts(rows, weight(32, 64, (32, 32)))
    with pytest.raises(ValueError, match="rounded for the weight"):
        fp8_product_parts(rows, weight(32, 64, (16, 16), NONE))
    assert len(add_round_norm(parts[:, :0], residual[:0], scale, 1e-6, weight(32, 64, (16, 16)))[0].rows) == 0


@pytest.mark.parametrize("num_rows", [1, 16])
def test_tiles_of_qwen3_8b_on_an_h200(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that `docs/measurements/products.md` names, columns x parts in stages."""
    monkeypatch.setattr(fp8_config, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch_config, "shared_memory", lambda device: 227 * 1024)
    sizes = {"qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 12288), "fc": (4096, 20480)}
    found = {
        name: fp8_product_shape(num_rows, columns, depth, 128, 2, DEVICE, has_parts=True, is_rounded=name == "qkv")
        for name, (columns, depth) in sizes.items()
    }
    tiles = {name: (shape.columns, shape.num_parts, shape.num_stages) for name, shape in found.items()}
    assert tiles == {"qkv": (128, 4, 4), "o": (128, 8, 4), "down": (128, 8, 4), "fc": (128, 8, 4)}
    gated = fp8_product_shape(num_rows, 12288, 4096, 128, 2, DEVICE, is_gated=True, is_rounded=True)
    assert (gated.rows, gated.columns, gated.num_stages, gated.num_warps) == (16, 64, 4, 4)
    assert all(shape.has_descriptors for shape in (*found.values(), gated))
