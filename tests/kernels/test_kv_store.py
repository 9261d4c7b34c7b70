"""Scattering keys and values into slots, for one layer and for all draft layers at once."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.context_kv import context_kv_store, context_kv_store_ref
from dflash_kernels.kv_store import kv_store, kv_store_ref
from dflash_kernels.slot_mapping import PAD
from dflash_testing.tensors import DEVICE, DTYPES, assert_mostly_equal, assert_rows_close, normal, whole

SLOTS = [5, PAD, 0, 17, PAD, 3, 16]


def pair(cache: Tensor) -> tuple[Tensor, Tensor]:
    return cache, cache * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv", "head_dim"), [(1, 8), (2, 24), (8, 128)])
def test_rows_land_in_their_slots_and_nowhere_else(num_kv: int, head_dim: int, dtype: torch.dtype) -> None:
    projected = normal(len(SLOTS), 3 + 2 * num_kv, head_dim, dtype=dtype)
    keys, values = projected[:, 3 : 3 + num_kv], projected[:, 3 + num_kv :]
    caches = pair(normal(20, num_kv, head_dim, dtype=dtype))
    expected = caches[0].clone(), caches[1].clone()
    kv_store_ref(keys, values, *expected, whole(*SLOTS))
    kv_store(keys, values, *caches, whole(*SLOTS))
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])
    assert torch.equal(caches[0][17], keys[3])


def test_all_pad_leaves_the_caches_alone() -> None:
    keys = normal(3, 2, 8)
    caches = pair(normal(4, 2, 8))
    before = caches[0].clone(), caches[1].clone()
    kv_store(keys, keys, *caches, whole(PAD, PAD, PAD))
    kv_store(keys[:0], keys[:0], *caches, whole())
    context_kv_store(normal(3, 1, 2, 2, 8), normal(1, 8), 1e-6, *tables(3, 8, torch.float32),
                     caches[0][None], caches[1][None], whole(PAD, PAD, PAD))  # fmt: skip
    assert torch.equal(caches[0], before[0])
    assert torch.equal(caches[1], before[1])


def tables(num_rows: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of cos and sin that a rope table might have, both halves filled."""
    angles = normal(num_rows, head_dim // 2, seed=7) * 3
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_layers", "num_kv", "head_dim"), [(1, 1, 8), (3, 2, 24), (5, 9, 64), (2, 8, 128)])
def test_context_kv_of_every_layer(num_layers: int, num_kv: int, head_dim: int, dtype: torch.dtype) -> None:
    projected = normal(len(SLOTS), num_layers, 2, num_kv, head_dim, dtype=dtype)
    weights = normal(num_layers, head_dim, dtype=dtype, seed=3)
    cos, sin = tables(len(SLOTS), head_dim, dtype)
    caches = pair(torch.full((num_layers, 20, num_kv, head_dim), torch.nan, dtype=dtype, device=DEVICE))
    same, exact = pair(caches[0].clone()), pair(caches[0].double())
    context_kv_store(projected, weights, 1e-6, cos, sin, *caches, whole(*SLOTS))
    context_kv_store_ref(projected, weights, 1e-6, cos, sin, *same, whole(*SLOTS))
    context_kv_store_ref(projected.double(), weights.double(), 1e-6, cos.double(), sin.double(), *exact, whole(*SLOTS))
    written = [slot for slot in SLOTS if slot != PAD]
    rest = [slot for slot in range(20) if slot not in written]
    assert torch.equal(caches[1][:, written], same[1][:, written])
    assert bool(caches[0][:, rest].isnan().all())
    assert bool(caches[1][:, rest].isnan().all())
    assert_rows_close(caches[0][:, written], exact[0][:, written], dtype)
    if dtype != torch.float32:
        assert_mostly_equal(caches[0][:, written], same[0][:, written])


def test_what_does_not_fit_is_refused() -> None:
    keys, cache = normal(2, 2, 8), normal(4, 2, 8)
    with pytest.raises(ValueError, match="one head shape"):
        kv_store(keys, keys, cache[:, :1], cache, whole(1, 2))
    with pytest.raises(ValueError, match="one dtype"):
        kv_store(keys.double(), keys, cache, cache, whole(1, 2))
    with pytest.raises(ValueError, match="as many"):
        kv_store(keys, keys, cache, cache, whole(1))
