"""Norms around a sublayer: close to float64, with the roundings of the reference."""

from typing import Any

import pytest
import torch

from dflash_kernels.norms.rope_norm import rms_norm_ref
from dflash_kernels.norms.sandwich_norm import Beside, sandwich_norm, sandwich_norm_ref
from dflash_testing.tensors import DEVICE, DTYPES, assert_mostly_equal, assert_rows_close, normal


def arguments(
    num_rows: int, width: int, dtype: torch.dtype, *, num_norms: int, has_scale: bool, num_beside: int
) -> dict[str, Any]:
    """Parts whose sums are exact, so that only the norms round."""
    parts = (
        normal(2, num_rows, width).bfloat16().float()
        if dtype == torch.float32
        else normal(1, num_rows, width, dtype=dtype)
    )
    beside = None
    if num_beside:
        second = normal(num_beside, num_rows, width, seed=5).bfloat16().to(dtype)
        beside = Beside(second, normal(width, seed=6) + 1, normal(width, seed=7) + 1)
    return {
        "parts": parts, "residual": normal(num_rows, width, dtype=dtype, seed=1), "inner": normal(width, seed=2) + 1,
        "outer": normal(num_norms, width, seed=3) + 1, "eps": 1e-6,
        "scale": torch.tensor([0.7], dtype=dtype, device=DEVICE) if has_scale else None, "beside": beside,
    }  # fmt: skip


def widened(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in float64."""
    wide = {name: item.double() if isinstance(item, torch.Tensor) else item for name, item in given.items()}
    if given["beside"] is not None:
        wide["beside"] = Beside(*(item.double() for item in given["beside"]))
    return wide


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "width", "num_norms", "has_scale", "num_beside"),
    [(1, 8, 1, False, 0), (3, 65, 3, False, 0), (2, 257, 1, True, 0), (3, 130, 1, True, 2)],
)
def test_both_norms(
    num_rows: int, width: int, num_norms: int, has_scale: bool, num_beside: int, dtype: torch.dtype
) -> None:
    given = arguments(num_rows, width, dtype, num_norms=num_norms, has_scale=has_scale, num_beside=num_beside)
    normed, total = sandwich_norm(**given)
    exact = sandwich_norm_ref(**widened(given))
    assert normed.shape == (num_norms, num_rows, width)
    assert_rows_close(total, exact[1], dtype)
    for index in range(num_norms):
        assert_rows_close(normed[index], rms_norm_ref(total.double(), given["outer"][index].double(), 1e-6), dtype)
    if dtype != torch.float32:
        wanted = sandwich_norm_ref(**given)
        assert_mostly_equal(total, wanted[1])
        assert_mostly_equal(normed, wanted[0])


@pytest.mark.triton
def test_norms_of_another_width_are_refused() -> None:
    given = arguments(2, 16, torch.float32, num_norms=1, has_scale=False, num_beside=0)
    with pytest.raises(ValueError, match=r"^norms: "):
        sandwich_norm(**{**given, "inner": normal(15)})
