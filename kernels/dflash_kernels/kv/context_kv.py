"""Store the draft's context KV from projected context features, for all layers in one launch.

The K and V projections of all draft layers read the same features, so one matrix product computes them. This kernel
normalises, rotates and stores the result for each layer, without a permuted copy.

Axis letters: T rows, L draft layers, P pages, KV heads of keys and values, D head dim.
"""

from torch import Tensor

from dflash_kernels.kv.kv_format import as_readable, check_formats, to_cache
from dflash_kernels.kv.kv_store import kv_store_ref, row_of_slot, strides_of_caches
from dflash_kernels.launch import ceil_div, check_tensors, jit, power_of_2, require, tl, warps_for
from dflash_kernels.launch_config import HEAD_TILE
from dflash_kernels.norms.rope_norm import norm_half_tiles, norm_rope_ref, rotate_half_tiles


def context_kv_store_ref(
    projected: Tensor,
    norm_weights: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> None:
    """Store the normalised and rotated keys and the values of each layer. Rows with the slot PAD are not stored.

    projected               [T, L, 2, KV, D]           keys, then values
    norm_weights            [L, D]
    cos, sin                [T, D]
    key_cache, value_cache  [L, P, page_size, KV, D]   written; in FP8 with scales of 1
    slots                   [T] int64                  all different, except PAD

    The reference waits for the device (`kv_store_ref`); the kernel does not.
    """
    for layer, weight in enumerate(norm_weights):
        keys = norm_rope_ref(projected[:, layer, 0], weight, eps, cos, sin)
        kv_store_ref(keys, projected[:, layer, 1], key_cache[layer], value_cache[layer], slots)


@jit
def _context_kv_kernel(
    projected, norm_weights, cos, sin, key_cache, value_cache, slots,
    projected_row, projected_layer, projected_kind, projected_head, weights_layer, cos_row, sin_row,
    cache_layer, cache_page, cache_row, cache_head, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_H: tl.constexpr, TILE_HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(2).to(tl.int64) * TILE_H + tl.arange(0, TILE_H)[:, None]
    dim = tl.arange(0, TILE_HALF)
    is_dim = dim < HALF
    is_element = (head < NUM_HEADS) & is_dim[None, :]
    source = projected + row * projected_row + layer * projected_layer + head * projected_head + dim[None, :]
    weight = norm_weights + layer * weights_layer + dim
    first, second = norm_half_tiles(
        tl.load(source, mask=is_element, other=0.0),
        tl.load(source + HALF, mask=is_element, other=0.0),
        tl.load(weight, mask=is_dim, other=0.0)[None, :],
        tl.load(weight + HALF, mask=is_dim, other=0.0)[None, :],
        eps, HEAD_DIM,
    )  # fmt: skip
    first, second = rotate_half_tiles(
        first, second,
        tl.load(cos + row * cos_row + dim, mask=is_dim, other=0.0)[None, :],
        tl.load(cos + row * cos_row + HALF + dim, mask=is_dim, other=0.0)[None, :],
        tl.load(sin + row * sin_row + dim, mask=is_dim, other=0.0)[None, :],
        tl.load(sin + row * sin_row + HALF + dim, mask=is_dim, other=0.0)[None, :],
    )  # fmt: skip
    place = layer * cache_layer + row_of_slot(slot, cache_page, cache_row, PAGE_SIZE)
    place += head * cache_head + dim[None, :]
    stored: tl.constexpr = key_cache.dtype.element_ty
    tl.store(key_cache + place, to_cache(first, 1.0, stored), mask=is_element)
    tl.store(key_cache + place + HALF, to_cache(second, 1.0, stored), mask=is_element)
    value_source = source + projected_kind
    first = tl.load(value_source, mask=is_element, other=0.0)
    second = tl.load(value_source + HALF, mask=is_element, other=0.0)
    tl.store(value_cache + place, to_cache(first, 1.0, stored), mask=is_element)
    tl.store(value_cache + place + HALF, to_cache(second, 1.0, stored), mask=is_element)


def context_kv_store(
    projected: Tensor,
    norm_weights: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> None:
    """Compute `context_kv_store_ref` in one launch."""
    check_tensors(projected, norm_weights, cos, sin, key_cache, value_cache, slots)
    check_formats(key_cache, value_cache, projected, norm_weights, cos, sin)
    num_rows, num_layers, _, num_heads, head_dim = projected.shape
    require(head_dim % 2 == 0, "projected", "an even head size")
    require(projected.shape[2] == 2, "projected", "keys and values on the third axis")
    require(norm_weights.shape == (num_layers, head_dim), "norm_weights", "one norm per layer")
    require(cos.shape == sin.shape == (num_rows, head_dim), "cos, sin", "one row per projected row")
    require(slots.numel() == num_rows, "slots", "one slot per row")
    strides = strides_of_caches(key_cache, value_cache)
    shape = (key_cache.shape[0], *key_cache.shape[3:])
    require(shape == (num_layers, num_heads, head_dim), "caches", "the layers and heads of `projected`")
    contiguous = (projected, norm_weights, cos, sin)
    require(all(tensor.stride(-1) == 1 for tensor in contiguous), "tensors", "a contiguous last axis")
    if num_rows:
        tile_heads, tile_half = min(HEAD_TILE, power_of_2(num_heads)), power_of_2(head_dim // 2)
        _context_kv_kernel[(num_rows, num_layers, ceil_div(num_heads, tile_heads))](
            projected, norm_weights, cos, sin, as_readable(key_cache), as_readable(value_cache), slots.contiguous(),
            *projected.stride()[:4], norm_weights.stride(0), cos.stride(0), sin.stride(0),
            *strides, eps, NUM_HEADS=num_heads, HEAD_DIM=head_dim, PAGE_SIZE=key_cache.shape[2],
            TILE_H=tile_heads, TILE_HALF=tile_half, num_warps=warps_for(tile_heads * tile_half), enable_fp_fusion=False,
        )  # fmt: skip
