"""Sample tokens from logits with temperature, top-k and top-p, from random numbers keyed by position.

Each sample uses one uniform that is a hash of (seed, position, purpose), so a request's tokens depend neither on its
batch mates nor on how many tokens a step happens to verify: sampled speculative output equals sampled plain decoding.
What the host knows of a batch (nobody samples, nobody filters) comes as keywords, so that nothing waits for the device.

Axis letters: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.categorical import categorical_ref, first_above, sample_probs
from dflash_kernels.filters import cut_ref, launch_cut
from dflash_kernels.launch_config import (
    MIN_TEMPERATURE,
    VOCAB_TILE,
    ceil_div,
    check_dtypes,
    check_tensors,
    constexpr,
    jit,
    power_of_2,
    require,
    tl,
)
from dflash_kernels.uniform import TARGET, stream, uniform_ref, uniform_tile

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)


def sample_ref(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    is_greedy: bool = False,
    has_filters: bool = True,
    purpose: int = TARGET,
) -> Tensor:
    """One token a row: the argmax where the temperature is below MIN_TEMPERATURE, a sample otherwise.

    logits        [T, V]   any float dtype
    temperatures  [T] float64
    top_ks        [T] int64     0 keeps all
    top_ps        [T] float64   1 keeps all
    seeds         [T] int64
    positions     [T] int64     position of the sampled token
    is_greedy     every temperature is below MIN_TEMPERATURE
    has_filters   some top_k or top_p may cut; False promises that none does
    purpose       which stream of random numbers
    Returns [T] int64. Among equal logits the argmax is the lowest id. A row that is not finite gives some id of the
    vocabulary, which nobody should use.
    """
    if is_greedy:
        return logits.argmax(-1)
    probs = filtered_probs_ref(logits, temperatures, top_ks, top_ps, has_filters=has_filters)
    return categorical_ref(probs, uniform_ref(seeds, positions, purpose))


def filtered_probs_ref(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    *,
    is_greedy: bool = False,
    has_filters: bool = True,
) -> Tensor:
    """The distribution a row is sampled from: softmax at its temperature, cut to top-k, then to top-p.

    Shapes and keywords as in `sample_ref`; a greedy row puts everything on the argmax. top-p keeps the smallest
    set of most likely tokens whose probability reaches `top_p`, after top-k and renormalisation; equal logits rank by
    id. Returns [T, V] float64, rows summing to 1.
    """
    top = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    top.scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    if is_greedy:
        return top
    is_sampled = (temperatures >= MIN_TEMPERATURE)[:, None]
    probs = (logits.double() / torch.where(is_sampled, temperatures[:, None], 1.0)).softmax(-1)
    if has_filters:
        probs = cut_ref(logits, probs, top_ks, top_ps)
    return torch.where(is_sampled, probs, top)


@jit
def _load_tile(logits, row, token, vocab_size, row_stride):
    """A tile of logits. NaN counts as -inf, so that an argmax is always a token, and no logit is +inf."""
    tile = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(tile == tile, tile, float("-inf")), 3.4028234663852886e38)


@jit
def _weights(scores, max_score, temperature):
    """Probabilities up to a factor: exp((scores - max_score) / temperature) in float64, 0 where nothing is finite."""
    shift = tl.where(max_score == float("-inf"), 0.0, max_score)
    return tl.exp((scores.to(tl.float64) - shift.to(tl.float64)) * (1.0 / temperature))


@jit
def _tile_stats_kernel(
    logits, temperatures, tile_maxes, tile_ids, tile_sums, vocab_size, row_stride, num_tiles,
    IS_GREEDY: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile.to(tl.int64) * TILE_V + tl.arange(0, TILE_V)
    scores = _load_tile(logits, row, token, vocab_size, row_stride)
    max_score = tl.max(scores, 0)
    tl.store(tile_maxes + row * num_tiles + tile, max_score)
    tl.store(tile_ids + row * num_tiles + tile, tl.min(tl.where(scores == max_score, token, vocab_size - 1), 0))
    if not IS_GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature >= _TL_MIN_TEMPERATURE:
            tl.store(tile_sums + row * num_tiles + tile, tl.sum(_weights(scores, max_score, temperature), 0))


@jit
def _scaled_sums(tile_maxes, tile_sums, row, num_tiles, temperature, TILE_T: tl.constexpr):
    """Sums of the tiles, scaled to the row's highest logit; and that logit."""
    tiles = tl.arange(0, TILE_T)
    is_tile = tiles < num_tiles
    maxes = tl.load(tile_maxes + row * num_tiles + tiles, mask=is_tile, other=float("-inf"))
    sums = tl.load(tile_sums + row * num_tiles + tiles, mask=is_tile, other=0.0)
    max_score = tl.max(maxes, 0)
    return tl.where(maxes > float("-inf"), sums * _weights(maxes, max_score, temperature), 0.0), max_score


@jit
def _best_id(tile_maxes, tile_ids, row, num_tiles, TILE_T: tl.constexpr):
    """The lowest id with the highest logit."""
    tiles = tl.arange(0, TILE_T)
    maxes = tl.load(tile_maxes + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    first = tl.min(tl.where(maxes == tl.max(maxes, 0), tiles, TILE_T), 0)
    return tl.load(tile_ids + row * num_tiles + first)


@jit
def _sample_kernel(
    logits, temperatures, seeds, positions, salt, tile_maxes, tile_ids, tile_sums, token_ids,
    vocab_size, row_stride, num_tiles,
    IS_GREEDY: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chosen = _best_id(tile_maxes, tile_ids, row, num_tiles, TILE_T)
    if not IS_GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature >= _TL_MIN_TEMPERATURE:
            sums, max_score = _scaled_sums(tile_maxes, tile_sums, row, num_tiles, temperature, TILE_T)
            level = uniform_tile(tl.load(seeds + row), tl.load(positions + row), salt) * tl.sum(sums, 0)
            tile = first_above(sums, 0.0, level, TILE_T)
            before = tl.sum(tl.where(tl.arange(0, TILE_T) < tile, sums, 0.0), 0)
            token = tile.to(tl.int64) * TILE_V + tl.arange(0, TILE_V)
            scores = _load_tile(logits, row, token, vocab_size, row_stride)
            weights = tl.where(scores > float("-inf"), _weights(scores, max_score, temperature), 0.0)
            chosen = tile.to(tl.int64) * TILE_V + first_above(weights, before, level, TILE_V)
    tl.store(token_ids + row, chosen)


@jit
def _probs_kernel(
    logits, temperatures, tile_maxes, tile_ids, tile_sums, probs, vocab_size, row_stride, num_tiles,
    IS_GREEDY: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * TILE_V + tl.arange(0, TILE_V)
    chosen = (token == _best_id(tile_maxes, tile_ids, row, num_tiles, TILE_T)).to(tl.float64)
    if not IS_GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature >= _TL_MIN_TEMPERATURE:
            sums, max_score = _scaled_sums(tile_maxes, tile_sums, row, num_tiles, temperature, TILE_T)
            scores = _load_tile(logits, row, token, vocab_size, row_stride)
            row_sum = tl.sum(sums, 0)
            weights = tl.where(scores > float("-inf"), _weights(scores, max_score, temperature), 0.0)
            chosen = weights / tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(probs + row * vocab_size + token, chosen, mask=token < vocab_size)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    is_greedy: bool = False,
    has_filters: bool = True,
    purpose: int = TARGET,
) -> Tensor:
    """`sample_ref`, in two launches without filters; with them the distributions are written out first."""
    _check(logits, temperatures, top_ks, top_ps, seeds, positions)
    if has_filters and not is_greedy:
        probs = filtered_probs(logits, temperatures, top_ks, top_ps)
        return sample_probs(probs, seeds, positions, purpose)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        stats, tiling = _launch_stats(logits, temperatures, is_greedy)
        _sample_kernel[(len(logits),)](
            logits, temperatures, seeds.contiguous(), positions.contiguous(), stream(purpose), *stats, token_ids,
            logits.shape[1], logits.stride(0), stats[0].shape[1], IS_GREEDY=is_greedy, **tiling,
        )  # fmt: skip
    return token_ids


def filtered_probs(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    *,
    is_greedy: bool = False,
    has_filters: bool = True,
) -> Tensor:
    """`filtered_probs_ref`: the softmax in two launches, and the cut, where there is one, in two more."""
    _check(logits, temperatures, top_ks, top_ps)
    probs = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    if len(logits):
        stats, tiling = _launch_stats(logits, temperatures, is_greedy)
        num_tiles = stats[0].shape[1]
        _probs_kernel[(len(logits), num_tiles)](
            logits, temperatures, *stats, probs, logits.shape[1], logits.stride(0), num_tiles,
            IS_GREEDY=is_greedy, **tiling,
        )  # fmt: skip
        if has_filters and not is_greedy:
            launch_cut(logits, probs, stats[0], temperatures, top_ks, top_ps, tiling["TILE_V"])
    return probs


def _launch_stats(
    logits: Tensor, temperatures: Tensor, is_greedy: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int]]:
    """Top, its id and the sum of weights of each tile of logits; and the tiling they were made with."""
    num_rows, vocab_size = logits.shape
    tile = min(VOCAB_TILE, power_of_2(vocab_size))
    num_tiles = ceil_div(vocab_size, tile)
    maxes = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_tiles), dtype=torch.int64, device=logits.device)
    sums = ids if is_greedy else torch.empty((num_rows, num_tiles), dtype=torch.float64, device=logits.device)
    _tile_stats_kernel[(num_rows, num_tiles)](
        logits, temperatures, maxes, ids, sums, vocab_size, logits.stride(0), num_tiles,
        IS_GREEDY=is_greedy, TILE_V=tile,
    )  # fmt: skip
    return (maxes, ids, sums), {"TILE_V": tile, "TILE_T": power_of_2(num_tiles)}


def _check(logits: Tensor, *rows: Tensor) -> None:
    check_tensors(logits, *rows)
    check_dtypes(logits)
    require(logits.stride(1) == 1, "contiguous rows of logits")
    require(all(row.shape == (len(logits),) for row in rows), "one value a row")
    require(all(row.is_contiguous() for row in rows), "contiguous values")
    require(rows[0].dtype == rows[2].dtype == torch.float64, "float64 temperatures and top_ps")
    require(all(row.dtype == torch.int64 for row in (rows[1], *rows[3:])), "int64 top_ks, seeds and positions")
