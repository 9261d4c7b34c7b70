"""Storing keys and values in slots, for one layer and for all draft layers at once."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.kv.context_kv import context_kv_store, context_kv_store_ref
from dflash_kernels.kv.kv_store import kv_store, kv_store_ref
from dflash_kernels.kv.slot_mapping import PAD
from dflash_testing.tensors import (
    ARRANGEMENTS,
    DEVICE,
    DTYPES,
    assert_mostly_equal,
    assert_rows_close,
    between_layers,
    far_apart,
    normal,
    whole,
)

SLOTS = [5, PAD, 0, 17, PAD, 3, 16]


def pair(cache: Tensor) -> tuple[Tensor, Tensor]:
    return cache, cache * 2


def num_nan(cache: Tensor) -> int:
    """Return the number of NaN in all memory that a cache is a view of."""
    return int((cache if cache._base is None else cache._base).isnan().sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv", "head_dim"), [(1, 8), (2, 24), (8, 128)])
@pytest.mark.parametrize("page_size", [1, 4, 5, 20])
@pytest.mark.parametrize("arrangement", ["alone", "between layers"])
def test_rows_are_stored_in_their_slots_only(
    arrangement: str, page_size: int, num_kv: int, head_dim: int, dtype: torch.dtype
) -> None:
    projected = normal(len(SLOTS), 3 + 2 * num_kv, head_dim, dtype=dtype)
    keys, values = projected[:, 3 : 3 + num_kv], projected[:, 3 + num_kv :]
    before = pair(normal(20, num_kv, head_dim, dtype=dtype))
    written, kept = [slot for slot in SLOTS if slot != PAD], [slot != PAD for slot in SLOTS]
    for store in (kv_store, kv_store_ref):
        caches = ARRANGEMENTS[arrangement](*(rows.clone().unflatten(0, (-1, page_size)) for rows in before))
        num_before = num_nan(caches[0])
        store(keys, values, *caches, whole(*SLOTS))
        for cache, rows, expected in zip(caches, (keys, values), before, strict=True):
            expected = expected.clone()
            expected[written] = rows[kept]
            assert torch.equal(cache.flatten(0, 1), expected)
        assert num_nan(caches[0]) == num_before


def test_row_offsets_above_32_bits() -> None:
    empty = torch.zeros(3, 8, 2, 8, dtype=torch.float16, device=DEVICE)
    keys = normal(3, 4, 8, dtype=torch.float16)
    caches = far_apart(empty, empty)
    kv_store(keys[:, :2], keys[:, 2:], *caches, whole(23, 0, 9))
    for cache, rows in zip(caches, (keys[:, :2], keys[:, 2:]), strict=True):
        assert torch.equal(cache.flatten(0, 1)[[23, 0, 9]], rows)


def test_rows_with_pad_slots_do_not_change_the_caches() -> None:
    keys = normal(3, 2, 8)
    caches = pair(normal(1, 4, 2, 8))
    before = caches[0].clone(), caches[1].clone()
    kv_store(keys, keys, *caches, whole(PAD, PAD, PAD))
    kv_store(keys[:0], keys[:0], *caches, whole())
    context_kv_store(normal(3, 1, 2, 2, 8), normal(1, 8), 1e-6, *tables(3, 8, torch.float32),
                     caches[0][None], caches[1][None], whole(PAD, PAD, PAD))  # fmt: skip
    assert torch.equal(caches[0], before[0])
    assert torch.equal(caches[1], before[1])


def tables(num_rows: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows of cos and sin, as in a rope table with two equal halves."""
    angles = normal(num_rows, head_dim // 2, seed=7) * 3
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_layers", "num_kv", "head_dim"), [(1, 1, 8), (3, 2, 24), (5, 9, 64), (2, 8, 128)])
@pytest.mark.parametrize("arrangement", ["alone", "between layers"])
def test_context_kv_of_every_layer(
    arrangement: str, num_layers: int, num_kv: int, head_dim: int, dtype: torch.dtype
) -> None:
    projected = normal(len(SLOTS), num_layers, 2, num_kv, head_dim, dtype=dtype)
    weights = normal(num_layers, head_dim, dtype=dtype, seed=3)
    cos, sin = tables(len(SLOTS), head_dim, dtype)
    empty = torch.full((num_layers, 4, 5, num_kv, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    kept = ARRANGEMENTS[arrangement](empty, empty.clone())
    same, exact = pair(empty.clone()), pair(empty.double())
    num_before = num_nan(kept[0])
    context_kv_store(projected, weights, 1e-6, cos, sin, *kept, whole(*SLOTS))
    context_kv_store_ref(projected, weights, 1e-6, cos, sin, *same, whole(*SLOTS))
    context_kv_store_ref(projected.double(), weights.double(), 1e-6, cos.double(), sin.double(), *exact, whole(*SLOTS))
    if arrangement != "alone":  # both are in the same pages
        assert num_before - num_nan(kept[0]) == projected[[slot != PAD for slot in SLOTS]].numel()
    stored, rounded, true = ([cache.flatten(1, 2) for cache in item] for item in (kept, same, exact))
    written = [slot for slot in SLOTS if slot != PAD]
    rest = [slot for slot in range(20) if slot not in written]
    assert torch.equal(stored[1][:, written], rounded[1][:, written])
    assert bool(stored[0][:, rest].isnan().all())
    assert bool(stored[1][:, rest].isnan().all())
    assert_rows_close(stored[0][:, written], true[0][:, written], dtype)
    if dtype != torch.float32:
        assert_mostly_equal(stored[0][:, written], rounded[0][:, written])


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    keys, cache = normal(2, 2, 8), normal(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"^keys, values, caches: "):
        kv_store(keys[:, :1], keys, cache, cache, whole(1, 2))
    with pytest.raises(ValueError, match=r"^keys, values, caches: "):
        kv_store(keys, keys, cache[0], cache[0], whole(1, 2))
    with pytest.raises(ValueError, match=r"^caches: "):
        kv_store(keys, keys, cache[:, :1], cache, whole(1, 2))
    with pytest.raises(ValueError, match=r"^caches: "):
        kv_store(keys, keys, between_layers(cache, cache)[0], cache, whole(1, 2))
    with pytest.raises(ValueError, match=r"^keys, values, caches: "):
        kv_store(keys.double(), keys, cache, cache, whole(1, 2))
    with pytest.raises(ValueError, match=r"^slots: "):
        kv_store(keys, keys, cache, cache, whole(1))
    with pytest.raises(ValueError, match=r"^values: "):
        kv_store(keys, keys[:1], cache, cache, whole(1, 2))
