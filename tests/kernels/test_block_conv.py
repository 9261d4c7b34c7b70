"""Convolutions along blocks equal their definition, and nothing crosses a block."""

import pytest
import torch

from dflash_kernels.block_conv import block_conv, block_conv_ref
from dflash_testing.tensors import DTYPES, assert_rows_close, normal


@pytest.mark.reference
def test_each_row_sums_the_rows_before_it_in_its_block() -> None:
    rows, kernel, dynamic = normal(6, 4), normal(3, 4, seed=1), normal(6, 3, 2, seed=2)
    found = block_conv_ref(rows, kernel, dynamic, 3)
    for row in range(6):
        for column in range(4):
            taps = range(row % 3 + 1)
            wanted = sum((kernel[s, column] + dynamic[row, s, column // 2]) * rows[row - s, column] for s in taps)
            torch.testing.assert_close(found[row, column], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_blocks", "num_rows", "taps", "groups", "width"),
    [(1, 1, 2, 1, 7), (3, 8, 2, 4, 64), (2, 3, 5, 15, 15), (1, 16, 3, 40, 2560)],
)
def test_the_kernel_equals_the_reference(
    num_blocks: int, num_rows: int, taps: int, groups: int, width: int, dtype: torch.dtype
) -> None:
    rows, kernel = normal(num_blocks * num_rows, width, dtype=dtype), normal(taps, width, dtype=dtype, seed=1)
    both = normal(num_blocks * num_rows, 2, taps, groups, dtype=dtype, seed=2)
    for side in (0, 1):  # views, as a projection to both sides gives them
        found = block_conv(rows, kernel, both[:, side], num_rows)
        exact = block_conv_ref(rows.double(), kernel.double(), both[:, side].double(), num_rows)
        assert_rows_close(found, exact, dtype)
    assert block_conv(rows[:0], kernel, both[:0, 0], num_rows).shape == (0, width)


def test_rows_of_another_block_are_not_read() -> None:
    """They hold NaN."""
    rows, kernel, dynamic = normal(8, 16), normal(4, 16, seed=1), normal(8, 4, 4, seed=2)
    wanted = block_conv(rows, kernel, dynamic, 4)[4:]
    rows[:4] = float("nan")
    assert torch.equal(block_conv(rows, kernel, dynamic, 4)[4:], wanted)


@pytest.mark.parametrize(
    ("field", "taps", "groups", "num_rows"), [("hidden", 2, 4, 3), ("kernel", 3, 4, 4), ("dynamic", 2, 5, 4)]
)
def test_wrong_shapes_are_refused(field: str, taps: int, groups: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match=field):
        block_conv(normal(8, 16), normal(taps, 16), normal(8, 2, groups), num_rows)
