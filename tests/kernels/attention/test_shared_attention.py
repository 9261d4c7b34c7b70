"""Attention of given rows equals attention of whole blocks with these rows."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention import block_attention as module
from dflash_kernels.attention.attention_config import AttentionShape, BalancedShape
from dflash_kernels.attention.block_attention import block_attention_ref
from dflash_kernels.attention.shared_attention import shared_attention, shared_attention_ref
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.steps.given_rows import give_rows_ref
from dflash_testing.tensors import DEVICE, SAMPLED_DTYPES, assert_rows_close, normal, random_pages

WIDTHS, BLOCK, PAGE = [1, 6, 3, 2, 6], 6, 16
LENS = [0, 1, PAGE + 1, 130, 90]


def rows_of(widths: list[int], block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as `give_rows_ref` gives them, for these widths."""
    place = torch.arange(block - 1, device=DEVICE)
    likely = (place + 1 < torch.tensor(widths, device=DEVICE)[:, None]).double()
    found = give_rows_ref(likely, sum(widths))
    assert found[0].tolist() == widths
    return found


def check(dtype: torch.dtype, window: int | None = None, softmax: Softmax = PLAIN) -> None:
    pages = random_pages(LENS, 2, 16, PAGE, dtype, 0)
    widths, places, sources = rows_of(WIDTHS, BLOCK)
    rows = normal(len(places), 8, 16, dtype=dtype, seed=1)  # views of one projection
    query, keys, values = rows.split((4, 2, 2), dim=1)
    cached = pages.key_cache, pages.value_cache, pages.page_table, pages.context_lens, widths, sources
    room = torch.full((len(places) + 1, 4, 16), torch.nan, dtype=dtype, device=DEVICE)
    out = shared_attention(query, keys, values, *cached, window=window, softmax=softmax, out=room[:-1])
    assert out.data_ptr() == room.data_ptr()
    assert room[-1].isnan().all(), "a row that was not given was written"
    expected = shared_attention_ref(
        query.double(), keys.double(), values.double(), *pages.clean(), pages.page_table, pages.context_lens, widths,
        sources, window=window, softmax=softmax,
    )  # fmt: skip
    assert_rows_close(out, expected, dtype)


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
@pytest.mark.parametrize("window", [None, 4])
def test_one_launch(dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "balanced_shape", lambda *_: None)
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 32, 1, 2))
    check(dtype, window)


@pytest.mark.parametrize("num_splits", [2, 5])
def test_parts_of_keys(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "balanced_shape", lambda *_: None)
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 32, num_splits, 2))
    check(torch.float32, softmax=Softmax(2.0, normal(4, seed=4)))


@pytest.mark.parametrize("num_whole", [0, 2])
def test_equal_work_for_all_programs(num_whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "balanced_shape", lambda *_: BalancedShape(16, 16, 3, 2, num_whole=num_whole))
    check(torch.float32)


@pytest.mark.reference
def test_the_reference_equals_blocks_of_each_request() -> None:
    pages = random_pages(LENS, 2, 16, PAGE, torch.float64, 0)
    widths, places, sources = rows_of(WIDTHS, BLOCK)
    query, keys, values = normal(len(places), 8, 16, dtype=torch.float64).split((4, 2, 2), dim=1)
    cached = (*pages.clean(), pages.page_table, pages.context_lens)
    found = shared_attention_ref(query, keys, values, *cached, widths, sources, window=None)
    begin = 0
    for request, width in enumerate(WIDTHS):
        own = slice(begin, begin + width)
        one = slice(request, request + 1)
        alone = block_attention_ref(
            query[None, own], keys[None, own], values[None, own], cached[0], cached[1], cached[2][one], cached[3][one],
            is_causal=True, window=None,
        )  # fmt: skip
        torch.testing.assert_close(found[own], alone[0])
        begin += width
