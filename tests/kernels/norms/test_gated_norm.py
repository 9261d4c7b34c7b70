"""The norm of a recurrent layer's heads, and the gates of both kinds of layers, equal their references."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.norms.gated_norm import gated_norm, gated_norm_ref
from dflash_kernels.norms.output_gate import output_gate, output_gate_ref
from dflash_testing.tensors import DTYPES, assert_mostly_equal, assert_rows_close, normal


def joined(rows: Tensor, left: int) -> Tensor:
    """Rows as a view of wider rows: NaN on the left and on the right."""
    sides = (torch.full_like(rows[..., :1], torch.nan).expand(*rows.shape[:-1], width) for width in (left, 3))
    return torch.cat((next(sides), rows, next(sides)), -1)[..., left : left + rows.shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "heads", "width"), [(1, 32, 128), (5, 3, 24)])
def test_gated_norm(dtype: torch.dtype, count: int, heads: int, width: int) -> None:
    rows, gate = normal(count, heads, width, dtype=dtype), joined(normal(count, heads * width, dtype=dtype, seed=1), 8)
    weight = normal(width, dtype=dtype, seed=2)
    found = gated_norm(rows, gate, weight, 1e-6)
    wide = rows.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert_rows_close(found, normed.flatten(1) * functional.silu(gate.double()), dtype)
    if dtype != torch.float32:
        assert_mostly_equal(found, gated_norm_ref(rows, gate, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_output_gate(dtype: torch.dtype, num_parts: int) -> None:
    rows = normal(5, 1500, dtype=dtype)
    parts = joined(normal(num_parts, 5, 1500, dtype=dtype if num_parts == 1 else torch.float32, seed=1), 16)
    found = output_gate(rows, parts)
    assert_rows_close(found, rows.double() * parts.double().sum(0).sigmoid(), dtype)
    if dtype != torch.float32:
        assert_mostly_equal(found, output_gate_ref(rows, parts))
