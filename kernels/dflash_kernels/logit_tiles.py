"""What each tile of a row of logits holds. One pass over the logits, by which rows are then chosen, cut and sampled.

Axis letters: T rows, R requests, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch_config import (
    VOCAB_GROUP,
    argmax_shape,
    ceil_div,
    constexpr,
    jit,
    power_of_2,
    sampling_shape,
    tl,
)
from dflash_kernels.temperature import MIN_TEMPERATURE

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)
MAX_FLOAT = constexpr(3.4028234663852886e38)


class TileStats(NamedTuple):
    """Of each tile of `tile` logits; and, of rows that may be cut, of each group of `group`."""

    maxes: Tensor
    """[T, tiles] float32, the highest logit; NaN counts as -inf."""
    has_nans: Tensor
    """[T, tiles] int32"""
    sums: Tensor
    """[T, tiles] float64, weights scaled to the tile's highest logit; none in rows that are greedy or have a top-k."""
    group_maxes: Tensor
    """[T, groups] float32; nothing in greedy rows."""
    group_sums: Tensor
    """[T, groups] float32, weights scaled to the tile's highest logit; nothing in rows that have not top-p alone."""
    tile: int
    group: int

    def tiling(self) -> dict[str, int]:
        return {"TILE_V": self.tile, "TILE_T": power_of_2(self.maxes.shape[1])}


@jit
def load_raw(row_logits, token, vocab_size):
    """Logits of tokens, -inf past the vocabulary."""
    return tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)


@jit
def without_nans(raw):
    """NaN counts as -inf, so that an argmax is always a token."""
    return tl.where(raw == raw, raw, float("-inf"))


@jit
def load_scores(row_logits, token, vocab_size):
    """Logits of tokens of which a weight can be made: no NaN, and none is +inf."""
    return tl.minimum(without_nans(load_raw(row_logits, token, vocab_size)), MAX_FLOAT)


@jit
def weights_of(scores, max_score, temperature):
    """Probabilities up to a factor: exp((scores - max_score) / temperature) in float64, 0 where nothing is finite."""
    shift = tl.where(max_score == float("-inf"), 0.0, max_score)
    return tl.exp((scores.to(tl.float64) - shift.to(tl.float64)) * (1.0 / temperature))


@jit
def has_top_k(top_k, vocab_size):
    return (top_k > 0) & (top_k < vocab_size)


@jit
def load_maxes(tile_maxes, row, num_tiles, TILE_T: tl.constexpr):
    tiles = tl.arange(0, TILE_T)
    return tl.load(tile_maxes + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))


@jit
def scaled_sums(tile_maxes, tile_sums, row, num_tiles, temperature, TILE_T: tl.constexpr):
    """Sums of the tiles, scaled to the row's highest logit; and that logit."""
    tiles = tl.arange(0, TILE_T)
    maxes = tl.minimum(load_maxes(tile_maxes, row, num_tiles, TILE_T), MAX_FLOAT)
    sums = tl.load(tile_sums + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    max_score = tl.max(maxes, 0)
    return tl.where(maxes > float("-inf"), sums * weights_of(maxes, max_score, temperature), 0.0), max_score


@jit(do_not_specialize=["num_repeats"])
def _tile_stats_kernel(
    logits, temperatures, top_ks, top_ps, tile_maxes, tile_has_nans, tile_sums, group_maxes, group_sums,
    vocab_size, row_stride, num_tiles, num_groups, num_repeats,
    IS_GREEDY: tl.constexpr, HAS_FILTERS: tl.constexpr, TILE_V: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    raw = load_raw(logits + row * row_stride, token, vocab_size)
    scores = without_nans(raw)
    tl.store(tile_maxes + row * num_tiles + tile, tl.max(scores, 0))
    tl.store(tile_has_nans + row * num_tiles + tile, tl.max((raw != raw).to(tl.int32), 0))
    if not IS_GREEDY:
        temperature = tl.load(temperatures + row // num_repeats)
        if temperature >= _TL_MIN_TEMPERATURE:
            scores = tl.minimum(scores, MAX_FLOAT)
            is_summed = True
            if HAS_FILTERS:
                maxes = tl.max(tl.reshape(scores, (TILE_V // GROUP, GROUP)), 1)
                group = row * num_groups + tile * (TILE_V // GROUP) + tl.arange(0, TILE_V // GROUP)
                tl.store(group_maxes + group, maxes)
                # What is left of top-k is summed when it is known: far fewer weights.
                is_summed = has_top_k(tl.load(top_ks + row // num_repeats), vocab_size) == 0
            if is_summed:
                weights = weights_of(scores, tl.max(scores, 0), temperature)
                tl.store(tile_sums + row * num_tiles + tile, tl.sum(weights, 0))
                if HAS_FILTERS:
                    is_cut = tl.load(top_ps + row // num_repeats) < 1
                    if is_cut:
                        sums = tl.sum(tl.reshape(weights, (TILE_V // GROUP, GROUP)), 1)
                        tl.store(group_sums + group, sums.to(tl.float32))


def launch_stats(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, *, is_greedy: bool, has_filters: bool
) -> TileStats:
    """One pass over logits [T, V]; temperatures, top_ks and top_ps [R] hold for T / R rows each."""
    num_rows, vocab_size = logits.shape
    # Sums depend on the tile, so that of sampled rows is one for any number of rows.
    shape = argmax_shape(num_rows) if is_greedy else sampling_shape()
    tile = min(shape.tile, power_of_2(vocab_size))
    group = min(VOCAB_GROUP, tile)
    num_tiles = ceil_div(vocab_size, tile)
    num_groups = num_tiles * (tile // group)
    maxes = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    has_nans = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    sums = maxes if is_greedy else torch.empty((num_rows, num_tiles), dtype=torch.float64, device=logits.device)
    has_groups = has_filters and not is_greedy
    group_maxes = (
        torch.empty((num_rows, num_groups), dtype=torch.float32, device=logits.device) if has_groups else maxes
    )
    group_sums = torch.empty_like(group_maxes) if has_groups else maxes
    _tile_stats_kernel[(num_rows, num_tiles)](
        logits, temperatures, top_ks, top_ps, maxes, has_nans, sums, group_maxes, group_sums,
        vocab_size, logits.stride(0), num_tiles, num_groups, num_rows // len(temperatures),
        IS_GREEDY=is_greedy, HAS_FILTERS=has_groups, TILE_V=tile, GROUP=group, num_warps=shape.num_warps,
    )  # fmt: skip
    return TileStats(maxes, has_nans, sums, group_maxes, group_sums, tile, group)
