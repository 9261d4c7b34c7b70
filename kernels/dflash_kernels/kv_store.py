"""Write K and V rows into their slots.

A cache [P, page_size, KV, D] consists of pages of rows, and a slot is `page * page_size + offset`. The pages of one
layer need not be adjacent in memory, because a page of memory holds all layers. Key and value cache have equal strides.

Axis letters: T rows, P pages, KV heads of keys and values, D head dim.
"""

from torch import Tensor

from dflash_kernels.launch_config import check_tensors, jit, power_of_2, require, tl, warps_for


def kv_store_ref(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store rows in the caches. Rows with the slot PAD (negative) are not stored.

    keys, values             [T, KV, D]
    key_cache, value_cache   [P, page_size, KV, D]   written
    slots                    [T] int64               all different, except PAD

    The reference waits for the device, because it needs the number of rows to store. The kernel does not wait.
    """
    rows = (slots >= 0).nonzero(as_tuple=True)[0]
    page_size = key_cache.shape[1]
    places = slots[rows] // page_size, slots[rows] % page_size
    key_cache.index_put_(places, keys[rows])
    value_cache.index_put_(places, values[rows])


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
    """Compute `kv_store_ref` in one launch, one program per row. Rows may be views of a wider projection."""
    check_tensors(keys, values, key_cache, value_cache, slots)
    tensors = (keys, values, key_cache, value_cache)
    num_rows, num_heads, head_dim = keys.shape
    strides = strides_of_caches(key_cache, value_cache)
    require(keys.shape[1:] == values.shape[1:] == key_cache.shape[2:], "keys, values, caches", "equal head shapes")
    require(len({tensor.dtype for tensor in tensors}) == 1, "keys, values, caches", "one dtype")
    require(keys.stride(2) == values.stride(2) == 1, "keys, values", "contiguous heads")
    require(len(values) == num_rows, "values", "one row per key row")
    require(slots.numel() == num_rows, "slots", "one slot per key row")
    if num_rows:
        tile = power_of_2(num_heads * head_dim)
        _kv_store_kernel[(num_rows,)](
            *tensors, slots.contiguous(),
            *keys.stride()[:2], *values.stride()[:2], *strides,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, PAGE_SIZE=key_cache.shape[1], TILE=tile, num_warps=warps_for(tile),
        )  # fmt: skip
