"""Attention of a block of rows over paged context and the block itself.

One definition serves prefill, verification and drafting: a request's rows stand at positions `context_len + i`, the
context `[0, context_len)` is read through the page table, and the block's own keys and values come dense. Reading
pages only below `context_len` is what keeps rejected rows and a draft's noise out of every result.

Axis letters: R requests, N rows, S slots, P pages, H heads, KV heads of keys and values, D head dim, C context.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def block_attention_ref(
    query: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    *,
    page_size: int,
    is_causal: bool,
    window: int | None,
) -> Tensor:
    """Attend from each row to the context and, within the block, to all rows or only to those before.

    query                     [R, N, H, D]
    block_keys, block_values  [R, N, KV, D]
    key_cache, value_cache    [S, KV, D]
    page_table                [R, P] int64, wide enough for the longest context
    context_lens              [R] int64
    window                    a row sees keys less than `window` positions away; None is unlimited. Without causality
                              the window bounds both directions.
    Returns [R, N, H, D].
    """
    num_rows = query.shape[1]
    context = torch.arange(page_table.shape[1] * page_size, device=query.device)  # [C]
    slots = page_table[:, context // page_size] * page_size + context % page_size  # [R, C]
    is_context = context < context_lens[:, None]  # [R, C]
    rows = torch.arange(num_rows, device=query.device)
    positions = context_lens[:, None] + rows  # [R, N]
    key_positions = torch.cat((context.expand(len(slots), -1), positions), dim=1)  # [R, C + N]
    is_key = torch.cat((is_context, torch.ones_like(positions, dtype=torch.bool)), dim=1)
    visible = is_key[:, None, :] & _visible(positions, key_positions, is_causal, window)  # [R, N, C + N]
    # Slots outside the context may hold anything, NaN included, and a masked weight of zero does not silence NaN.
    hole = ~is_context[:, :, None, None]
    keys = torch.cat((key_cache[slots].masked_fill(hole, 0), block_keys), dim=1)
    values = torch.cat((value_cache[slots].masked_fill(hole, 0), block_values), dim=1)
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None],
        enable_gqa=query.shape[2] != keys.shape[2],
    )
    return attended.transpose(1, 2)


def _visible(positions: Tensor, key_positions: Tensor, is_causal: bool, window: int | None) -> Tensor:
    """Which keys each row may see: [R, N] x [R, M] -> [R, N, M]."""
    distance = positions[:, :, None] - key_positions[:, None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance < window
        if not is_causal:
            visible &= distance > -window
    return visible
