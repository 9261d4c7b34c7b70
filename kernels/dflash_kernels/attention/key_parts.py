"""Parts of the keys of attention: how many are in use, and the launch that adds up their results.

Axis letters: S parts, R requests, N rows of a request, T flat rows, H heads, D head dim.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_kernels.attention.attention_config import COMBINE_TILE, FEW_KEYS
from dflash_kernels.attention.attention_walk import rows_of_tile, tiles_in_sight
from dflash_kernels.early_launch import let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, jit, tl


@jit
def parts_in_use(num_tiles, NUM_PARTS: tl.constexpr, TILE_N: tl.constexpr):
    """Return the number of parts that are in use, for the tile count of one row tile or of a vector of row tiles.

    The host does not know lengths, so it launches parts for the longest context. Of four or more parts, half stay
    empty if there are few tiles.
    """
    num_parts = num_tiles * 0 + NUM_PARTS
    if NUM_PARTS >= 4:
        num_parts = tl.where(num_tiles * TILE_N < FEW_KEYS * NUM_PARTS, NUM_PARTS // 2, NUM_PARTS)
    return tl.minimum(num_parts, num_tiles)


@jit
def _combine_kernel(
    parts, part_lses, context_lens, firsts, counts, out, num_rows, num_pages, num_out,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_R: tl.constexpr, TILE_D: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)  # index of a row's head in [R, N, H]
    is_row = place < num_out
    row, head = place // (NUM_KV * GROUP) % num_rows, place % (NUM_KV * GROUP)
    first_row, last_row = rows_of_tile((row * GROUP + head % GROUP) // TILE_M, num_rows, GROUP, TILE_M)
    # The previous launch may still run: it does not write the lengths.
    request = place // (NUM_KV * GROUP * num_rows)
    context_len = tl.load(context_lens + request, mask=is_row, other=0).to(tl.int32)
    _, num_context, block_tile, block_tile_end = tiles_in_sight(
        context_len, tl.minimum(context_len, num_pages * PAGE_SIZE), first_row, last_row, num_rows,
        IS_CAUSAL, WINDOW, TILE_N,
    )  # fmt: skip
    num_parts = tl.where(is_row, parts_in_use(num_context + block_tile_end - block_tile, NUM_SPLITS, TILE_N), 0)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    dim = tl.arange(0, TILE_D)
    max_lse = tl.full((TILE_R,), float("-inf"), tl.float32)
    for part in tl.static_range(NUM_SPLITS):
        lse = tl.load(part_lses + part * num_out + place, mask=part < num_parts, other=float("-inf"))
        max_lse = tl.maximum(max_lse, lse)
    max_lse = tl.where(is_row, max_lse, 0.0)
    acc = tl.zeros((TILE_R, TILE_D), tl.float32)
    weight_sum = tl.zeros((TILE_R,), tl.float32)
    for part in tl.static_range(NUM_SPLITS):
        is_part = part < num_parts
        lse = tl.load(part_lses + part * num_out + place, mask=is_part, other=float("-inf"))
        weight = tl.exp2(lse - max_lse)
        is_element = is_part[:, None] & (dim < HEAD_DIM)[None, :]
        element = (part * num_out + place).to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
        acc += tl.load(parts + element, mask=is_element, other=0.0) * weight[:, None]
        weight_sum += weight
    combined = acc / tl.where(is_row, weight_sum, 1.0)[:, None]
    target = place.to(tl.int64)
    if counts is not None:
        is_row = is_row & (row < tl.load(counts + request, mask=is_row, other=0))
        target = (tl.load(firsts + request * num_rows, mask=is_row, other=0) + row) * (NUM_KV * GROUP) + head
    is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], combined.to(out.dtype.element_ty), mask=is_element)


def room_for_parts(num_splits: int, num_out: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors for S parts of T rows: means [S, T, D] and logarithms [S, T]. One part goes to `out` itself."""
    if num_splits == 1:
        return out, out
    parts = torch.empty((num_splits, num_out, out.shape[-1]), dtype=torch.float32, device=out.device)
    return parts, torch.empty((num_splits, num_out), dtype=torch.float32, device=out.device)


def combine_parts(
    parts: Tensor,
    part_lses: Tensor,
    context_lens: Tensor,
    out: Tensor,
    num_rows: int,
    num_pages: int,
    cut: Mapping[str, Any],
    firsts: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Launch the sum of the parts of the keys: means [S, R * N, D] and base 2 logarithms [S, R * N] -> out [T, H, D].

    `cut` has the arguments by which the kernels agree on the parts in use. The last two are as in `launch_blocks`.
    """
    num_out = parts.shape[1]
    _combine_kernel[(ceil_div(num_out, COMBINE_TILE),)](
        parts, part_lses, context_lens, firsts, counts, out, num_rows, num_pages, num_out, **cut,
        TILE_R=COMBINE_TILE, num_warps=COMBINE_TILE,
    )  # fmt: skip
