"""Causal block attention in which requests have different numbers of rows, which only the device knows.

It computes `block_attention.py` for the given rows of whole blocks. All shapes follow from the number of requests and
of given rows, so that a step can be captured.

Axis letters: R requests, W rows of whole blocks, n given rows, P pages, H heads, KV heads of keys and values,
D head dim, C context.
"""

import torch
from torch import Tensor

from dflash_kernels.attention.attention_rows import check_room, check_rows, room_for, strides_of
from dflash_kernels.attention.block_attention import block_attention_ref, launch_blocks
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.kv_format import UNSCALED, KVScales, as_readable
from dflash_kernels.launch import check_tensors, require


def shared_attention_ref(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    widths: Tensor,
    sources: Tensor,
    *,
    window: int | None,
    softmax: Softmax = PLAIN,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each given row to its request's context and to the given rows of its block up to itself.

    query                   [n, H, D]
    keys, values            [n, KV, D]
    widths                  [R] int64, given rows of each request, at least 1
    sources                 [R * W] int64, given row of each row of whole blocks, as `give_rows_ref` returns it
    out                     [n, H, D], contiguous, written; None allocates it
    The other arguments are as in `block_attention_ref`. Returns [n, H, D].
    """
    queries, own_keys, own_values = (item[sources].unflatten(0, (len(widths), -1)) for item in (query, keys, values))
    attended = block_attention_ref(
        queries, own_keys, own_values, key_cache, value_cache, page_table, context_lens,
        is_causal=True, window=window, softmax=softmax, scales=scales,
    )  # fmt: skip
    is_given = torch.arange(attended.shape[1], device=query.device) < widths[:, None]
    places = is_given.flatten().to(torch.int8).argsort(descending=True, stable=True)[: len(query)]
    return torch.index_select(attended.flatten(0, 1), 0, places, out=out)


def shared_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    widths: Tensor,
    sources: Tensor,
    *,
    window: int | None,
    softmax: Softmax = PLAIN,
    scales: KVScales = UNSCALED,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `shared_attention_ref` with the launches of `block_attention`."""
    check_rows(query, keys, values, key_cache, value_cache, page_table, context_lens, window, softmax)
    check_tensors(query, widths, sources)
    require(widths.shape == context_lens.shape and widths.is_contiguous(), "widths", "one per request")
    require(len(sources) % len(widths) == 0 and sources.is_contiguous(), "sources", "whole blocks")
    out = room_for(query) if out is None else out
    check_room(out, query)
    if out.numel():
        tensors = (query, keys, values, as_readable(key_cache), as_readable(value_cache))
        launch_blocks(
            tensors, strides_of(*tensors, page_table), page_table, context_lens, out, len(sources) // len(widths),
            is_causal=True, window=window, softmax=softmax, scales=scales, firsts=sources, counts=widths,
        )  # fmt: skip
    return out
