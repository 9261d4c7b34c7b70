"""The best tokens of a row are found among few groups, and ties go to the lowest ids."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.logits.top_tokens import (
    MOST_TOP_TOKENS,
    likely_tokens,
    likely_tokens_ref,
    top_tokens,
    top_tokens_ref,
)
from dflash_testing.tensors import DEVICE, DTYPES, normal


def by_sorting(logits: Tensor, count: int) -> Tensor:
    clean = torch.where(logits.isnan(), -torch.inf, logits)
    return clean.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values


def check(logits: Tensor, count: int) -> None:
    token_ids, values = top_tokens(logits, count)
    wanted, wanted_values = top_tokens_ref(logits, count)
    assert torch.equal(wanted, by_sorting(logits, count))
    assert torch.equal(token_ids, wanted)
    assert values.dtype == logits.dtype
    assert torch.equal(values, wanted_values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab", "count"), [(1, 1, 1), (3, 61, 16), (2, 5000, 16), (2, 9000, 5)])
def test_the_kernel_equals_the_reference(rows: int, vocab: int, count: int, dtype: torch.dtype) -> None:
    check(normal(rows, vocab, dtype=dtype), count)
    check(normal(rows, 2 * vocab, dtype=dtype, seed=1)[:, :vocab], count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_ids(dtype: torch.dtype) -> None:
    """Also if more groups reach the bound than are read."""
    few = torch.randint(0, 4, (4, 6000), generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    few[1] = 1
    few[2, 3000:] = -torch.inf
    few[3] = -torch.inf
    for count in (1, 16, 17):
        check(few, count)


def test_infinities_zeros_and_nan() -> None:
    rows = normal(4, 700)
    rows[0, ::3], rows[1, 5:690] = torch.nan, torch.nan
    rows[2, 600:], rows[3] = torch.inf, 0.0
    rows[3, ::2] = -0.0
    check(rows, 16)


def log_probs_by_sorting(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the tokens with the highest logits, from a sort of whole rows in float64."""
    order = torch.where(logits.isnan(), -torch.inf, logits).sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count], logits.double().log_softmax(-1).gather(1, order[:, :count])


@pytest.mark.parametrize("call", [pytest.param(likely_tokens_ref, marks=pytest.mark.reference), likely_tokens])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (700, 15), (9000, 3), (3000, MOST_TOP_TOKENS + 1)])
def test_likely_tokens_rank_by_logit_then_by_id(call: object, vocab: int, count: int, dtype: torch.dtype) -> None:
    """Rows with a stride, rows with ties at the end of the list, and three rows with probabilities of NaN."""
    logits = (4 * normal(7, vocab + 3, dtype=dtype))[:, :vocab]
    logits[1] = logits[1].round()
    logits[2, vocab // 2 :] = -torch.inf
    logits[2, 0], logits[3] = 30.0, 0.0
    logits[4], logits[5, -1], logits[6, -1] = -torch.inf, torch.nan, torch.inf
    token_ids, log_probs = call(logits, count)  # type: ignore[operator]
    wanted_ids, wanted = log_probs_by_sorting(logits, count)
    wanted[4:] = torch.nan
    assert torch.equal(token_ids, wanted_ids)
    torch.testing.assert_close(log_probs, wanted.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("call", [top_tokens, pytest.param(top_tokens_ref, marks=pytest.mark.reference)])
def test_more_tokens_than_the_kernels_find(call: object) -> None:
    rows, count = normal(2, 3000), MOST_TOP_TOKENS + 36
    assert torch.equal(call(rows, count)[0], by_sorting(rows, count))  # type: ignore[operator]


def test_wrong_arguments_are_refused() -> None:
    for count in (0, 11):
        with pytest.raises(ValueError, match="count"):
            top_tokens(normal(2, 10), count)
    with pytest.raises(ValueError, match="logits"):
        top_tokens(normal(10, 2).t(), 1)
