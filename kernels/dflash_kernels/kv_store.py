"""Write K and V rows into their slots.

Axis letters: T rows, S slots, KV heads of keys and values, D head dim.
"""

from torch import Tensor

from dflash_kernels.launch_config import check_tensors, jit, power_of_2, require, tl, warps_for


def kv_store_ref(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store rows in place; rows whose slot is PAD (negative) are dropped.

    keys, values             [T, KV, D]
    key_cache, value_cache   [S, KV, D]   written
    slots                    [T] int64    no two the same, PAD apart

    The reference waits for the device, to learn how many rows there are; the kernel does not.
    """
    rows = (slots >= 0).nonzero(as_tuple=True)[0]
    key_cache.index_copy_(0, slots[rows], keys[rows])
    value_cache.index_copy_(0, slots[rows], values[rows])


@jit
def _kv_store_kernel(
    keys, values, key_cache, value_cache, slots,
    keys_row, keys_head, values_row, values_head,
    key_cache_row, key_cache_head, value_cache_row, value_cache_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
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
    tl.store(key_cache + slot * key_cache_row + head * key_cache_head + dim, key, mask=is_element)
    tl.store(value_cache + slot * value_cache_row + head * value_cache_head + dim, value, mask=is_element)


def kv_store(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """`kv_store_ref` in one launch, a program a row. Rows may be views of a wider projection."""
    check_tensors(keys, values, key_cache, value_cache, slots)
    tensors = (keys, values, key_cache, value_cache)
    num_rows, num_heads, head_dim = keys.shape
    require(all(tensor.shape[1:] == keys.shape[1:] for tensor in tensors), "keys, values and caches of one head shape")
    require(len({tensor.dtype for tensor in tensors}) == 1, "keys, values and caches of one dtype")
    require(all(tensor.stride(2) == 1 for tensor in tensors), "each head contiguous")
    require(len(values) == num_rows == slots.numel(), "as many values and slots as keys")
    if num_rows:
        tile = power_of_2(num_heads * head_dim)
        _kv_store_kernel[(num_rows,)](
            *tensors, slots.contiguous(),
            *(stride for tensor in tensors for stride in tensor.stride()[:2]),
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, TILE=tile, num_warps=warps_for(tile),
        )  # fmt: skip
