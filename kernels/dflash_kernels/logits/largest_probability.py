"""The largest probability of each row of logits and its token, in one pass over them. It writes no row of logits.

Axis letters: T rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, jit, power_of_2, tl
from dflash_kernels.launch_config import argmax_shape
from dflash_kernels.logits.logit_tiles import check_logits, first_id, load_maxes, load_raw, without_nans


class Likeliest(NamedTuple):
    """The most likely token of each row of logits."""

    token_ids: Tensor
    """[T] int64, as `argmax` of the same kernels chooses them"""
    probabilities: Tensor
    """[T] float32, or float64 for such logits. NaN if any logit of the row is NaN or +inf, or all are -inf."""


def largest_probability_ref(logits: Tensor) -> Likeliest:
    """Return the largest value of the softmax of each row of logits [T, V], and its token."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return Likeliest(logits.argmax(-1), torch.exp(wide.amax(-1) - wide.logsumexp(-1)))


@jit
def tile_weights(raw, highest):
    """Return the sum of weights exp(logit - highest) of a tile. It is NaN if a logit is NaN or +inf."""
    return tl.sum(tl.exp(raw - tl.where(tl.abs(highest) < float("inf"), highest, 0.0)), 0)


@jit
def weight_of_tiles(tile_maxes, tile_sums, num_tiles, TILE_T: tl.constexpr):
    """Return a row's highest logit, the sum of its weights relative to it, and whether the highest logit is finite.

    If it is not finite, the first two are 0 and 1.
    """
    maxes = load_maxes(tile_maxes, 0, num_tiles, TILE_T)
    tiles = tl.arange(0, TILE_T)
    sums = tl.load(tile_sums + tiles, mask=tiles < num_tiles, other=0.0)
    highest = tl.max(maxes, 0)
    is_finite = tl.abs(highest) < float("inf")
    highest = tl.where(is_finite, highest, 0.0)
    total = tl.sum(sums * tl.exp(maxes - highest), 0)
    return highest, tl.where(is_finite, total, 1.0), is_finite


@jit
def _tile_kernel(
    logits, tile_maxes, tile_sums, tile_ids, vocab_size, row_stride, num_tiles,
    TILE_V: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    raw = load_raw(logits + row * row_stride, token, vocab_size)
    scores = without_nans(raw)
    highest = tl.max(scores, 0)
    at = row * num_tiles + tile
    tl.store(tile_maxes + at, highest)
    tl.store(tile_sums + at, tile_weights(raw, highest))
    tl.store(tile_ids + at, first_id(scores, token, highest, vocab_size))


@jit
def _combine_kernel(
    tile_maxes, tile_sums, tile_ids, token_ids, probabilities, num_tiles, TILE_T: tl.constexpr, IS_EARLY: tl.constexpr
):
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    first = row * num_tiles
    maxes = load_maxes(tile_maxes, row, num_tiles, TILE_T)
    best = tl.min(tl.where(maxes == tl.max(maxes, 0), tl.arange(0, TILE_T), TILE_T), 0)
    tl.store(token_ids + row, tl.load(tile_ids + first + best))
    _, weight, is_finite = weight_of_tiles(tile_maxes + first, tile_sums + first, num_tiles, TILE_T)
    tl.store(probabilities + row, tl.where(is_finite, 1.0, float("nan")) / weight)


def largest_probability(logits: Tensor) -> Likeliest:
    """Compute `largest_probability_ref` in two launches."""
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    probabilities = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        shape, options = argmax_shape(num_rows), early(logits.device)
        tile = min(shape.tile, power_of_2(vocab_size))
        num_tiles = ceil_div(vocab_size, tile)
        numbers = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=logits.device)
        parts = *numbers, torch.empty((num_rows, num_tiles), dtype=torch.int64, device=logits.device)
        _tile_kernel[(num_rows, num_tiles)](
            logits, *parts, vocab_size, logits.stride(0), num_tiles, TILE_V=tile, num_warps=shape.num_warps, **options
        )
        _combine_kernel[(num_rows,)](
            *parts, token_ids, probabilities, num_tiles, TILE_T=power_of_2(num_tiles), num_warps=1, **options
        )
    return Likeliest(token_ids, probabilities)
