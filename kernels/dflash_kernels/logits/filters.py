"""Top-k and top-p filters that never write a distribution to memory.

The reference sorts each row. The kernels run one program per row and search for the row's threshold: the key of the
lowest kept logit. They search among the tokens that `candidates.py` lists. Each pass over a list quarters the interval
of keys: top-k counts the tokens above a key, top-p sums their weights. The kernels keep the same tokens as the
reference, also among equal logits. Sums have a fixed order and may differ from the reference in the last bit.

Axis letters: T rows, R requests, G groups, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch import constexpr, jit, power_of_2, tl
from dflash_kernels.logits.candidates import (
    KEY_BITS,
    choose_list,
    key_score,
    launch_lists,
    load_listed,
    narrowed,
    score_keys,
    shorten,
)
from dflash_kernels.logits.categorical import first_above
from dflash_kernels.logits.logit_tiles import (
    MAX_FLOAT,
    TileStats,
    has_top_k,
    load_maxes,
    load_scores,
    scaled_sums,
    weights_of,
)
from dflash_kernels.logits.temperature import MIN_TEMPERATURE

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)


class Cut(NamedTuple):
    """Kept tokens of each row: tokens with a key above `keys`, and tokens with this key and an id up to `last_ids`."""

    lists: Tensor
    """[T, groups + tokens] int32, ascending: the groups that may contain kept tokens, then the listed tokens."""
    num_listed: Tensor
    """[T] int32, length of the list. If no filter cuts the row, it is 0 and the other fields are not set."""
    has_tokens: Tensor
    """[T] int32, whether the list has tokens instead of groups. Tokens are listed only if that list is shorter."""
    keys: Tensor
    """[T] int32"""
    last_ids: Tensor
    """[T] int32"""
    masses: Tensor
    """[T] float64, sum of the kept weights."""
    sizes: dict[str, int]
    """Kernel constants: bits of a token's index in its group, and number of tokens read at a time."""


def cut_ref(logits: Tensor, probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Return distributions cut to top-k, then to top-p, and renormalised. Rows without a filter do not change.

    logits  [T, V]           rank of the tokens; equal logits rank by id
    probs   [T, V] float64   distribution at any temperature
    top_ks  [T] int64        0 keeps all tokens
    top_ps  [T] float64      1 keeps all tokens; every value keeps the most likely token
    Returns [T, V] float64.
    """
    vocab_size = probs.shape[-1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ranked = probs.gather(1, order)
    rank = torch.arange(vocab_size, device=probs.device)
    limits = torch.where(top_ks > 0, top_ks, vocab_size)
    ranked = ranked.masked_fill(rank >= limits[:, None], 0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    # The test for `top_ps < 1` keeps the last tokens of a row without top-p: the sum may round to 1 before them.
    ranked = ranked.masked_fill((top_ps < 1)[:, None] & (before >= top_ps[:, None]) & (rank > 0), 0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    # The probabilities of a row must not depend on filters of other rows in the batch.
    is_cut = (limits < vocab_size) | (top_ps < 1)
    return torch.where(is_cut[:, None], torch.zeros_like(probs).scatter(-1, order, ranked), probs)


@jit
def _threshold(
    row_logits, row_list, bits, num_listed, low, high, level, max_score, temperature, vocab_size,
    BY_MASS: tl.constexpr, KEY_BITS: tl.constexpr, TILE_L: tl.constexpr,
):  # fmt: skip
    """Return the highest key K for which the tokens with keys >= K reach the level, by number or by weight.

    Also returns the number or weight of the tokens above K.
    """
    above = tl.zeros((), tl.float64)
    while high - low > 1:
        step = (high - low + 3) >> 2
        first_sums = tl.zeros((TILE_L,), tl.float64)
        second_sums = tl.zeros((TILE_L,), tl.float64)
        third_sums = tl.zeros((TILE_L,), tl.float64)
        for first in range(0, num_listed, TILE_L >> bits):
            token, scores = load_listed(row_logits, row_list, bits, first, num_listed, vocab_size, TILE_L)
            weights = (token < vocab_size).to(tl.float64)
            if BY_MASS:
                weights = weights_of(scores, max_score, temperature)
            keys = score_keys(scores, KEY_BITS)
            first_sums += tl.where(keys >= (low + step).to(tl.int32), weights, 0.0)
            second_sums += tl.where(keys >= (low + 2 * step).to(tl.int32), weights, 0.0)
            third_sums += tl.where(keys >= (low + 3 * step).to(tl.int32), weights, 0.0)
        low, high, above = narrowed(
            low, high, above, step, level, tl.sum(first_sums, 0), tl.sum(second_sums, 0), tl.sum(third_sums, 0)
        )
    return low.to(tl.int32), above


@jit
def _resolve_ties(
    row_logits, row_list, bits, num_listed, key, needed, max_score, temperature, vocab_size,
    KEY_BITS: tl.constexpr, TILE_L: tl.constexpr,
):  # fmt: skip
    """Keep the `needed` lowest ids of the tokens at a key.

    Returns the last kept id, the number of kept ids, and the mass of these tokens and of all tokens above the key.
    """
    last_id, num_ties = tl.full((), -1, tl.int32), tl.zeros((), tl.int32)
    masses = tl.zeros((TILE_L,), tl.float64)
    for first in range(0, num_listed, TILE_L >> bits):
        token, scores = load_listed(row_logits, row_list, bits, first, num_listed, vocab_size, TILE_L)
        keys = score_keys(scores, KEY_BITS)
        is_tie = (keys == key) & (token < vocab_size)
        rank = num_ties + tl.cumsum(is_tie.to(tl.int32), 0)
        last_id = tl.maximum(last_id, tl.max(tl.where(is_tie & (rank <= needed), token, -1), 0))
        num_ties += tl.sum(is_tie.to(tl.int32), 0)
        masses += tl.where(keys > key, weights_of(scores, max_score, temperature), 0.0)
    num_kept = tl.minimum(needed, num_ties)
    weight = weights_of(key_score(key, KEY_BITS), max_score, temperature)
    return last_id, num_kept, tl.sum(masses, 0) + num_kept * weight


@jit(do_not_specialize=["num_repeats"])
def _cut_kernel(
    logits, temperatures, top_ks, top_ps, tile_maxes, tile_sums, lists, num_listed, has_tokens, low_keys,
    keys, last_ids, masses,
    vocab_size, row_stride, num_tiles, num_groups, num_repeats,
    KEY_BITS: tl.constexpr, GROUP_BITS: tl.constexpr, TILE_L: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(num_listed + row)
    if length == 0:
        return
    request = row // num_repeats
    temperature, top_k, top_p = tl.load(temperatures + request), tl.load(top_ks + request), tl.load(top_ps + request)
    row_logits = logits + row * row_stride
    max_score = tl.minimum(tl.max(load_maxes(tile_maxes, row, num_tiles, TILE_T), 0), MAX_FLOAT)
    high = score_keys(max_score, KEY_BITS).to(tl.int64) + 1
    key = tl.load(low_keys + row)
    length, are_tokens = shorten(
        row_logits, lists, row, length, key, vocab_size, num_groups, KEY_BITS, GROUP_BITS, TILE_L
    )
    tl.store(num_listed + row, length)
    tl.store(has_tokens + row, are_tokens.to(tl.int32))
    row_list, bits = choose_list(lists, are_tokens, row, num_groups, GROUP_BITS)
    last_id, num_kept = tl.zeros((), tl.int32) + vocab_size, tl.zeros((), tl.int32) + vocab_size
    mass = tl.zeros((), tl.float64)
    if has_top_k(top_k, vocab_size):
        level = top_k.to(tl.float64)
        key, above = _threshold(
            row_logits, row_list, bits, length, key.to(tl.int64), high, level, max_score, temperature, vocab_size,
            False, KEY_BITS, TILE_L,
        )  # fmt: skip
        last_id, num_kept, mass = _resolve_ties(
            row_logits, row_list, bits, length, key, (level - above).to(tl.int32), max_score, temperature, vocab_size,
            KEY_BITS, TILE_L,
        )  # fmt: skip
    else:
        sums, _ = scaled_sums(tile_maxes, tile_sums, row, num_tiles, temperature, TILE_T)
        mass = tl.sum(sums, 0)
    if top_p < 1:
        level = tl.maximum(top_p * mass, 1e-300)
        mass_key, above = _threshold(
            row_logits, row_list, bits, length, key.to(tl.int64), high, level, max_score, temperature, vocab_size,
            True, KEY_BITS, TILE_L,
        )  # fmt: skip
        # Keep tokens at the threshold until the level is reached, but not more than top-k has kept.
        weight = weights_of(key_score(mass_key, KEY_BITS), max_score, temperature)
        needed = tl.ceil((level - above) / tl.where(weight > 0, weight, 1.0))
        most = tl.where(mass_key == key, num_kept, vocab_size).to(tl.float64)
        needed = tl.minimum(tl.maximum(needed, 1.0), most).to(tl.int32)
        key = mass_key
        last_id, _, mass = _resolve_ties(
            row_logits, row_list, bits, length, key, needed, max_score, temperature, vocab_size, KEY_BITS, TILE_L
        )
    tl.store(keys + row, key)
    tl.store(last_ids + row, last_id)
    tl.store(masses + row, mass)


@jit
def probs_of(
    logits, row, token, temperature, max_scores, keys, last_ids, masses, vocab_size, row_stride, KEY_BITS: tl.constexpr,
):  # fmt: skip
    """Return probabilities of tokens: one token per row, or several tokens of one row. 0 after the vocabulary's end."""
    scores = load_scores(logits + row * row_stride, token, vocab_size)
    # A greedy row keeps one token, so any temperature gives it the probability 1.
    temperature = tl.where(temperature >= _TL_MIN_TEMPERATURE, temperature, 1.0)
    weights = kept_weights(
        scores, token, tl.load(keys + row), tl.load(last_ids + row), tl.load(max_scores + row), temperature, KEY_BITS
    )
    mass = tl.load(masses + row)
    return weights / tl.where(mass > 0, mass, 1.0)


@jit
def kept_weights(scores, token, key, last_id, max_score, temperature, KEY_BITS: tl.constexpr):
    """Return the weights of the kept tokens, and 0 for other tokens."""
    token_keys = score_keys(scores, KEY_BITS)
    is_kept = (token_keys > key) | ((token_keys == key) & (token <= last_id))
    return tl.where(is_kept & (scores > float("-inf")), weights_of(scores, max_score, temperature), 0.0)


@jit
def draw_kept(
    row_logits, row_list, bits, num_listed, key, last_id, level, max_score, temperature, vocab_size,
    KEY_BITS: tl.constexpr, TILE_L: tl.constexpr,
):  # fmt: skip
    """Return the token at which the running sum of kept weights passes `level`, or the last token with a weight."""
    before, running = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    place, found = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    is_passed = tl.zeros((), tl.int32)
    while (place < num_listed) & (is_passed == 0):
        token, scores = load_listed(row_logits, row_list, bits, place, num_listed, vocab_size, TILE_L)
        mass = tl.sum(kept_weights(scores, token, key, last_id, max_score, temperature, KEY_BITS), 0)
        found, before = tl.where(mass > 0, place, found), tl.where(mass > 0, running, before)
        running += mass
        is_passed = ((mass > 0) & (running > level)).to(tl.int32)
        place += TILE_L >> bits
    token, scores = load_listed(row_logits, row_list, bits, found, num_listed, vocab_size, TILE_L)
    weights = kept_weights(scores, token, key, last_id, max_score, temperature, KEY_BITS)
    index = first_above(weights, before, level, TILE_L)
    return tl.sum(tl.where(tl.arange(0, TILE_L) == index, token, 0), 0).to(tl.int64)


def launch_cut(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, stats: TileStats) -> Cut:
    """Find the kept tokens of the logits [T, V] in two launches. The request's values [R] apply to T / R rows each."""
    num_rows, vocab_size = logits.shape
    num_tiles, num_groups = stats.maxes.shape[1], stats.group_maxes.shape[1]
    found = launch_lists(logits, temperatures, top_ks, top_ps, stats)
    has_tokens, keys, last_ids = (torch.empty(num_rows, dtype=torch.int32, device=logits.device) for _ in range(3))
    masses = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    _cut_kernel[(num_rows,)](
        logits, temperatures, top_ks, top_ps, stats.maxes, stats.sums, found.lists, found.num_listed, has_tokens,
        found.low_keys, keys, last_ids, masses,
        vocab_size, logits.stride(0), num_tiles, num_groups, num_rows // len(temperatures),
        KEY_BITS=KEY_BITS[logits.dtype], **found.sizes, TILE_T=power_of_2(num_tiles), num_warps=8,
    )  # fmt: skip
    return Cut(found.lists, found.num_listed, has_tokens, keys, last_ids, masses, found.sizes)


def no_cut(logits: Tensor) -> Cut:
    """Return an empty cut for a batch without filters, with memory for the fields of unfiltered rows."""
    keys, last_ids = (torch.empty(len(logits), dtype=torch.int32, device=logits.device) for _ in range(2))
    masses = torch.empty(len(logits), dtype=torch.float64, device=logits.device)
    return Cut(keys[:, None], keys, keys, keys, last_ids, masses, {"GROUP_BITS": 0, "TILE_L": 1})
