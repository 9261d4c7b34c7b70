"""Write K and V rows into their slots.

A cache [P, page_size, KV, D] consists of pages of rows, and a slot is `page * page_size + offset`. The pages of one
layer need not be adjacent in memory, because a page of memory holds all layers. Key and value cache have equal strides.

Axis letters: T rows, P pages, KV heads of keys and values, D head dim.
"""

import torch
from torch import Tensor

from dflash_kernels.fp8.fp8_weight import FP8
from dflash_kernels.kv.kv_format import (
    UNSCALED,
    KVScales,
    as_readable,
    from_cache,
    stored_ref,
    to_cache,
)
from dflash_kernels.launch import check_tensors, jit, power_of_2, require, tl, warps_for


def kv_store_ref(
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: KVScales = UNSCALED,
) -> tuple[Tensor, Tensor]:
    """Store rows in the caches. Rows with the slot PAD (negative) are not stored.

    keys, values             [T, KV, D]
    key_cache, value_cache   [P, page_size, KV, D]   written; in the dtype of the rows, or FP8
    slots                    [T] int64               all different, except PAD
    Returns keys and values [T, KV, D] in their own dtype as attention reads them from the caches: divided by the scales
    and rounded in FP8, otherwise unchanged.

    The reference waits for the device, because it needs the number of rows to store. The kernel does not wait.
    """
    rows = (slots >= 0).nonzero(as_tuple=True)[0]
    kept = slots if rows.shape == slots.shape else slots[rows]
    places = torch.floor_divide(kept, key_cache.shape[1]), kept % key_cache.shape[1]
    found = []
    for heads, cache, scale in zip((keys, values), (key_cache, value_cache), scales, strict=True):
        stored = stored_ref(heads, cache, scale)
        cache.index_put_(places, stored if kept is slots else stored[rows])
        found.append(stored.to(heads.dtype))
    return found[0], found[1]


def strides_of_caches(key_cache: Tensor, value_cache: Tensor) -> tuple[int, ...]:
    """Return the strides of two equal caches [..., P, page_size, KV, D], without the last stride, which is 1.

    Raises:
        ValueError: the caches differ in shape or strides, or heads are not contiguous.
    """
    require(key_cache.shape == value_cache.shape, "caches", "equal shapes")
    require(key_cache.stride() == value_cache.stride(), "caches", "equal strides")
    require(key_cache.stride(-1) == 1, "caches", "contiguous heads")
    return key_cache.stride()[:-1]


@jit
def row_of_slot(slot, page_stride, row_stride, PAGE_SIZE: tl.constexpr):
    """Return the offset of a slot's row in a cache. The slot must be a 64-bit integer."""
    return slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * row_stride


@jit
def _store_rows(
    rows, cache, out, source, place, target, is_element, is_kept, inverse_scale, IS_ROUNDED: tl.constexpr
):  # fmt: skip
    """Store a row in a cache, and in FP8 also in `out`, in its own dtype."""
    stored = to_cache(tl.load(rows + source, mask=is_element, other=0), inverse_scale, cache.dtype.element_ty)
    tl.store(cache + place, stored, mask=is_element & is_kept)
    if IS_ROUNDED:
        tl.store(out + target, from_cache(stored, out.dtype.element_ty), mask=is_element)


@jit
def _kv_store_kernel(
    keys, values, key_cache, value_cache, slots, out,
    keys_row, keys_head, values_row, values_head, cache_page, cache_row, cache_head, key_inverse, value_inverse,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    element = tl.arange(0, TILE)
    is_element = element < NUM_HEADS * HEAD_DIM
    head = (element // HEAD_DIM).to(tl.int64)
    dim = element % HEAD_DIM
    place = row_of_slot(slot, cache_page, cache_row, PAGE_SIZE) + head * cache_head + dim
    target = row * (2 * NUM_HEADS * HEAD_DIM) + element
    _store_rows(
        keys, key_cache, out, row * keys_row + head * keys_head + dim, place, target,
        is_element, slot >= 0, key_inverse, IS_ROUNDED,
    )  # fmt: skip
    _store_rows(
        values, value_cache, out, row * values_row + head * values_head + dim, place, target + NUM_HEADS * HEAD_DIM,
        is_element, slot >= 0, value_inverse, IS_ROUNDED,
    )  # fmt: skip


def kv_store(
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: KVScales = UNSCALED,
) -> tuple[Tensor, Tensor]:
    """Compute `kv_store_ref` in one launch, one program per row. Rows may be views of a wider projection."""
    check_tensors(keys, values, key_cache, value_cache, slots)
    num_rows, num_heads, head_dim = keys.shape
    strides = strides_of_caches(key_cache, value_cache)
    require(keys.shape[1:] == values.shape[1:] == key_cache.shape[2:], "keys, values, caches", "equal head shapes")
    is_rounded = key_cache.dtype == value_cache.dtype == FP8
    alike = (keys, values) if is_rounded else (keys, values, key_cache, value_cache)
    require(len({tensor.dtype for tensor in alike}) == 1, "keys, values, caches", "one dtype, or caches in FP8")
    require(keys.stride(2) == values.stride(2) == 1, "keys, values", "contiguous heads")
    require(len(values) == num_rows, "values", "one row per key row")
    require(slots.numel() == num_rows, "slots", "one slot per key row")
    shape = (num_rows, 2, num_heads, head_dim)
    out = torch.empty(shape, dtype=keys.dtype, device=keys.device) if is_rounded else keys
    if num_rows:
        tile = power_of_2(num_heads * head_dim)
        _kv_store_kernel[(num_rows,)](
            keys, values, as_readable(key_cache), as_readable(value_cache), slots.contiguous(), out,
            *keys.stride()[:2], *values.stride()[:2], *strides, 1 / scales.key, 1 / scales.value,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, PAGE_SIZE=key_cache.shape[1], TILE=tile,
            IS_ROUNDED=is_rounded, num_warps=warps_for(tile),
        )  # fmt: skip
    return (out[:, 0], out[:, 1]) if is_rounded else (keys, values)
