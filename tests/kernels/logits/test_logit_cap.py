"""Caps of logits in kernels: numbers equal torch's, and so do choices from capped logits."""

import math

import pytest
import torch

from dflash_kernels.launch import jit, tl
from dflash_kernels.launch_config import VOCAB_TILE
from dflash_kernels.logits.logit_cap import cap_logits, capped
from dflash_kernels.logits.sampling import sample, sample_ref
from dflash_testing.tensors import DEVICE, DTYPES, assert_mostly_equal, normal

pytestmark = pytest.mark.triton

CAP = 30.0
HALVES = DTYPES[1:]


@jit  # type: ignore[untyped-decorator]
def cap_kernel(logits, out, CAP: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Run `capped` alone. The kernels of the package call it inside other kernels."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    scores = capped(tl.load(logits + place).to(tl.float32), CAP, out.dtype.element_ty)
    tl.store(out + place, scores.to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_16_bits(dtype: torch.dtype) -> None:
    """The cap keeps the order of numbers."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(DEVICE)
    numbers[numbers.isnan()] = 0
    out = torch.empty_like(numbers)
    cap_kernel[(64,)](numbers, out, CAP=CAP, TILE=1024)
    wanted = cap_logits(numbers, CAP)
    if dtype == torch.bfloat16:
        assert torch.equal(out, wanted)
    assert_mostly_equal(out, wanted)  # on a GPU, torch multiplies by the reciprocal of the cap
    order = numbers.sort().indices
    assert (out[order].diff() >= 0).all()


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    """Rows with ties after the cap, with numbers that are not finite, and with logits below and above the cap."""
    rows = normal(9, 2 * VOCAB_TILE + 15, dtype=dtype) * torch.tensor([[1], [0.01], [20], [300], [3]] + [[5]] * 4).to(
        dtype
    ).to(DEVICE)
    rows[3] = 0
    rows[3:5, 77:6000] = 900.0
    rows[5, 8000] = math.inf
    rows[6, 100] = math.nan
    rows[7] = -math.inf
    rows[8] = -900.0
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_rows_equal_torch_on_capped_logits(dtype: torch.dtype) -> None:
    rows = rows_of(dtype)
    real, whole = torch.zeros(9, dtype=torch.float64, device=DEVICE), torch.zeros(9, dtype=torch.int64, device=DEVICE)
    given = (rows, real, whole, real + 1, whole, whole)
    found, wanted = (call(*given, is_greedy=True, cap=CAP) for call in (sample, sample_ref))
    assert torch.equal(found.is_finite, wanted.is_finite)
    assert torch.equal(found.token_ids[wanted.is_finite], wanted.token_ids[wanted.is_finite])
    assert wanted.token_ids[3] == 77
    assert wanted.is_finite.tolist() == [True] * 6 + [False, True, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_rows_are_drawn_from_capped_logits(dtype: torch.dtype) -> None:
    rows = rows_of(dtype)[:5]
    real, whole = torch.ones(5, dtype=torch.float64, device=DEVICE), torch.arange(5, device=DEVICE)
    given = (real, whole * 0, real, whole, whole)
    found, wanted = sample(rows, *given, cap=CAP), sample(cap_logits(rows, CAP), *given)
    assert torch.equal(found.token_ids, wanted.token_ids)
