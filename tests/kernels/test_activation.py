"""The SwiGLU kernel: close to float64, with the roundings of the reference."""

import pytest
import torch

from dflash_kernels.activation import silu_mul, silu_mul_ref
from dflash_testing.tensors import DTYPES, assert_mostly_equal, assert_rows_close, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (7, 63), (3, 1025)])
def test_gate(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (normal(num_rows, 2 * width + 3, dtype=dtype) * 4)[:, 1 : 2 * width + 1]
    out = silu_mul(gate_up)
    assert_rows_close(out, silu_mul_ref(gate_up.double()), dtype)
    if dtype != torch.float32:
        assert_mostly_equal(out, silu_mul_ref(gate_up))


def test_gates_far_from_zero() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]], device=normal(1).device)
    assert silu_mul(gate_up).allclose(gate_up[:, :4].clamp(min=0), atol=1e-30)


def test_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^gate_up: "):
        silu_mul(normal(2, 7))
