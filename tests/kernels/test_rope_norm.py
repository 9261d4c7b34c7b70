"""Norms and rotation: close to float64, and rounded where the references round."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.rope_norm import (
    add_rms_norm,
    add_rms_norm_ref,
    qk_norm_rope,
    qk_norm_rope_ref,
    rms_norm,
    rms_norm_ref,
)
from dflash_testing.tensors import DTYPES, assert_mostly_equal, assert_rows_close, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 15), (2, 3, 63), (5, 128), (3, 2560)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    hidden, weight = normal(*shape, dtype=dtype) * 3, normal(shape[-1], dtype=dtype, seed=1)
    out = rms_norm(hidden, weight, 1e-6)
    assert_rows_close(out, rms_norm_ref(hidden.double(), weight.double(), 1e-6), dtype)
    if dtype != torch.float32:
        assert_mostly_equal(out, rms_norm_ref(hidden, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (7, 31), (2, 3, 64), (3, 2560)])
def test_add_and_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    hidden, residual = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    weight = normal(shape[-1], dtype=dtype, seed=2)
    kept = residual.clone()
    normed, total = add_rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(residual, kept)
    assert torch.equal(total, hidden + residual)
    assert_rows_close(normed, add_rms_norm_ref(total.double(), 0 * total.double(), weight.double(), 1e-5)[0], dtype)
    if dtype != torch.float32:
        assert_mostly_equal(normed, add_rms_norm_ref(hidden, residual, weight, 1e-5)[0])


def test_norm_of_views_reads_the_right_rows() -> None:
    wide = normal(4, 6, 40)
    weight = normal(8, seed=1)
    view = wide[:, 1:5, 8:16]
    assert_rows_close(rms_norm(view, weight, 1e-6), rms_norm_ref(view.double(), weight.double(), 1e-6), torch.float32)


def rope_tables(num_rows: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As a model looks them up: rows of one table, by position."""
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = (torch.arange(num_rows, dtype=torch.float64) * 37 + 5)[:, None] * inverse
    angles = torch.cat((angles, angles), -1).to(normal(1).device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["none", "shared", "one a head"])
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "head_dim"), [(1, 1, 8), (7, 3, 12), (3, 9, 80), (15, 4, 128), (2, 16, 256)]
)
def test_norm_and_rope(num_rows: int, num_heads: int, head_dim: int, norm: str, dtype: torch.dtype) -> None:
    projected = normal(num_rows, num_heads + 2, head_dim, dtype=dtype) * 2
    heads = projected[:, 1:-1]
    shape = (num_heads, head_dim) if norm == "one a head" else (head_dim,)
    weight = normal(*shape, dtype=dtype, seed=1) if norm != "none" else None
    cos, sin = rope_tables(num_rows, head_dim, dtype)
    out = qk_norm_rope(heads, weight, 1e-6, cos, sin)
    exact = qk_norm_rope_ref(
        heads.double(), None if weight is None else weight.double(), 1e-6, cos.double(), sin.double()
    )
    assert_rows_close(out, exact, dtype)
    if dtype != torch.float32:
        assert_mostly_equal(out, qk_norm_rope_ref(heads, weight, 1e-6, cos, sin))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        rms_norm(normal(2, 8).double(), normal(8).double(), 1e-6)
    with pytest.raises(TypeError, match="in one launch"):
        rms_norm(normal(2, 8), normal(8).half(), 1e-6)
    with pytest.raises(ValueError, match="8 elements"):
        rms_norm(normal(2, 8), normal(7), 1e-6)
    with pytest.raises(ValueError, match="even"):
        qk_norm_rope(normal(2, 1, 7), None, 1e-6, normal(2, 7), normal(2, 7))
