"""Block attention kernels against the float64 reference."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention import block_attention as module
from dflash_kernels.attention.attention_config import FEW_KEYS, AttentionShape, BalancedShape
from dflash_kernels.attention.block_attention import block_attention, block_attention_ref
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.launch_config import num_multiprocessors
from dflash_testing.tensors import (
    DEVICE,
    DTYPES,
    SAMPLED_DTYPES,
    SOFTMAXES,
    Pages,
    assert_rows_close,
    normal,
    random_pages,
    random_softmax,
    sampled,
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
    """Use the kernel with parts of each request for float16, and the kernel that the shapes select for float32."""
    if dtype == torch.float16:
        monkeypatch.setattr(module, "balanced_shape", lambda *_: None)


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 9, 100])
def test_masks_and_lengths(
    window: int | None, is_causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    either_kernel(dtype, monkeypatch)
    check(random_pages(LENS, 2, 16, PAGE, dtype, 0), 7, 4, is_causal=is_causal, window=window)


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
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
    """As in prefill: rows and keys of the block span several tiles, and windows skip some of them."""
    check(random_pages([150], 1, 16, PAGE, torch.float32, 4), 200, 1, is_causal=is_causal, window=window)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("window", [None, 70])
def test_any_number_of_parts(num_splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also more parts than tiles: a part may be empty, or some of its rows may see no key."""
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 32, num_splits, 2))
    check(random_pages([0, 70, 250], 1, 16, PAGE, torch.float32, 5), 5, 2, is_causal=False, window=window)


@pytest.mark.parametrize("num_splits", [4, 5])
def test_half_of_the_parts_are_used_for_short_contexts(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch has contexts just below and above the length from which on all parts are used."""
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 16, num_splits, 2))
    border = FEW_KEYS.value * num_splits
    lens = [0, border - 32, border - 17, border - 16, border + 40]
    check(random_pages(lens, 1, 16, PAGE, torch.float32, 5), 3, 2, is_causal=True, window=None)


@pytest.mark.parametrize("num_splits", [3, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_row_tiles_with_different_numbers_of_parts(
    num_splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later rows of a block see more keys, so their keys are cut into more parts."""
    monkeypatch.setattr(module, "attention_shape", lambda *_: AttentionShape(16, 16, num_splits, 2))
    check(random_pages([0, 5], 1, 16, PAGE, torch.float32, 5), 60, 2, is_causal=True, window=window)


@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
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
    """With more parts than tiles, the first parts are empty. Some rows may see no key of the last part."""
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
    """Shares begin and end anywhere in a request. They have several requests or a part of one, or are empty."""
    monkeypatch.setattr(module, "balanced_shape", shares_of(num_programs))
    pages = random_pages([0, 70, 250, 15, 16, 330, 1], 1, 16, PAGE, dtype, 5)
    check(pages, 7, 3, is_causal=is_causal, window=window)


SIMILAR, DIFFERENT = (100, 70, 90, 110, 99), (100, 0, 90, 110, 330)
CUTS = [(5, 1), (3, 2), (7, 1), (1, 5)]
SINGLE = torch.float32


@pytest.mark.parametrize(
    ("dtype", "lengths", "cut", "window"),
    sampled(
        product((SINGLE, torch.bfloat16), (SIMILAR, DIFFERENT), CUTS, (None, 30)),
        [
            *[(SINGLE, SIMILAR, cut, window) for cut, window in zip(CUTS, (None, 30, None, 30), strict=True)],
            (SINGLE, DIFFERENT, (5, 1), 30),
            (SINGLE, DIFFERENT, (3, 2), None),
        ],
    ),
)
def test_programs_take_whole_requests_of_similar_lengths(
    cut: tuple[int, int], lengths: tuple[int, ...], window: int | None, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With several row tiles, and with fewer or no requests for the last program; otherwise they take equal shares."""
    num_programs, num_whole = cut
    shape = replace(shares_of(num_programs)(), num_whole=num_whole)
    monkeypatch.setattr(module, "balanced_shape", lambda *_: shape)
    pages = random_pages(list(lengths), 2, 16, PAGE, dtype, 7)
    check(pages, 9, 6, is_causal=True, window=window)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    sampled(product((SINGLE, torch.bfloat16), SOFTMAXES), [(SINGLE, "both"), (SINGLE, "wide cap")]),
)
def test_sinks_and_caps_in_equal_shares(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several row tiles and KV heads. The sink counts once, in the part that ends a request."""
    for num_whole in (0, 2):
        shape = replace(shares_of(3)(), num_whole=num_whole)
        monkeypatch.setattr(module, "balanced_shape", lambda *_, shape=shape: shape)
        for lengths in ([3, 100, 64, 0], [60, 61, 64, 40]):
            pages = random_pages(lengths, 2, 16, PAGE, dtype, 7)
            check(pages, 9, 6, is_causal=True, window=None, softmax=random_softmax(kind, 6, dtype))


@pytest.mark.parametrize("shape", [None, BalancedShape(16, 16, 3, 2, 8)], ids=["parts", "shares"])
def test_page_offsets_above_32_bits(shape: BalancedShape | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "balanced_shape", lambda *_: shape)
    pages = random_pages([17, 40], 2, 16, PAGE, torch.float16, 3, arrangement="far apart")
    check(pages, 3, 2, is_causal=True, window=None)


def test_many_requests_use_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes select this kernel; the other kernel cannot run here."""
    monkeypatch.setattr(module, "attention_shape", None)
    pages = random_pages(
        [5 * index % 47 for index in range(4 * num_multiprocessors(DEVICE) + 1)], 1, 16, PAGE, torch.float32, 8
    )
    check(pages, 1, 4, is_causal=True, window=None)


def test_a_wider_page_table_changes_nothing() -> None:
    """A captured graph reads the widest table. Entries after a request's pages may be arbitrary."""
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


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    pages = random_pages([3], 2, 16, PAGE, torch.float32, 0)
    with pytest.raises(ValueError, match=r"^query: "):
        check(pages, 2, 3, is_causal=True, window=None)
    with pytest.raises(ValueError, match=r"^window: "):
        check(pages, 2, 4, is_causal=True, window=0)
    with pytest.raises(ValueError, match=r"^softmax\.cap: "):
        check(pages, 2, 4, is_causal=True, window=None, softmax=Softmax(cap=0.0))
    with pytest.raises(ValueError, match=r"^softmax\.sinks: "):
        check(pages, 2, 4, is_causal=True, window=None, softmax=random_softmax("sinks", 2))
    unlike = replace(pages, key_cache=pages.key_cache.contiguous())
    with pytest.raises(ValueError, match=r"^caches: "):
        check(unlike, 2, 4, is_causal=True, window=None)
    pages.key_cache = pages.key_cache.double()
    with pytest.raises(TypeError):
        check(pages, 2, 4, is_causal=True, window=None)


def test_more_requests_than_a_grid_allows_are_refused() -> None:
    query = torch.zeros(40_000, 1, 2, 16)
    cache = torch.zeros(1, 4, 2, 16)
    lens = torch.zeros(40_000, dtype=torch.int64)
    tensors = [tensor.to(DEVICE) for tensor in (query, query, query, cache, cache, lens[:, None], lens)]
    with pytest.raises(ValueError, match="65535"):
        block_attention(*tensors, is_causal=True, window=None)
