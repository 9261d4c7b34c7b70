"""Queries, keys and values of an attention layer from its projection, in one launch.

The kernel adds up the parts of the projection, normalises and rotates query and key heads, and stores keys and values
in their slots. It rounds as `rope_norm.py` does.

Axis letters: T rows, P parts, H query heads, KV heads of keys and values, D head dim, R rotated numbers of a head.
Pages are as in `kv_store.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.fp8.fp8_weight import FP8
from dflash_kernels.kv.kv_format import UNSCALED, KVScales, as_readable, check_formats, from_cache, to_cache
from dflash_kernels.kv.kv_store import kv_store_ref, row_of_slot, strides_of_caches
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl, warps_for
from dflash_kernels.launch_config import HEAD_TILE
from dflash_kernels.norms.rope_norm import (
    check_parts,
    check_weight,
    norm_half_tiles,
    rms_norm_ref,
    rope_ref,
    rotate_half_tiles,
    sum_parts,
    sum_parts_ref,
)


class KVPlace(NamedTuple):
    """Caches and slots for the keys and values of rows. Rows with the slot PAD are not stored."""

    key_cache: Tensor
    """[P, page_size, KV, D]"""
    value_cache: Tensor
    """[P, page_size, KV, D]"""
    slots: Tensor
    """[T] int64, all different, except PAD."""
    scales: KVScales = UNSCALED
    """The scales of caches in FP8."""


class Turn(NamedTuple):
    """Which numbers of a head rope rotates in pairs: the first R ones, where R is the width of its tables."""

    head_dim: int | None = None
    """Numbers of a head; None for R. Numbers past R are not rotated."""
    has_adjacent_pairs: bool = False
    """Pairs are (0, 1), (2, 3), ... instead of (0, R / 2), (1, R / 2 + 1), ..."""
    has_adjacent_angles: bool = False
    """The tables hold the angle of a pair in adjacent columns, instead of once in each half."""


HALVES = Turn()


def rope_store_ref(
    parts: Tensor,
    head_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    num_kv: int,
    place: KVPlace | None,
    turn: Turn = HALVES,
) -> Tensor:
    """Normalise and rotate the query and key heads of a projection, and store keys and values.

    parts       [P, T, (H + 2 KV) * D]   queries, keys, values, as returned by `product_parts_ref`; D even.
                                         [P, T, (H + KV) * D] with norms of values: values are the keys
    head_norms  [H + KV, D]              norm weight of each query head, then of each key head; None for no norm.
                                         [H + 2 KV, D] normalises values too, which are not rotated
    cos, sin    [T, R]                   rows of the rope table
    place       caches and slots, written; None stores nothing
    turn        the rotated pairs
    Returns [T, H + 2 KV, D]: rotated queries, rotated keys, values. Stored keys and values are as
    `kv_store_ref` returns them.

    The reference waits for the device (`kv_store_ref`); the kernel does not wait.
    """
    rows = sum_parts_ref(parts, cos.dtype).view(cos.shape[0], -1, turn.head_dim or cos.shape[1])
    if head_norms is not None and len(head_norms) > rows.shape[1]:
        rows = torch.cat((rows, rows[:, -num_kv:]), dim=1)
    heads, values = rows[:, :-num_kv], rows[:, -num_kv:]
    if head_norms is not None and len(head_norms) == rows.shape[1]:
        head_norms, value_norms = head_norms[:-num_kv], head_norms[-num_kv:]
        values = rms_norm_ref(values, value_norms, eps)
    heads = _rotate_ref(heads if head_norms is None else rms_norm_ref(heads, head_norms, eps), cos, sin, turn)
    query, keys = heads[:, :-num_kv], heads[:, -num_kv:]
    if place is not None:
        keys, values = kv_store_ref(keys, values, *place)
    return torch.cat((query, keys, values), dim=1)


def _rotate_ref(heads: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> Tensor:
    """Rotate heads [T, H, D]."""
    if cos.shape[1] == heads.shape[2] and turn == HALVES:
        return rope_ref(heads, cos, sin)
    turned, rest = heads.tensor_split([cos.shape[1]], dim=2)
    if turn.has_adjacent_angles:
        cos, sin = _halves_of(cos), _halves_of(sin)
    if not turn.has_adjacent_pairs:
        return torch.cat((rope_ref(turned, cos, sin), rest), dim=2)
    turned = rope_ref(_halves_of(turned), cos, sin)
    return torch.cat((torch.stack(turned.chunk(2, dim=2), dim=3).flatten(2), rest), dim=2)


def _halves_of(pairs: Tensor) -> Tensor:
    """Return columns [..., R] with the first number of every adjacent pair before all second numbers."""
    return torch.cat((pairs[..., ::2], pairs[..., 1::2]), dim=-1)


@jit
def _pair_columns(dim, NUM_PAIRS: tl.constexpr, HALF: tl.constexpr, IS_ADJACENT: tl.constexpr):
    """Return the columns of both numbers of each pair. Columns past the rotated ones are paired without a rotation."""
    first, second = dim, dim + HALF
    if IS_ADJACENT:
        is_turned = dim < NUM_PAIRS
        first, second = tl.where(is_turned, 2 * dim, dim + NUM_PAIRS), tl.where(is_turned, 2 * dim + 1, dim + HALF)
    elif NUM_PAIRS != HALF:
        is_turned = dim < NUM_PAIRS
        first, second = tl.where(is_turned, dim, dim + NUM_PAIRS), dim + tl.where(is_turned, NUM_PAIRS, HALF)
    return first, second


@jit
def _load_pairs(source, first, second, is_element, OTHER: tl.constexpr):
    return tl.load(source + first, mask=is_element, other=OTHER), tl.load(source + second, mask=is_element, other=OTHER)


@jit
def _store_pairs(target, first, second, values_first, values_second, is_element):
    tl.store(target + first, values_first, mask=is_element)
    tl.store(target + second, values_second, mask=is_element)


@jit
def _both_to_cache(first, second, inverse, dtype: tl.constexpr):
    return to_cache(first, inverse, dtype), to_cache(second, inverse, dtype)


@jit
def _rope_store_kernel(
    parts, weight, cos, sin, out, key_cache, value_cache, slots,
    parts_row, part_stride, cos_row, sin_row, cache_page, cache_row, cache_head, eps, key_inverse, value_inverse,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALUE_NORM: tl.constexpr, HAS_EQUAL_KV: tl.constexpr, HAS_PLACE: tl.constexpr,
    IS_ROUNDED: tl.constexpr, NUM_PAIRS: tl.constexpr, HAS_ADJACENT_PAIRS: tl.constexpr,
    HAS_ADJACENT_ANGLES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_H: tl.constexpr, TILE_HALF: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * TILE_H + tl.arange(0, TILE_H)[:, None]
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV
    dtype: tl.constexpr = out.dtype.element_ty
    dim = tl.arange(0, TILE_HALF)[None, :]
    one, other = _pair_columns(dim, NUM_PAIRS, HALF, HAS_ADJACENT_PAIRS)
    angle, same_angle = _pair_columns(dim, NUM_PAIRS, NUM_PAIRS, HAS_ADJACENT_ANGLES)
    is_rotated, is_element = head < NUM_ROTATED, (head < NUM_ROTATED + NUM_KV) & (dim < HALF)
    # Load the weights before the sums, so that all loads wait for memory at the same time.
    if HAS_NORM:
        is_normed = is_element if HAS_VALUE_NORM else is_rotated & is_element
        norm_first, norm_second = _load_pairs(weight + head * HEAD_DIM, one, other, is_normed, 0.0)
    # The previous launch may still run: it writes neither rotations nor slots.
    cos_first, cos_second = _load_pairs(cos + row * cos_row, angle, same_angle, dim < NUM_PAIRS, 1.0)
    sin_first, sin_second = _load_pairs(sin + row * sin_row, angle, same_angle, dim < NUM_PAIRS, 0.0)
    if HAS_PLACE:
        slot = tl.load(slots + row).to(tl.int64)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch is attention, which looks up its pages
    source = row * parts_row + (tl.where(is_rotated, head, head - NUM_KV) if HAS_EQUAL_KV else head) * HEAD_DIM
    plain_first = sum_parts(parts, source + one, is_element, part_stride, NUM_PARTS, dtype)
    plain_second = sum_parts(parts, source + other, is_element, part_stride, NUM_PARTS, dtype)
    first, second = plain_first, plain_second
    if HAS_NORM:
        first, second = norm_half_tiles(first, second, norm_first, norm_second, eps, HEAD_DIM)
        if HAS_VALUE_NORM:
            plain_first, plain_second = first, second
    first, second = rotate_half_tiles(first, second, cos_first, cos_second, sin_first, sin_second)
    # A tile may contain key heads and value heads. Value heads are not rotated.
    first, second = tl.where(is_rotated, first, plain_first), tl.where(is_rotated, second, plain_second)
    if HAS_PLACE:
        inverse = tl.where(is_rotated, key_inverse, value_inverse)
        stored_first, stored_second = _both_to_cache(first, second, inverse, key_cache.dtype.element_ty)
        is_kept, place = is_element & (slot >= 0), row_of_slot(slot, cache_page, cache_row, PAGE_SIZE)
        keys = key_cache + place + (head - NUM_HEADS) * cache_head
        values = value_cache + place + (head - NUM_ROTATED) * cache_head
        _store_pairs(keys, one, other, stored_first, stored_second, is_kept & is_rotated & (head >= NUM_HEADS))
        _store_pairs(values, one, other, stored_first, stored_second, is_kept & (head >= NUM_ROTATED))
        if IS_ROUNDED:
            kept_first, kept_second = from_cache(stored_first, dtype), from_cache(stored_second, dtype)
            first, second = (
                tl.where(head >= NUM_HEADS, kept_first, first), tl.where(head >= NUM_HEADS, kept_second, second)
            )  # fmt: skip
    _store_pairs(out + (row * (NUM_ROTATED + NUM_KV) + head) * HEAD_DIM, one, other, first, second, is_element)


def rope_store(
    parts: Tensor,
    head_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    num_kv: int,
    place: KVPlace | None,
    turn: Turn = HALVES,
) -> Tensor:
    """Compute `rope_store_ref` in one launch."""
    norms = () if head_norms is None else (head_norms,)
    check_tensors(parts, cos, sin, *norms, *(place or ())[:3])
    check_dtypes(cos, sin)
    for norm in norms:
        check_weight(norm, cos.dtype)
    check_parts(parts, cos.dtype)
    num_parts, num_rows, width = parts.shape
    rotated = cos.shape[1]
    head_dim = turn.head_dim or rotated
    require(rotated % 2 == head_dim % 2 == 0, "cos", "an even head size")
    require(rotated <= head_dim, "cos", "at most the head size")
    require(width % head_dim == 0, "parts", "whole heads")
    has_equal_kv = head_norms is not None and len(head_norms) == width // head_dim + num_kv
    num_heads = width // head_dim - (1 if has_equal_kv else 2) * num_kv
    require(num_heads > 0, "parts", "query heads, key heads and value heads")
    has_value_norm = head_norms is not None and len(head_norms) == num_heads + 2 * num_kv
    shape = (num_heads + num_kv * (2 if has_value_norm else 1), head_dim)
    require(head_norms is None or head_norms.shape == shape, "head_norms", "one norm per query and key head")
    require(cos.shape == sin.shape == (num_rows, rotated), "cos, sin", "one row per row of the projection")
    require(parts.stride(2) == cos.stride(1) == sin.stride(1) == 1, "parts, cos, sin", "contiguous rows")
    caches, page_size, scales = (parts, parts), 1, UNSCALED
    strides: tuple[int, ...] = (0, 0, 0)
    if place is not None:
        caches, scales = (place.key_cache, place.value_cache), place.scales
        check_formats(*caches, cos)
        strides, page_size = strides_of_caches(*caches), place.key_cache.shape[1]
        require(place.key_cache.shape[2:] == (num_kv, head_dim), "caches", "the KV heads of the projection")
        require(place.slots.numel() == num_rows, "slots", "one slot per row")
    out = torch.empty((num_rows, num_heads + 2 * num_kv, head_dim), dtype=cos.dtype, device=parts.device)
    if num_rows:
        tile_heads, tile_half = min(HEAD_TILE, power_of_2(num_heads + 2 * num_kv)), power_of_2(head_dim // 2)
        _rope_store_kernel[(num_rows, ceil_div(num_heads + 2 * num_kv, tile_heads))](
            parts, cos if head_norms is None else head_norms.contiguous(), cos, sin, out,
            *map(as_readable, caches), cos if place is None else place.slots.contiguous(),
            parts.stride(1), parts.stride(0), cos.stride(0), sin.stride(0), *strides, eps,
            1 / scales.key, 1 / scales.value,
            NUM_HEADS=num_heads, NUM_KV=num_kv, HEAD_DIM=head_dim, NUM_PARTS=num_parts,
            HAS_NORM=head_norms is not None, HAS_VALUE_NORM=has_value_norm, HAS_EQUAL_KV=has_equal_kv,
            HAS_PLACE=place is not None, IS_ROUNDED=place is not None and caches[0].dtype == FP8,
            NUM_PAIRS=rotated // 2, HAS_ADJACENT_PAIRS=turn.has_adjacent_pairs,
            HAS_ADJACENT_ANGLES=turn.has_adjacent_angles, PAGE_SIZE=page_size, TILE_H=tile_heads, TILE_HALF=tile_half,
            num_warps=warps_for(tile_heads * tile_half), enable_fp_fusion=False, **early(parts.device),
        )  # fmt: skip
    return out
