"""Convolutions along blocks equal their definition, and nothing crosses a block."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.drafts.block_conv import block_conv, block_conv_ref, conv_add_norm, conv_add_norm_ref
from dflash_testing.tensors import DTYPES, assert_rows_close, normal


@pytest.mark.reference
def test_each_row_sums_the_rows_before_it_in_its_block() -> None:
    rows, kernel, dynamic = normal(6, 4), normal(3, 4, seed=1), normal(6, 3, 2, seed=2)
    found = block_conv_ref(rows, kernel, torch.stack((dynamic / 4, dynamic * 3 / 4)), 3)
    for row in range(6):
        for column in range(4):
            taps = range(row % 3 + 1)
            wanted = sum((kernel[s, column] + dynamic[row, s, column // 2]) * rows[row - s, column] for s in taps)
            torch.testing.assert_close(found[row, column], wanted)


CASES = [
    (1, 1, 1, 2, 1, 7),
    (3, 8, 2, 2, 4, 64),
    (2, 3, 1, 5, 15, 15),
    (1, 16, 3, 3, 40, 2560),
]
"""Blocks, rows of a block, parts, taps, groups, width."""


def inputs(case: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in parts, the kernels of both sides, and what rows add to these kernels."""
    num_blocks, num_rows, num_parts, taps, groups, width = case
    count, parts_dtype = num_blocks * num_rows, dtype if num_parts == 1 else torch.float32
    rows = normal(num_parts, count, width, dtype=parts_dtype)
    kernels = normal(2, taps, width, dtype=dtype, seed=1)
    return rows, kernels, normal(num_parts, count, 2, taps, groups, dtype=parts_dtype, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_equal_the_references(case: tuple[int, ...], dtype: torch.dtype) -> None:
    parts, kernels, both = inputs(case, dtype)
    rows, num_rows, width = parts.sum(0).to(dtype), case[1], case[-1]
    residual, weight = normal(len(rows), width, dtype=dtype, seed=3), normal(width, dtype=dtype, seed=4)
    for side in (0, 1):  # views, as a projection to both sides gives them
        kernel, dynamic = kernels[side], both[:, :, side]
        exact = block_conv_ref(rows.double(), kernel.double(), dynamic.double(), num_rows)
        assert_rows_close(block_conv(rows, kernel, dynamic, num_rows), exact, dtype)
        found = conv_add_norm(parts, kernel, dynamic, num_rows, residual, weight, 1e-6)
        wide = (item.double() for item in (parts, kernel, dynamic, residual, weight))
        rounded, factor, added, stream, scale = wide
        wanted = conv_add_norm_ref(rounded, factor, added, num_rows, stream, scale, 1e-6)
        for got, expected in zip(found, wanted, strict=True):
            assert_rows_close(got, expected, dtype)
    empty = residual[:0]
    assert block_conv(rows[:0], kernels[0], both[:, :0, 0], num_rows).shape == (0, width)
    assert conv_add_norm(parts[:, :0], kernels[0], both[:, :0, 0], num_rows, empty, weight, 1e-6)[0].shape == (0, width)


def test_rows_of_another_block_are_not_read() -> None:
    """They hold NaN."""
    rows, kernel, dynamic = normal(8, 16), normal(4, 16, seed=1), normal(1, 8, 4, 4, seed=2)
    residual, weight = normal(8, 16, seed=3), normal(16, seed=4)

    def call() -> tuple[Tensor, ...]:
        both = conv_add_norm(rows[None], kernel, dynamic, 4, residual, weight, 1e-6)
        return block_conv(rows, kernel, dynamic, 4)[4:], both[0][4:], both[1][4:]

    wanted = call()
    rows[:4] = float("nan")
    assert all(torch.equal(found, expected) for found, expected in zip(call(), wanted, strict=True))


@pytest.mark.parametrize(
    ("field", "taps", "groups", "num_rows"), [("hidden", 2, 4, 3), ("kernel", 3, 4, 4), ("dynamic", 2, 5, 4)]
)
def test_wrong_shapes_are_refused(field: str, taps: int, groups: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match=field):
        block_conv(normal(8, 16), normal(taps, 16), normal(1, 8, 2, groups), num_rows)
