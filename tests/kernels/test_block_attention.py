"""Attention of a block over pages and itself, against the reference in float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_kernels import block_attention as module
from dflash_kernels.block_attention import PLAIN, Softmax, block_attention, block_attention_ref
from dflash_kernels.launch_config import FEW_KEYS, AttentionShape, BalancedShape, num_multiprocessors
from dflash_testing.tensors import (
    DEVICE,
    DTYPES,
    SOFTMAXES,
    Pages,
    assert_rows_close,
    normal,
    random_pages,
    random_softmax,
)

PAGE = 16
LENS = [0, 1, PAGE - 1, PAGE + 1, 130]


def check(
    pages: Pages, num_rows: int, num_heads: int, *, is_causal: bool, window: int | None, softmax: Softmax = PLAIN,
) -> Tensor:  # fmt: skip
    num_kv, head_dim = pages.key_cache.shape[2:]
    dtype = pages.key_cache.dtype
    lens = pages.context_lens
    query = normal(len(lens), num_rows, num_heads, head_dim, dtype=dtype, seed=1)
    kv = normal(len(lens), num_rows, 2 * num_kv, head_dim, dtype=dtype, seed=2)  # views of one projection
    keys, values = kv[:, :, :num_kv], kv[:, :, num_kv:]
    out = block_attention(
        query, keys, values, pages.key_cache, pages.value_cache, pages.page_table, lens,
        is_causal=is_causal, window=window, softmax=softmax,
    )  # fmt: skip
    expected = block_attention_ref(
        query.double(), keys.double(), values.double(), *pages.clean(), pages.page_table, lens,
        is_causal=is_causal, window=window, softmax=softmax,
    )  # fmt: skip
    assert_rows_close(out, expected, dtype)
    return out


def either_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision takes parts of each request, and single, by the rule of shapes, shares of all where it may."""
    if dtype == torch.float16:
        monkeypatch.setattr(module, "balanced_shape", lambda *_: None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 9, 100])
def test_masks_and_lengths(
    window: int | None, is_causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    either_kernel(dtype, monkeypatch)
    check(random_pages(LENS, 2, 16, PAGE, dtype, 0), 7, 4, is_causal=is_causal, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 15, 31, 63])
@pytest.mark.parametrize(("num_heads", "num_kv"), [(1, 1), (6, 2), (5, 1)])
def test_rows_and_groups(num_rows: int, num_heads: int, num_kv: int, dtype: torch.dtype) -> None:
    check(random_pages([33], num_kv, 16, PAGE, dtype, 1), num_rows, num_heads, is_causal=True, window=None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 24, 80, 128, 256, 512])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    check(random_pages([40], 1, head_dim, PAGE, dtype, 2), 5, 2, is_causal=False, window=None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 5, 64, 256])
@pytest.mark.parametrize("arrangement", ["alone", "between layers"])
def test_page_sizes(arrangement: str, page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    either_kernel(dtype, monkeypatch)
    lens = [0, page_size - 1, page_size, page_size + 1, 2 * page_size]
    pages = random_pages(lens, 2, 16, page_size, dtype, 3, arrangement=arrangement)
    check(pages, 3, 2, is_causal=False, window=None)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 20, 64])
def test_blocks_of_many_tiles(is_causal: bool, window: int | None) -> None:
    """Prefill: rows and keys of the block both span several tiles, and windows skip some of them."""
    check(random_pages([150], 1, 16, PAGE, torch.float32, 4), 200, 1, is_causal=is_causal, window=window)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("window", [None, 70])
def test_any_number_of_parts(num_splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than tiles, too: a part may be empty, and a part may see nothing for some of its rows."""
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 32, num_splits, 2))
    check(random_pages([0, 70, 250], 1, 16, PAGE, torch.float32, 5), 5, 2, is_causal=False, window=window)


@pytest.mark.parametrize("num_splits", [4, 5])
def test_all_parts_walk_where_there_are_many_tiles(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides of where half of them stop doing so, beside each other in one launch."""
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 16, num_splits, 2))
    border = FEW_KEYS.value * num_splits
    lens = [0, border - 32, border - 17, border - 16, border + 40]
    check(random_pages(lens, 1, 16, PAGE, torch.float32, 5), 3, 2, is_causal=True, window=None)


@pytest.mark.parametrize("num_splits", [3, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_row_tiles_of_unlike_parts(num_splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later rows of a block see more keys: theirs are cut into more parts, and as many are added up."""
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 16, num_splits, 2))
    check(random_pages([0, 5], 1, 16, PAGE, torch.float32, 5), 60, 2, is_causal=True, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("is_causal", "window"), [(True, None), (False, 9), (True, 9)])
@pytest.mark.parametrize("kind", SOFTMAXES)
def test_sinks_and_caps(
    kind: str, is_causal: bool, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    either_kernel(dtype, monkeypatch)
    pages, softmax = random_pages(LENS, 2, 16, PAGE, dtype, 7), random_softmax(kind, 6, dtype)
    check(pages, 7, 6, is_causal=is_causal, window=window, softmax=softmax)


@pytest.mark.parametrize("num_splits", [2, 16])
@pytest.mark.parametrize("window", [None, 70])
def test_sinks_count_once_in_any_number_of_parts(
    num_splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first parts are empty where there are more parts than tiles, and the last may see nothing for some rows."""
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 32, num_splits, 2))
    pages = random_pages([0, 70, 250], 1, 16, PAGE, torch.float32, 5)
    check(pages, 10, 2, is_causal=True, window=window, softmax=random_softmax("both", 2))


def shares_of(num_programs: int, rows: int = 16) -> Callable[..., BalancedShape]:
    return lambda *_: BalancedShape(rows, 16, num_programs, 2, 8)


ANY_DTYPE = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", ANY_DTYPE)
@pytest.mark.parametrize(
    ("num_programs", "is_causal", "window"),
    [(2, True, None), (3, False, None), (7, True, 70), (7, False, 70), (40, False, None), (40, True, 70)],
)
def test_equal_shares_of_all_requests(
    num_programs: int, is_causal: bool, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares that begin and end anywhere in a request, hold several whole ones, or a part of one; and with many
    programs some that have nothing to do.
    """
    monkeypatch.setattr(module, "balanced_shape", shares_of(num_programs))
    pages = random_pages([0, 70, 250, 15, 16, 330, 1], 1, 16, PAGE, dtype, 5)
    check(pages, 7, 3, is_causal=is_causal, window=window)


@pytest.mark.parametrize("dtype", ANY_DTYPE)
@pytest.mark.parametrize("lengths", [[100, 70, 90, 110, 99], [100, 0, 90, 110, 330]], ids=["alike", "unlike"])
@pytest.mark.parametrize(("num_programs", "num_whole"), [(5, 1), (3, 2), (7, 1), (1, 5)])
@pytest.mark.parametrize("window", [None, 30])
def test_whole_requests_where_they_are_alike(
    num_programs: int,
    num_whole: int,
    lengths: list[int],
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several row tiles, the last program with fewer requests or none; and equal shares where they are not alike."""
    shape = replace(shares_of(num_programs)(), num_whole=num_whole)
    monkeypatch.setattr(module, "balanced_shape", lambda *_: shape)
    pages = random_pages(lengths, 2, 16, PAGE, dtype, 7)
    check(pages, 9, 6, is_causal=True, window=window)


@pytest.mark.parametrize("dtype", ANY_DTYPE)
@pytest.mark.parametrize("kind", SOFTMAXES)
def test_sinks_and_caps_in_equal_shares(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several row tiles and KV heads; the sink counts once, in whatever part ends a request."""
    for num_whole in (0, 2):
        shape = replace(shares_of(3)(), num_whole=num_whole)
        monkeypatch.setattr(module, "balanced_shape", lambda *_, shape=shape: shape)
        for lengths in ([3, 100, 64, 0], [60, 61, 64, 40]):
            pages = random_pages(lengths, 2, 16, PAGE, dtype, 7)
            check(pages, 9, 6, is_causal=True, window=None, softmax=random_softmax(kind, 6, dtype))


@pytest.mark.parametrize("shape", [None, BalancedShape(16, 16, 3, 2, 8)], ids=["parts", "shares"])
def test_pages_whose_numbers_32_bits_cannot_count(shape: BalancedShape | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "balanced_shape", lambda *_: shape)
    pages = random_pages([17, 40], 2, 16, PAGE, torch.float16, 3, arrangement="far apart")
    check(pages, 3, 2, is_causal=True, window=None)


def test_many_requests_share_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule of shapes, and nothing is left to the other kernel."""
    monkeypatch.setattr(module, "attention_shape", None)
    pages = random_pages(
        [5 * index % 47 for index in range(4 * num_multiprocessors(DEVICE) + 1)], 1, 16, PAGE, torch.float32, 8
    )
    check(pages, 1, 4, is_causal=True, window=None)


def test_a_wider_page_table_changes_nothing() -> None:
    """A captured graph sees the widest table; entries past a request's pages may be anything."""
    narrow = random_pages([40, 3], 1, 16, PAGE, torch.float32, 6)
    out = check(narrow, 3, 2, is_causal=False, window=None)
    garbage = torch.full((2, 40), 2**40, device=out.device)
    narrow.page_table = torch.cat((narrow.page_table, garbage), 1)
    query, kv = normal(2, 3, 2, 16, seed=1), normal(2, 3, 2, 16, seed=2)
    wide = block_attention(
        query, kv[:, :, :1], kv[:, :, 1:], narrow.key_cache, narrow.value_cache, narrow.page_table,
        narrow.context_lens, is_causal=False, window=None,
    )  # fmt: skip
    assert torch.allclose(wide, out, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    pages = random_pages([3], 2, 16, PAGE, torch.float32, 0)
    with pytest.raises(ValueError, match="^query: "):
        check(pages, 2, 3, is_causal=True, window=None)
    with pytest.raises(ValueError, match="^window: "):
        check(pages, 2, 4, is_causal=True, window=0)
    with pytest.raises(ValueError, match=r"^softmax\.cap: "):
        check(pages, 2, 4, is_causal=True, window=None, softmax=Softmax(cap=0.0))
    with pytest.raises(ValueError, match=r"^softmax\.sinks: "):
        check(pages, 2, 4, is_causal=True, window=None, softmax=random_softmax("sinks", 2))
    unlike = replace(pages, key_cache=pages.key_cache.contiguous())
    with pytest.raises(ValueError, match="^caches: "):
        check(unlike, 2, 4, is_causal=True, window=None)
    pages.key_cache = pages.key_cache.double()
    with pytest.raises(TypeError):
        check(pages, 2, 4, is_causal=True, window=None)


def test_more_requests_than_a_grid_has_room_for_are_refused() -> None:
    query = torch.zeros(40_000, 1, 2, 16)
    cache = torch.zeros(1, 4, 2, 16)
    lens = torch.zeros(40_000, dtype=torch.int64)
    tensors = [tensor.to(DEVICE) for tensor in (query, query, query, cache, cache, lens[:, None], lens)]
    with pytest.raises(ValueError, match="65535"):
        block_attention(*tensors, is_causal=True, window=None)
