"""Write K and V rows into their slots.

A cache is pages of rows, [P, page_size, KV, D], and a slot is `page * page_size + offset`. Pages need not follow each
other in memory: those of one layer are parts of pages that hold all layers. Keys and values have to lie alike.

Axis letters: T rows, P pages, KV heads of keys and values, D head dim.
"""

from torch import Tensor

from dflash_kernels.launch_config import check_tensors, jit, power_of_2, require, tl, warps_for


def kv_store_ref(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store rows in place; rows whose slot is PAD (negative) are dropped.

    keys, values             [T, KV, D]
    key_cache, value_cache   [P, page_size, KV, D]   written
    slots                    [T] int64               no two the same, PAD apart

    The reference waits for the device, to learn how many rows there are; the kernel does not.
    """
    rows = (slots >= 0).nonzero(as_tuple=True)[0]
    page_size = key_cache.shape[1]
    places = slots[rows] // page_size, slots[rows] % page_size
    key_cache.index_put_(places, keys[rows])
    value_cache.index_put_(places, values[rows])


def strides_of_caches(key_cache: Tensor, value_cache: Tensor) -> tuple[int, ...]:
    """How caches [..., P, page_size, KV, D] lie, both alike: strides, up to that of heads."""
    require(key_cache.shape == value_cache.shape, "caches of one shape")
    require(key_cache.stride() == value_cache.stride(), "caches whose strides are the same")
    require(key_cache.stride(-1) == 1, "each head contiguous")
    return key_cache.stride()[:-1]


@jit
def row_of_slot(slot, page_stride, row_stride, PAGE_SIZE: tl.constexpr):
    """Where the row of a slot, which is 64 bits wide, begins in a cache."""
    return slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * row_stride


@jit
def _kv_store_kernel(
    keys, values, key_cache, value_cache, slots,
    keys_row, keys_head, values_row, values_head, cache_page, cache_row, cache_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    element = tl.arange(0, TILE)
    is_element = element < NUM_HEADS * HEAD_DIM
    head = (element // HEAD_DIM).to(tl.int64)
    dim = element % HEAD_DIM
    key = tl.load(keys + row * keys_row + head * keys_head + dim, mask=is_element, other=0)
    value = tl.load(values + row * values_row + head * values_head + dim, mask=is_element, other=0)
    place = row_of_slot(slot, cache_page, cache_row, PAGE_SIZE) + head * cache_head + dim
    tl.store(key_cache + place, key, mask=is_element)
    tl.store(value_cache + place, value, mask=is_element)


def kv_store(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """`kv_store_ref` in one launch, a program a row. Rows may be views of a wider projection."""
    check_tensors(keys, values, key_cache, value_cache, slots)
    tensors = (keys, values, key_cache, value_cache)
    num_rows, num_heads, head_dim = keys.shape
    strides = strides_of_caches(key_cache, value_cache)
    require(keys.shape[1:] == values.shape[1:] == key_cache.shape[2:], "keys, values and caches of one head shape")
    require(len({tensor.dtype for tensor in tensors}) == 1, "keys, values and caches of one dtype")
    require(keys.stride(2) == values.stride(2) == 1, "each head contiguous")
    require(len(values) == num_rows == slots.numel(), "as many values and slots as keys")
    if num_rows:
        tile = power_of_2(num_heads * head_dim)
        _kv_store_kernel[(num_rows,)](
            *tensors, slots.contiguous(),
            *keys.stride()[:2], *values.stride()[:2], *strides,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, PAGE_SIZE=key_cache.shape[1], TILE=tile, num_warps=warps_for(tile),
        )  # fmt: skip
