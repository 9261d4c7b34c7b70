"""Sampling of tokens from logits with temperature, top-k and top-p, by random numbers keyed by position.

Each sample uses one uniform number, a hash of (seed, position, purpose). A request's tokens therefore do not depend on
the other requests of its batch or on the number of verified tokens per step. Sampled speculative output equals sampled
plain output. The host passes what it knows about the batch as keywords (all rows greedy, no filters), so that no call
waits for the device.

Axis letters: T rows, R requests, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch import check_tensors, constexpr, jit, require, tl
from dflash_kernels.logits.candidates import KEY_BITS, choose_list, score_keys
from dflash_kernels.logits.categorical import categorical_ref, first_above
from dflash_kernels.logits.filters import cut_ref, draw_kept, launch_cut, no_cut
from dflash_kernels.logits.logit_cap import cap_logits, capped
from dflash_kernels.logits.logit_tiles import (
    MAX_FLOAT,
    check_logits,
    first_id,
    launch_stats,
    load_maxes,
    load_raw,
    load_scores,
    scaled_sums,
    weights_of,
    without_nans,
)
from dflash_kernels.logits.temperature import MIN_TEMPERATURE
from dflash_kernels.logits.uniform import TARGET, stream, uniform_ref, uniform_tile

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)
OF_REQUESTS = "temperatures, top_ks, top_ps, seeds"


class Distribution(NamedTuple):
    """Distribution that the kernels sampled from: exp((logits - max_scores) / temperature) / masses of kept tokens.

    Kept tokens have a key above `keys`, or this key and an id up to `last_ids`. A greedy row keeps one token.
    """

    logits: Tensor
    """[T, V]"""
    temperatures: Tensor
    """[R] float64"""
    max_scores: Tensor
    """[T] float32"""
    keys: Tensor
    """[T] int32"""
    last_ids: Tensor
    """[T] int32"""
    masses: Tensor
    """[T] float64"""


class Chosen(NamedTuple):
    """Sampled token of each row of logits."""

    token_ids: Tensor
    """[T] int64. A row that is not finite has an arbitrary id of the vocabulary, which must not be used."""
    is_finite: Tensor
    """[T] bool, whether the highest logit is finite. It is not finite if any logit is NaN or +inf, or all are -inf."""
    distribution: Distribution | Tensor | None = None
    """Distribution of the sample, for `reject` of the same kernels; [T, V] float64 for the reference. None if all rows
    are greedy."""


def argmax_ref(logits: Tensor) -> Tensor:
    """Return the token with the highest logit of each row, or the lowest id of several: [T, V] -> [T] int64."""
    return logits.argmax(-1)


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
    cap: float | None = None,
) -> Chosen:
    """Return one token per row: the argmax if the temperature is below MIN_TEMPERATURE, otherwise a sample.

    logits        [T, V]        any float dtype; each request has T / R consecutive rows
    temperatures  [R] float64
    top_ks        [R] int64     0 keeps all tokens
    top_ps        [R] float64   1 keeps all tokens
    seeds         [R] int64
    positions     [T] int64     position of the sampled token
    is_greedy     whether every temperature is below MIN_TEMPERATURE
    has_filters   False promises that no top_k or top_p removes tokens
    purpose       stream of random numbers
    cap           cap of the logits (`logit_cap.py`), which are not capped yet
    Among equal logits the argmax is the lowest id.
    """
    logits = cap_logits(logits, cap)
    is_finite = logits.amax(-1).isfinite()
    if is_greedy:
        return Chosen(argmax_ref(logits), is_finite)
    probs = filtered_probs_ref(logits, temperatures, top_ks, top_ps, has_filters=has_filters)
    numbers = uniform_ref(_for_rows(seeds, logits), positions, purpose)
    return Chosen(categorical_ref(probs, numbers), is_finite, probs)


def _for_rows(values: Tensor, logits: Tensor) -> Tensor:
    """Repeat each request's value for its rows of logits: [R] -> [T]."""
    return values.repeat_interleave(len(logits) // max(len(values), 1))


def filtered_probs_ref(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    *,
    is_greedy: bool = False,
    has_filters: bool = True,
) -> Tensor:
    """Return the distribution of each row's sample: softmax at its temperature, cut to top-k, then to top-p.

    Shapes and keywords are as in `sample_ref`. A greedy row has probability 1 at the argmax. After top-k and
    renormalisation, top-p keeps the fewest most likely tokens with a sum of at least `top_p`. Equal logits rank by id.
    Returns [T, V] float64 with rows that sum to 1.
    """
    top = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    top.scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    if is_greedy:
        return top
    temperatures, top_ks, top_ps = (_for_rows(values, logits) for values in (temperatures, top_ks, top_ps))
    is_sampled = (temperatures >= MIN_TEMPERATURE)[:, None]
    probs = (logits.double() / torch.where(is_sampled, temperatures[:, None], 1.0)).softmax(-1)
    if has_filters:
        probs = cut_ref(logits, probs, top_ks, top_ps)
    return torch.where(is_sampled, probs, top)


@jit
def _best_id(
    row_logits, maxes, max_score, vocab_size, TILE_V: tl.constexpr, TILE_T: tl.constexpr, CAP: tl.constexpr = None
):
    """Return the argmax. It reads the first tile with the highest logit a second time."""
    tile = tl.min(tl.where(maxes == max_score, tl.arange(0, TILE_T), TILE_T), 0)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    scores = capped(without_nans(load_raw(row_logits, token, vocab_size)), CAP, row_logits.dtype.element_ty)
    return first_id(scores, token, max_score, vocab_size)


@jit
def _draw(row_logits, sums, max_score, level, temperature, vocab_size, TILE_V: tl.constexpr, TILE_T: tl.constexpr):
    """Return the token at which the running sum of all weights passes `level`."""
    tile = first_above(sums, 0.0, level, TILE_T)
    before = tl.sum(tl.where(tl.arange(0, TILE_T) < tile, sums, 0.0), 0)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    scores = load_scores(row_logits, token, vocab_size)
    weights = tl.where(scores > float("-inf"), weights_of(scores, max_score, temperature), 0.0)
    return (tile * TILE_V + first_above(weights, before, level, TILE_V)).to(tl.int64)


@jit
def _describe(max_scores, keys, last_ids, masses, row, max_score, key, last_id, mass):
    tl.store(max_scores + row, max_score)
    tl.store(keys + row, key)
    tl.store(last_ids + row, last_id.to(tl.int32))
    tl.store(masses + row, mass)


@jit(do_not_specialize=["num_repeats"])
def _sample_kernel(
    logits, temperatures, seeds, positions, salt, tile_maxes, tile_has_nans, tile_sums,
    lists, num_listed, has_tokens, max_scores, keys, last_ids, masses, token_ids, is_finite,
    vocab_size, row_stride, num_tiles, num_groups, num_repeats,
    IS_GREEDY: tl.constexpr, HAS_FILTERS: tl.constexpr, CAP: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
    KEY_BITS: tl.constexpr, GROUP_BITS: tl.constexpr, TILE_L: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILE_T)
    maxes = load_maxes(tile_maxes, row, num_tiles, TILE_T)
    has_nan = tl.max(tl.load(tile_has_nans + row * num_tiles + tiles, mask=tiles < num_tiles, other=0), 0)
    highest = tl.max(maxes, 0)
    tl.store(is_finite + row, (has_nan == 0) & (tl.abs(highest) < float("inf")))
    row_logits = logits + row * row_stride
    if IS_GREEDY:
        tl.store(token_ids + row, _best_id(row_logits, maxes, highest, vocab_size, TILE_V, TILE_T, CAP))
        return
    temperature = tl.load(temperatures + row // num_repeats)
    max_score = tl.minimum(highest, MAX_FLOAT)
    if temperature < _TL_MIN_TEMPERATURE:
        best = _best_id(row_logits, maxes, highest, vocab_size, TILE_V, TILE_T)
        tl.store(token_ids + row, best)
        _describe(max_scores, keys, last_ids, masses, row, max_score, score_keys(max_score, KEY_BITS), best, 1.0)
        return
    number = uniform_tile(tl.load(seeds + row // num_repeats), tl.load(positions + row), salt)
    if HAS_FILTERS:
        length = tl.load(num_listed + row)
        if length > 0:
            row_list, bits = choose_list(lists, tl.load(has_tokens + row) != 0, row, num_groups, GROUP_BITS)
            chosen = draw_kept(
                row_logits, row_list, bits, length, tl.load(keys + row), tl.load(last_ids + row),
                number * tl.load(masses + row), max_score, temperature, vocab_size, KEY_BITS, TILE_L,
            )  # fmt: skip
            tl.store(token_ids + row, chosen)
            tl.store(max_scores + row, max_score)
            return
    sums, _ = scaled_sums(tile_maxes, tile_sums, row, num_tiles, temperature, TILE_T)
    mass = tl.sum(sums, 0)
    chosen = _draw(row_logits, sums, max_score, number * mass, temperature, vocab_size, TILE_V, TILE_T)
    tl.store(token_ids + row, chosen)
    lowest = tl.full((), -(1 << (KEY_BITS - 1)), tl.int32)
    _describe(max_scores, keys, last_ids, masses, row, max_score, lowest, row * 0 + vocab_size, mass)


def argmax(logits: Tensor) -> Tensor:
    """Compute `argmax_ref` in two launches."""
    check_logits(logits)
    # The kernel never reads these tensors, but it is compiled for their types.
    real, whole = (torch.empty(1, dtype=dtype, device=logits.device) for dtype in (torch.float64, torch.int64))
    values = real, whole, real, whole, whole
    return _launch_sample(logits, *values, is_greedy=True, has_filters=False, purpose=TARGET).token_ids


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
    cap: float | None = None,
) -> Chosen:
    """Compute `sample_ref` in two launches, or in four with filters, without writing a distribution.

    A cap costs no launch if all rows are greedy, in 16 bits.
    """
    check_logits(logits)
    if not is_greedy or logits.element_size() > 2:
        logits, cap = cap_logits(logits, cap), None
    _check_values(logits, temperatures, top_ks, top_ps, seeds)
    check_tensors(logits, positions)
    require(positions.shape == (len(logits),), "positions", "one per row of logits")
    require(seeds.dtype == positions.dtype == torch.int64, "seeds, positions", "int64")
    return _launch_sample(
        logits, temperatures, top_ks, top_ps, seeds, positions.contiguous(),
        is_greedy=is_greedy, has_filters=has_filters and not is_greedy, purpose=purpose, cap=cap,
    )  # fmt: skip


def _launch_sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, seeds: Tensor, positions: Tensor,
    *, is_greedy: bool, has_filters: bool, purpose: int, cap: float | None = None,
) -> Chosen:  # fmt: skip
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        stats = launch_stats(
            logits, temperatures, top_ks, top_ps, is_greedy=is_greedy, has_filters=has_filters, cap=cap
        )
        cut = launch_cut(logits, temperatures, top_ks, top_ps, stats) if has_filters else no_cut(logits)
        max_scores = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        num_tiles, num_groups = stats.maxes.shape[1], stats.group_maxes.shape[1]
        _sample_kernel[(num_rows,)](
            logits, temperatures, seeds, positions, stream(purpose), stats.maxes, stats.has_nans, stats.sums,
            cut.lists, cut.num_listed, cut.has_tokens, max_scores, cut.keys, cut.last_ids, cut.masses,
            token_ids, is_finite,
            vocab_size, logits.stride(0), num_tiles, num_groups, num_rows // len(temperatures), IS_GREEDY=is_greedy,
            HAS_FILTERS=has_filters, CAP=cap, KEY_BITS=KEY_BITS[logits.dtype], **stats.tiling(), **cut.sizes,
            num_warps=8,
        )  # fmt: skip
        if not is_greedy:
            described = Distribution(logits, temperatures, max_scores, cut.keys, cut.last_ids, cut.masses)
            return Chosen(token_ids, is_finite, described)
    return Chosen(token_ids, is_finite)


def _check_values(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, *seeds: Tensor) -> None:
    values = temperatures, top_ks, top_ps, *seeds
    check_tensors(logits, *values)
    num_values = len(temperatures)
    require(all(value.shape == (num_values,) for value in values), OF_REQUESTS, "one value per request")
    are_equal = len(logits) == 0 or (num_values > 0 and len(logits) % num_values == 0)
    require(are_equal, "logits", "equally many rows per request")
    require(all(value.is_contiguous() for value in values), OF_REQUESTS, "contiguous memory")
    require(temperatures.dtype == top_ps.dtype == torch.float64, "temperatures, top_ps", "float64")
    require(all(value.dtype == torch.int64 for value in (top_ks, *seeds)), "top_ks, seeds", "int64")
