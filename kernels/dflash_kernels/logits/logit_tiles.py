"""Statistics of each tile of a row of logits, from one pass. Argmax, filters and sampling read them.

Axis letters: T rows, R requests, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.launch_config import VOCAB_GROUP, argmax_shape, sampling_shape
from dflash_kernels.logits.logit_cap import capped
from dflash_kernels.logits.temperature import MIN_TEMPERATURE

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)
MAX_FLOAT = constexpr(3.4028234663852886e38)


class TileStats(NamedTuple):
    """Statistics of each tile of `tile` logits, and in rows with filters also of each group of `group` logits."""

    maxes: Tensor
    """[T, tiles] float32, the highest logit; NaN counts as -inf."""
    has_nans: Tensor
    """[T, tiles] int32, 1 if a logit is NaN."""
    sums: Tensor
    """[T, tiles] float64, sum of weights relative to the tile's highest logit. Not set for greedy rows or top-k."""
    group_maxes: Tensor
    """[T, groups] float32, the highest logit. Not set for greedy rows."""
    group_sums: Tensor
    """[T, groups] float32, sum of weights relative to the tile's highest logit. Set only for rows with top-p alone."""
    tile: int
    group: int

    def tiling(self) -> dict[str, int]:
        return {"TILE_V": self.tile, "TILE_T": power_of_2(self.maxes.shape[1])}


def check_logits(logits: Tensor) -> None:
    """Raise unless Triton can read logits [T, V]; see `check_tensors`, `check_dtypes` and `require` for the errors."""
    check_tensors(logits)
    check_dtypes(logits)
    require(logits.dim() == 2 and logits.stride(1) == 1, "logits", "two axes and contiguous rows")


@jit
def load_raw(row_logits, token, vocab_size):
    """Load the logits of tokens. Ids after the end of the vocabulary give -inf."""
    return tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)


@jit
def without_nans(raw):
    """Replace NaN by -inf, so that an argmax is always a token."""
    return tl.where(raw == raw, raw, float("-inf"))


@jit
def first_id(scores, token, max_score, vocab_size):
    """Return the lowest id with the highest logit, or an arbitrary id if no token has this logit."""
    return tl.min(tl.where(scores == max_score, token, vocab_size - 1), 0).to(tl.int64)


@jit
def load_scores(row_logits, token, vocab_size):
    """Load the logits of tokens with -inf for NaN and the largest float for +inf, so that weights are never NaN."""
    return tl.minimum(without_nans(load_raw(row_logits, token, vocab_size)), MAX_FLOAT)


@jit
def weights_of(scores, max_score, temperature):
    """Return the weights exp((scores - max_score) / temperature) in float64, or 0 if `max_score` is -inf."""
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
    """Return the sum of weights of each tile, relative to the row's highest logit, and this logit."""
    tiles = tl.arange(0, TILE_T)
    maxes = tl.minimum(load_maxes(tile_maxes, row, num_tiles, TILE_T), MAX_FLOAT)
    sums = tl.load(tile_sums + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    max_score = tl.max(maxes, 0)
    return tl.where(maxes > float("-inf"), sums * weights_of(maxes, max_score, temperature), 0.0), max_score


@jit(do_not_specialize=["num_repeats"])
def _tile_stats_kernel(
    logits, temperatures, top_ks, top_ps, tile_maxes, tile_has_nans, tile_sums, group_maxes, group_sums,
    vocab_size, row_stride, num_tiles, num_groups, num_repeats,
    IS_GREEDY: tl.constexpr, HAS_FILTERS: tl.constexpr, CAP: tl.constexpr, TILE_V: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    raw = load_raw(logits + row * row_stride, token, vocab_size)
    scores = without_nans(raw)
    tl.store(tile_maxes + row * num_tiles + tile, capped(tl.max(scores, 0), CAP, logits.dtype.element_ty))
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
                # The filter itself sums the tokens kept by top-k: far fewer weights.
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
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, *, is_greedy: bool, has_filters: bool,
    cap: float | None = None,
) -> TileStats:  # fmt: skip
    """Compute the statistics of logits [T, V] in one pass. The request's values [R] apply to T / R rows each.

    Greedy rows may have a `cap`, in 16 bits: then maxima are after the cap.
    """
    num_rows, vocab_size = logits.shape
    # Sums depend on the tile size. Sampled rows therefore have one tile size for any number of rows.
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
        IS_GREEDY=is_greedy, HAS_FILTERS=has_groups, CAP=cap, TILE_V=tile, GROUP=group, num_warps=shape.num_warps,
    )  # fmt: skip
    return TileStats(maxes, has_nans, sums, group_maxes, group_sums, tile, group)
