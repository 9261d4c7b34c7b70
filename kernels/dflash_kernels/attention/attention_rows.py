"""The rows of attention: checks of their tensors, room for the output, and strides for the kernels.

Axis letters: R requests, N rows of a request, T flat rows, H heads, KV heads of keys and values, D head dim.
"""

import torch
from torch import Tensor

from dflash_kernels.attention.softmax import Softmax, check_softmax
from dflash_kernels.kv.kv_format import check_formats
from dflash_kernels.kv.kv_store import strides_of_caches
from dflash_kernels.launch import check_dtypes, check_tensors, require
from dflash_kernels.launch_config import MAX_GRID


def room_for(query: Tensor) -> Tensor:
    """Return uninitialised memory for the output of attention, with the shape of the queries."""
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def check_room(out: Tensor, query: Tensor) -> None:
    """Raise ValueError or TypeError if the output of attention to `query` cannot be written to `out`."""
    check_tensors(query, out)
    check_dtypes(query, out)
    require(out.shape == query.shape and out.is_contiguous(), "out", "contiguous, with the shape of the queries")


def check_blocks(
    query: Tensor, block_keys: Tensor, block_values: Tensor, key_cache: Tensor, value_cache: Tensor,
    page_table: Tensor, context_lens: Tensor, window: int | None, softmax: Softmax,
) -> None:  # fmt: skip
    """Raise unless the kernels can read blocks [R, N, H, D] and their caches. It raises what `check_rows` raises."""
    check_rows(query, block_keys, block_values, key_cache, value_cache, page_table, context_lens, window, softmax)
    require(len(query) == len(context_lens), "context_lens", "one per request")


def check_rows(
    query: Tensor, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor,
    page_table: Tensor, context_lens: Tensor, window: int | None, softmax: Softmax,
) -> None:  # fmt: skip
    """Raise unless the kernels can read rows [..., H, D] and their caches.

    See `check_tensors`, `check_formats`, `check_softmax` and `require` for the errors.
    """
    check_tensors(query, keys, values, key_cache, value_cache, page_table, context_lens)
    check_formats(key_cache, value_cache, query, keys, values)
    (num_heads, head_dim), num_kv = query.shape[-2:], keys.shape[-2]
    require(num_heads % num_kv == 0, "query", "a number of heads that is a multiple of the KV heads")
    rows_shape = (*query.shape[:-2], num_kv, head_dim)
    require(keys.shape == values.shape == rows_shape, "keys, values", "one row per query row")
    require(key_cache.shape[2:] == (num_kv, head_dim), "caches", "the KV heads of the keys")
    require(len(page_table) == len(context_lens), "page_table, context_lens", "one row per request")
    require(page_table.stride(1) == 1, "page_table", "contiguous rows")
    require(window is None or window > 0, "window", "at least 1")
    check_softmax(softmax, query)
    require(len(context_lens) * num_kv <= MAX_GRID, "query", f"at most {MAX_GRID} requests times KV heads")


def flat_blocks(
    query: Tensor, block_keys: Tensor, block_values: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor
) -> tuple[list[Tensor], list[int]]:
    """The rows of blocks, [R * N, H, D] and [R * N, KV, D] twice, and the strides of all tensors for the kernels."""
    rows, keys, values = flat = [tensor.flatten(0, 1) for tensor in (query, block_keys, block_values)]
    return flat, strides_of(rows, keys, values, key_cache, value_cache, page_table)


def strides_of(
    query: Tensor, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, page_table: Tensor
) -> list[int]:
    """Strides for the kernels: row and head of rows [T, H, D], then of both caches, then of the page table."""
    rows = (query, keys, values)
    require(all(tensor.stride(2) == 1 for tensor in rows), "query, keys, values", "contiguous heads")
    strides = [stride for tensor in rows for stride in tensor.stride()[:2]]
    return [*strides, *strides_of_caches(key_cache, value_cache), page_table.stride(0)]
