"""The SwiGLU kernel: close to float64, with the roundings of the reference."""

import pytest
import torch

from dflash_kernels.products.activation import GELU, Gate, gate_ref, silu_mul, silu_mul_ref
from dflash_testing.tensors import DTYPES, assert_mostly_equal, assert_rows_close, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (7, 63), (3, 1025)])
def test_gate(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (normal(num_rows, 2 * width + 3, dtype=dtype) * 4)[:, 1 : 2 * width + 1]
    out = silu_mul(gate_up)
    assert_rows_close(out, silu_mul_ref(gate_up.double()), dtype)
    if dtype != torch.float32:
        assert_mostly_equal(out, silu_mul_ref(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [GELU, Gate("clamped", alpha=1.702, limit=3.0)], ids=lambda gate: gate.kind)
def test_other_gates(gate: Gate, dtype: torch.dtype) -> None:
    gate_up = normal(7, 2 * 63, dtype=dtype) * 4
    out = silu_mul(gate_up, gate)
    assert_rows_close(out, gate_ref(gate_up.double(), gate), dtype)
    if dtype != torch.float32:  # far below zero, torch's gelu loses the last digits of a small difference
        assert_mostly_equal(silu_mul(gate_up / 4, gate), gate_ref(gate_up / 4, gate))


def test_gates_far_from_zero() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]], device=normal(1).device)
    assert silu_mul(gate_up).allclose(gate_up[:, :4].clamp(min=0), atol=1e-30)


def test_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^gate_up: "):
        silu_mul(normal(2, 7))
