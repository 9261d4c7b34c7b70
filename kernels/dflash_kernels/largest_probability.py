"""The largest probability of each row of logits, in one pass over them. Nothing of the size of the logits is written.

Axis letters: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.launch_config import argmax_shape, ceil_div, jit, power_of_2, tl
from dflash_kernels.logit_tiles import check_logits, load_maxes, load_raw, without_nans


def largest_probability_ref(logits: Tensor) -> Tensor:
    """Return the softmax's largest value of each row: [T, V] -> [T] float32, or float64 for such logits.

    A row has NaN if any of its logits is NaN or +inf, or all are -inf.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.exp(wide.amax(-1) - wide.logsumexp(-1))


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
def _tile_kernel(logits, tile_maxes, tile_sums, vocab_size, row_stride, num_tiles, TILE_V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    raw = load_raw(logits + row * row_stride, tile * TILE_V + tl.arange(0, TILE_V), vocab_size)
    highest = tl.max(without_nans(raw), 0)
    tl.store(tile_maxes + row * num_tiles + tile, highest)
    tl.store(tile_sums + row * num_tiles + tile, tile_weights(raw, highest))


@jit
def _combine_kernel(tile_maxes, tile_sums, out, num_tiles, TILE_T: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, weight, is_finite = weight_of_tiles(tile_maxes + row * num_tiles, tile_sums + row * num_tiles, num_tiles, TILE_T)
    tl.store(out + row, tl.where(is_finite, 1.0, float("nan")) / weight)


def largest_probability(logits: Tensor) -> Tensor:
    """Compute `largest_probability_ref` in two launches."""
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        shape = argmax_shape(num_rows)
        tile = min(shape.tile, power_of_2(vocab_size))
        num_tiles = ceil_div(vocab_size, tile)
        parts = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=logits.device)
        _tile_kernel[(num_rows, num_tiles)](
            logits, *parts, vocab_size, logits.stride(0), num_tiles, TILE_V=tile, num_warps=shape.num_warps
        )
        _combine_kernel[(num_rows,)](*parts, out, num_tiles, TILE_T=power_of_2(num_tiles), num_warps=1)
    return out
