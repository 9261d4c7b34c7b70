"""Attention of one new row per request in one launch: results, stored rows, and what takes several launches."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention import row_attention as module
from dflash_kernels.attention.attention_config import MOST_ROW_GROUPS, row_attention_shape
from dflash_kernels.attention.row_attention import RowContext, row_attention, row_attention_ref
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.rope_store import HALVES, KVPlace, Turn, rope_store
from dflash_kernels.kv.slot_mapping import PAD
from dflash_testing.tensors import (
    DEVICE,
    DTYPES,
    SAMPLED_DTYPES,
    assert_rows_close,
    normal,
    random_pages,
    random_softmax,
)

pytestmark = pytest.mark.triton

PAGE, EPS = 16, 1e-6
LENS = [0, 1, PAGE - 1, 130]
NORMS = {"no norms": 0, "norms": 1, "value norms": 2, "values are keys": 2}


class Rows(NamedTuple):
    """The arguments of a call, without its softmax."""

    parts: Tensor
    head_norms: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor
    num_kv: int
    context: RowContext
    turn: Turn = HALVES

    def twin(self, dtype: torch.dtype | None = None) -> "Rows":
        """The same rows with caches of their own, in the same dtype or in another one."""
        place = self.context.place
        kind = dtype or self.cos.dtype
        keys, values = (cache.clone().to(kind).nan_to_num_() for cache in place[:2])
        norms = None if self.head_norms is None else self.head_norms.to(kind)
        parts = self.parts.to(dtype or self.parts.dtype)
        context = self.context._replace(place=KVPlace(keys, values, place.slots))
        return self._replace(
            parts=parts, head_norms=norms, cos=self.cos.to(kind), sin=self.sin.to(kind), context=context
        )


def rows_of(
    lens: list[int], num_heads: int, num_kv: int, head_dim: int, dtype: torch.dtype, *, norms: str = "norms",
    window: int | None = None, num_parts: int = 1, seed: int = 0,
) -> Rows:  # fmt: skip
    pages = random_pages(lens, num_kv, head_dim, PAGE, dtype, seed)
    table, context_lens = pages.page_table, pages.context_lens
    slots = table[torch.arange(len(lens), device=DEVICE), context_lens // PAGE] * PAGE + context_lens % PAGE
    num_projected = num_heads + (1 if norms == "values are keys" else 2) * num_kv
    kind = dtype if num_parts == 1 else torch.float32
    parts = normal(num_parts, len(lens), num_projected * head_dim, dtype=kind, seed=seed + 1)
    num_norms = num_heads + NORMS[norms] * num_kv
    weight = 1 + normal(num_norms, head_dim, seed=seed + 2) / 4
    angles = normal(len(lens), head_dim // 2, seed=seed + 3).repeat(1, 2)
    arrivals = torch.zeros(len(lens) * num_kv + 1, dtype=torch.int32, device=DEVICE)
    context = RowContext(KVPlace(pages.key_cache, pages.value_cache, slots), table, context_lens, window, arrivals)
    head_norms = None if norms == "no norms" else weight.to(dtype)
    return Rows(parts, head_norms, EPS, angles.cos().to(dtype), angles.sin().to(dtype), num_kv, context)


def check(rows: Rows, softmax: Softmax = PLAIN) -> Tensor:
    """Check the result, what is stored where, and the counts."""
    dtype, place = rows.cos.dtype, rows.context.place
    before = [cache.clone() for cache in place[:2]]
    exact = None if softmax.sinks is None else softmax.sinks.double()
    expected = row_attention_ref(*rows.twin(torch.float64), softmax=Softmax(softmax.cap, exact))
    out = row_attention(*rows, softmax=softmax)
    assert_rows_close(out, expected, dtype)
    assert not rows.context.arrivals.any()
    stored = rope_store(*rows[:6], None, rows.turn)[:, -2 * rows.num_kv :].split(rows.num_kv, dim=1)
    is_kept = place.slots != PAD
    for cache, old, new in zip(place[:2], before, stored, strict=True):
        slots = place.slots[is_kept] // PAGE, place.slots[is_kept] % PAGE
        assert_rows_close(cache[slots], new[is_kept].double(), dtype)
        old[slots] = cache[slots]
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7))
    return out


@pytest.fixture
def one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a call takes several launches."""
    monkeypatch.delattr(module, "block_attention")


@pytest.mark.usefixtures("one_launch")
@pytest.mark.parametrize("dtype", SAMPLED_DTYPES)
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("window", [None, 1, 9, 100])
def test_norms_windows_and_lengths(window: int | None, norms: str, dtype: torch.dtype) -> None:
    check(rows_of(LENS, 4, 2, 16, dtype, norms=norms, window=window, num_parts=3 if norms == "norms" else 1))


@pytest.mark.usefixtures("one_launch")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv"), [(1, 1), (6, 2), (16, 1)])
def test_heads(num_heads: int, num_kv: int, head_dim: int, dtype: torch.dtype) -> None:
    check(rows_of([40, 77], num_heads, num_kv, head_dim, dtype))


@pytest.mark.usefixtures("one_launch")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["sinks", "cap", "both"])
def test_caps_and_sinks(kind: str, dtype: torch.dtype) -> None:
    for window in (None, 20):
        check(rows_of(LENS, 6, 2, 32, dtype, window=window), random_softmax(kind, 6, dtype))


@pytest.mark.usefixtures("one_launch")
def test_rows_that_are_padding_store_nothing() -> None:
    rows = rows_of(LENS, 4, 2, 16, torch.float32)
    rows.context.place.slots[1:3] = PAD
    check(rows)


@pytest.mark.usefixtures("one_launch")
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_parts_and_repetition(dtype: torch.dtype) -> None:
    """Contexts of many tiles. The bits do not depend on the order in which programs finish."""
    rows = rows_of([1300, 700, 0], 4, 1, 64, dtype)
    first = check(rows)
    for _ in range(5):
        assert torch.equal(row_attention(*rows), first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_calls_take_several_launches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rope of a part of a head, other pairs, groups that are too large, sizes, and too many KV heads for the counts."""
    given = rows_of([5, 40], 4, 2, 32, dtype)
    counted = given.context._replace(arrivals=given.context.arrivals[:3])
    half = given._replace(cos=given.cos[:, :16], sin=given.sin[:, :16], turn=Turn(32))
    others = [
        half, given._replace(turn=Turn(has_adjacent_pairs=True)), given._replace(context=counted),
        rows_of([5, 40], 17, 1, 16, dtype), *(rows_of([5, 40], 2, 1, size, dtype) for size in (24, 512)),
    ]  # fmt: skip
    monkeypatch.delattr(module, "_row_attention_kernel")
    for rows in others:
        check(rows)


def test_the_number_of_kv_heads_is_limited() -> None:
    sizes = (4, 64, 2, DEVICE)
    assert row_attention_shape(MOST_ROW_GROUPS, *sizes) is not None
    assert row_attention_shape(MOST_ROW_GROUPS + 1, *sizes) is None


def test_wrong_arguments() -> None:
    rows = rows_of([5, 40], 4, 2, 16, torch.float32)
    for wrong, match in (
        (rows._replace(cos=rows.cos[:1]), "cos, sin"),
        (rows._replace(head_norms=normal(5, 16)), "head_norms"),
        (rows._replace(context=rows.context._replace(page_table=rows.context.page_table[:1])), "context"),
        (rows._replace(parts=rows.parts[..., : 5 * 16]), "parts"),
    ):
        with pytest.raises(ValueError, match=match):
            row_attention(*wrong)
