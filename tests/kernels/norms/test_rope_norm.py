"""Norms and rotation: close to float64, with the roundings of the references."""

from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor

from dflash_kernels.kv.rope_store import KVPlace, Turn, rope_store, rope_store_ref
from dflash_kernels.kv.slot_mapping import PAD
from dflash_kernels.norms.rope_norm import (
    add_rms_norm,
    add_rms_norm_ref,
    rms_norm,
    rms_norm_ref,
    sum_rms_norm,
    sum_rms_norm_ref,
)
from dflash_testing.tensors import ARRANGEMENTS, DEVICE, DTYPES, assert_mostly_equal, assert_rows_close, normal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 15), (2, 3, 63), (5, 128), (3, 2560)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    hidden, weight = normal(*shape, dtype=dtype) * 3, normal(shape[-1], dtype=dtype, seed=1)
    out = rms_norm(hidden, weight, 1e-6)
    assert_rows_close(out, rms_norm_ref(hidden.double(), weight.double(), 1e-6), dtype)
    if dtype != torch.float32:
        assert_mostly_equal(out, rms_norm_ref(hidden, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 7, 31), (3, 2, 64), (2, 3, 2560)])
def test_add_and_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kind = dtype if shape[0] == 1 else torch.float32
    parts, residual = normal(*shape, dtype=kind), normal(*shape[1:], dtype=dtype, seed=1)
    weight = normal(shape[-1], dtype=dtype, seed=2)
    kept = residual.clone()
    normed, total = add_rms_norm(parts, residual, weight, 1e-5)
    assert torch.equal(residual, kept)
    assert torch.equal(total, parts.sum(0).to(dtype) + residual)
    exact = add_rms_norm_ref(total.double()[None], 0 * total.double(), weight.double(), 1e-5)[0]
    assert_rows_close(normed, exact, dtype)
    if dtype != torch.float32:
        assert_mostly_equal(normed, add_rms_norm_ref(parts, residual, weight, 1e-5)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7, 31), (3, 2, 64), (8, 3, 2560)])
def test_norm_of_a_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Parts are added in order, and torch's sum on a GPU has another order."""
    parts = normal(*shape, dtype=dtype if shape[0] == 1 else torch.float32)
    weight, total = normal(shape[-1], dtype=dtype, seed=2), reduce(torch.add, parts).to(dtype)
    found = sum_rms_norm(parts, weight, 1e-5, dtype)
    assert torch.equal(found, rms_norm(total, weight, 1e-5))
    assert_rows_close(found, sum_rms_norm_ref(parts.double(), weight.double(), 1e-5, torch.float64), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_wide_weights_are_not_rounded(dtype: torch.dtype) -> None:
    """Rows of 16 bits with float32 weights are rounded once, at the end."""
    rows, weight = normal(5, 64, dtype=dtype), 1 + normal(64, seed=1) / 300
    parts = normal(2, 5, 64, seed=2)
    assert_mostly_equal(rms_norm(rows, weight, 1e-6), rms_norm_ref(rows, weight, 1e-6))
    found, expected = (call(parts, rows, weight, 1e-6)[0] for call in (add_rms_norm, add_rms_norm_ref))
    assert_mostly_equal(found, expected)
    cos, sin = rope_tables(5, 16, dtype)
    norms = weight.view(4, 16)[:3]
    heads, wanted = (call(parts, norms, 1e-6, cos, sin, 1, None) for call in (rope_store, rope_store_ref))
    assert_mostly_equal(heads, wanted)
    rounded = rms_norm_ref(rows, weight.to(dtype), 1e-6)
    assert (rounded != rms_norm(rows, weight, 1e-6)).double().mean() > 0.03


def test_norm_of_views_reads_the_right_rows() -> None:
    wide = normal(4, 6, 40)
    weight = normal(8, seed=1)
    view = wide[:, 1:5, 8:16]
    assert_rows_close(rms_norm(view, weight, 1e-6), rms_norm_ref(view.double(), weight.double(), 1e-6), torch.float32)


def rope_tables(num_rows: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows of a rope table for some positions, as a model reads them."""
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = (torch.arange(num_rows, dtype=torch.float64) * 37 + 5)[:, None] * inverse
    angles = torch.cat((angles, angles), -1).to(normal(1).device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def nan_place(arrangement: str, num_kv: int, head_dim: int, slots: Tensor, dtype: torch.dtype) -> KVPlace:
    """Return caches full of NaN with three slots per page."""
    empty = torch.full((len(slots) // 3 + 2, 3, num_kv, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    return KVPlace(*ARRANGEMENTS[arrangement](empty, empty.clone()), slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("arrangement", ["alone", "between layers", None])
@pytest.mark.parametrize(
    ("num_parts", "num_rows", "num_heads", "num_kv", "head_dim"),
    [(1, 1, 1, 1, 8), (2, 7, 3, 1, 12), (1, 3, 9, 3, 80), (4, 15, 4, 2, 128), (2, 2, 6, 2, 256)],
)
def test_heads_are_rotated_and_stored(
    num_parts: int, num_rows: int, num_heads: int, num_kv: int, head_dim: int, has_norm: bool,
    arrangement: str | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    kind = dtype if num_parts == 1 else torch.float32
    parts = normal(num_parts, num_rows, (num_heads + 2 * num_kv) * head_dim, dtype=kind) * 2
    weight = normal(num_heads + num_kv, head_dim, dtype=dtype, seed=1) if has_norm else None
    cos, sin = rope_tables(num_rows, head_dim, dtype)
    slots = torch.randperm(num_rows + 3, generator=torch.Generator().manual_seed(0))[:num_rows].to(cos.device)
    slots[num_rows // 2] = PAD
    place, same, exact = (
        nan_place(item, num_kv, head_dim, slots, kind)
        for item, kind in ((arrangement or "alone", dtype), ("alone", dtype), ("alone", torch.float64))
    )
    out = rope_store(parts, weight, 1e-6, cos, sin, num_kv, place if arrangement else None)
    rounded = parts.double().sum(0, keepdim=True).to(dtype).double() if num_parts == 1 else parts.double()
    wide = None if weight is None else weight.double()
    true = rope_store_ref(rounded, wide, 1e-6, cos.double(), sin.double(), num_kv, exact)
    assert_rows_close(out, true, dtype)
    if dtype != torch.float32:
        assert_mostly_equal(out, rope_store_ref(parts, weight, 1e-6, cos, sin, num_kv, same))
    if arrangement:
        written = slots[slots >= 0]
        kept = place.key_cache.flatten(0, 1), place.value_cache.flatten(0, 1)
        is_written = torch.zeros(len(kept[0]), dtype=torch.bool, device=cos.device)
        is_written[written] = True
        for cache, rows in zip(kept, out[slots >= 0][:, -2 * num_kv :].split(num_kv, dim=1), strict=True):
            assert torch.equal(cache[written], rows)
            assert bool(cache[~is_written].isnan().all())
        if arrangement != "alone":  # both are in the same pages
            base = place.key_cache._base
            assert base is not None
            assert int((~base.isnan()).sum()) == 2 * len(written) * num_kv * head_dim


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_may_have_a_norm_and_are_never_rotated(dtype: torch.dtype) -> None:
    parts, angles = normal(1, 5, 6 * 16, dtype=dtype), normal(5, 8, seed=1)
    cos, sin = (torch.cat((table, table), 1).to(dtype) for table in (angles.cos(), angles.sin()))
    norms = normal(6, 16, dtype=dtype, seed=2) + 1
    keys, values = torch.zeros(2, 2, 4, 2, 16, dtype=dtype, device=DEVICE)
    place = KVPlace(keys, values, torch.arange(5, device=DEVICE))
    out = rope_store(parts, norms, 1e-6, cos, sin, 2, place)
    rows = parts[0].view(5, 6, 16)
    wanted = rms_norm_ref(rows[:, 4:].double(), norms[4:].double(), 1e-6)
    assert_rows_close(out[:, 4:], wanted, dtype)
    assert torch.equal(place.value_cache.flatten(0, 1)[:5], out[:, 4:])
    others = rope_store(parts, norms[:4], 1e-6, cos, sin, 2, None)
    assert torch.equal(out[:, :4], others[:, :4])
    true = rope_store_ref(parts.double(), norms.double(), 1e-6, cos.double(), sin.double(), 2, None)
    assert_rows_close(out, true, dtype)


@pytest.mark.parametrize("call", [rope_store, rope_store_ref])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_may_be_the_keys_before_norm_and_rope(call: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """A projection without values gives the rows of a projection with a copy of the keys."""
    parts, angles = normal(2, 5, 5 * 16), normal(5, 8, seed=1)
    cos, sin = (torch.cat((table, table), 1).to(dtype) for table in (angles.cos(), angles.sin()))
    norms = normal(7, 16, dtype=dtype, seed=2) + 1
    slots = torch.arange(5, device=DEVICE)
    empty = torch.zeros(2, 2, 2, 4, 2, 16, dtype=dtype, device=DEVICE)
    places = [KVPlace(keys, values, slots) for keys, values in empty]
    out = call(parts, norms, 1e-6, cos, sin, 2, places[0])
    with_copy = torch.cat((parts, parts[..., -2 * 16 :]), dim=2)
    assert torch.equal(out, call(with_copy, norms, 1e-6, cos, sin, 2, places[1]))
    assert out.shape == (5, 7, 16)
    for found, wanted in zip(places[0][:2], places[1][:2], strict=True):
        assert torch.equal(found, wanted)


TURNS = [
    Turn(24),
    Turn(None, True),
    Turn(24, True),
    Turn(None, True, True),
    Turn(24, True, True),
    Turn(40, False, True),
]


def turned(heads: Tensor, angles: Tensor, turn: Turn) -> Tensor:
    """Rotate the pairs of heads [T, H, D] one after another, by angles [T, R / 2]."""
    out, num_pairs = heads.clone(), angles.shape[1]
    for pair in range(num_pairs):
        one, other = (2 * pair, 2 * pair + 1) if turn.has_adjacent_pairs else (pair, pair + num_pairs)
        cos, sin = angles[:, None, pair].cos(), angles[:, None, pair].sin()
        out[..., one] = heads[..., one] * cos - heads[..., other] * sin
        out[..., other] = heads[..., other] * cos + heads[..., one] * sin
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("turn", TURNS)
def test_pairs_may_be_adjacent_and_heads_partly_rotated(turn: Turn, has_norm: bool, dtype: torch.dtype) -> None:
    rotated, num_heads, num_kv = 16, 3, 2
    size = turn.head_dim or rotated
    parts, angles = normal(2, 5, (num_heads + 2 * num_kv) * size) * 2, normal(5, rotated // 2, seed=1)
    spread = angles.repeat_interleave(2, 1) if turn.has_adjacent_angles else torch.cat((angles, angles), 1)
    weight = normal(num_heads + num_kv, size, dtype=dtype, seed=2) + 1 if has_norm else None
    place = nan_place("between layers", num_kv, size, torch.arange(5, device=DEVICE), dtype)
    out = rope_store(parts, weight, 1e-6, spread.cos().to(dtype), spread.sin().to(dtype), num_kv, place, turn)
    rows = parts.double().sum(0).view(5, -1, size)
    heads = rows[:, :-num_kv]
    if weight is not None:
        heads = rms_norm_ref(heads, weight.double(), 1e-6)
    true = torch.cat((turned(heads, angles.double(), turn), rows[:, -num_kv:]), 1)
    assert_rows_close(out, true, dtype)
    for cache, stored in zip(place[:2], out[:, -2 * num_kv :].split(num_kv, dim=1), strict=True):
        assert torch.equal(cache.flatten(0, 1)[:5], stored)
    exact = rope_store_ref(
        parts.double(), None if weight is None else weight.double(), 1e-6, spread.double().cos(), spread.double().sin(),
        num_kv, None, turn,
    )  # fmt: skip
    torch.testing.assert_close(exact, true)


def test_tables_without_columns_rotate_nothing() -> None:
    parts, none = normal(1, 5, 6 * 16), normal(5, 8)[:, :0]
    place = nan_place("alone", 2, 16, torch.arange(5, device=DEVICE), torch.float32)
    assert torch.equal(rope_store(parts, None, 1e-6, none, none, 2, place, Turn(16)), parts[0].view(5, 6, 16))
    assert torch.equal(place.key_cache.flatten(0, 1)[:5], parts[0].view(5, 6, 16)[:, 2:4])
    rows = rope_store_ref(parts, None, 1e-6, none, none, 2, None, Turn(16))
    assert torch.equal(rows, parts[0].view(5, 6, 16))


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        rms_norm(normal(2, 8).double(), normal(8).double(), 1e-6)
    with pytest.raises(TypeError, match="float16"):
        rms_norm(normal(2, 8), normal(8).half(), 1e-6)
    with pytest.raises(ValueError, match=r"^weight: "):
        rms_norm(normal(2, 8), normal(7), 1e-6)
    with pytest.raises(ValueError, match=r"^cos: "):
        rope_store(normal(1, 2, 21), None, 1e-6, normal(2, 7), normal(2, 7), 1, None)
    with pytest.raises(ValueError, match=r"^cos: "):
        rope_store(normal(1, 2, 24), None, 1e-6, normal(2, 8), normal(2, 8), 1, None, Turn(6))
    with pytest.raises(ValueError, match=r"^parts: "):
        rope_store(normal(1, 2, 16), None, 1e-6, normal(2, 8), normal(2, 8), 1, None)
    with pytest.raises(TypeError, match=r"^parts: "):
        add_rms_norm(normal(1, 2, 8).half(), normal(2, 8), normal(8), 1e-6)
