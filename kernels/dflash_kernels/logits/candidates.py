"""Candidates of top-k and top-p filters: a lower bound of the kept logits, and lists of the tokens above the bound.

The vocabulary is cut into small groups, and the highest logit of each group is known. Few groups matter:

- top-k: the k-th highest of these maxima is a lower bound of the k-th highest logit.
- top-p: there are two bounds. The maxima and sums of groups give a lower bound of the weight above a logit. The
  vocabulary size gives an upper bound of the weight below a logit.

Groups that reach the bound are listed in the order of token ids. If there are many groups, their tokens that reach the
bound are listed instead.

Axis letters: T rows, R requests, G groups, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch import constexpr, jit, power_of_2, tl
from dflash_kernels.launch_config import DEPTH_STEP, LISTED_TILE, LISTED_TOKENS, NUM_DEPTHS
from dflash_kernels.logits.logit_tiles import MAX_FLOAT, TileStats, has_top_k, load_scores, scaled_sums
from dflash_kernels.logits.temperature import MIN_TEMPERATURE

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)
_TL_NUM_DEPTHS, _TL_DEPTH_STEP = constexpr(NUM_DEPTHS), constexpr(DEPTH_STEP)
_TL_LISTED_TOKENS = constexpr(LISTED_TOKENS)
_TL_COUNT_BITS, _TL_COUNT_MASK = constexpr(21), constexpr(2**21 - 1)

KEY_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}
"""Number of leading float32 bits that distinguish any two logits of a dtype."""


class Candidates(NamedTuple):
    """Groups that may contain kept tokens, and a lower bound of the kept keys."""

    lists: Tensor
    """[T, groups + tokens] int32: the groups in ascending order, then memory for a list of tokens."""
    num_listed: Tensor
    """[T] int32, number of listed groups; 0 if no filter cuts the row."""
    low_keys: Tensor
    """[T] int32, the lower bound: no token with a lower key is kept."""
    sizes: dict[str, int]
    """Kernel constants: bits of a token's index in its group, and number of tokens read at a time."""


@jit
def score_keys(scores, KEY_BITS: tl.constexpr):
    """Return integer keys that order like the scores, from their leading bits. 0.0 and -0.0 have the same key."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - KEY_BITS)


@jit
def key_score(key, KEY_BITS: tl.constexpr):
    """Return the score of a key."""
    ordered = key << (32 - KEY_BITS)
    ordered = tl.where(key < 0, ordered | ((1 << (32 - KEY_BITS)) - 1), ordered)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def narrowed(low, high, above, step, level, first, second, third):
    """Narrow the interval of keys `[low, high)` by the sums at or above three keys, `step` apart.

    The sum of tokens at or above `low` reaches the level; the sum at or above `high` does not. Returns the new
    interval and the sum above it.
    """
    num_reached = (first >= level).to(tl.int64) + (second >= level).to(tl.int64) + (third >= level).to(tl.int64)
    low += num_reached * step
    is_tighter = (num_reached < 3) & (low + step < high)
    next_sum = tl.where(num_reached == 0, first, tl.where(num_reached == 1, second, third))
    return low, tl.where(is_tighter, low + step, high), tl.where(is_tighter, next_sum, above)


@jit
def kth_key(keys, count, low, high):
    """Return the highest key K with at least `count` keys >= K, or `low` if there are fewer than `count` keys.

    The three counts of a round are fields of one sum, because a sum over a program costs more than its additions.
    """
    while high - low > 1:
        step = (high - low + 3) >> 2
        first = (keys >= (low + step).to(tl.int32)).to(tl.int64)
        second = (keys >= (low + 2 * step).to(tl.int32)).to(tl.int64)
        third = (keys >= (low + 3 * step).to(tl.int32)).to(tl.int64)
        sums = tl.sum(first + (second << _TL_COUNT_BITS) + (third << (2 * _TL_COUNT_BITS)), 0)
        low, high, _ = narrowed(
            low, high, 0, step, count,
            sums & _TL_COUNT_MASK, (sums >> _TL_COUNT_BITS) & _TL_COUNT_MASK, sums >> (2 * _TL_COUNT_BITS),
        )  # fmt: skip
    return low


@jit
def _depths(scores, max_score, temperature):
    """Return how far scores are below the highest one, in units of the temperature, up to 1000.

    The weight of a token 1000 temperatures below the highest is 0.
    """
    shift = tl.where(max_score == float("-inf"), 0.0, max_score)
    return tl.minimum(shift - scores, (1000 * temperature).to(tl.float32)) * (1.0 / temperature).to(tl.float32)


@jit
def _low_score(
    maxes, tile_maxes, group_sums, row, num_tiles, num_groups, needed, max_score, temperature,
    TILE_G: tl.constexpr, GROUPS: tl.constexpr, GROUP_BITS: tl.constexpr,
):  # fmt: skip
    """Return the highest tried logit L for which the tokens with logits >= L surely weigh at least `needed`, or -inf.

    Each group that reaches L adds a lower bound of the weight of its tokens >= L, the larger of two. One is the weight
    of its highest token. The other is the weight of the whole group, minus the most that its other tokens could weigh
    if all were below L. GROUPS is the number of groups per tile.
    """
    group = tl.arange(0, TILE_G)
    is_group = group < num_groups
    tops = tl.load(tile_maxes + row * num_tiles + group // GROUPS, mask=is_group, other=float("-inf"))
    sums = tl.load(group_sums + row * num_groups + group, mask=is_group, other=0.0)
    sums *= tl.exp(-_depths(tl.minimum(tops, MAX_FLOAT), max_score, temperature))
    depths = _depths(maxes, max_score, temperature)
    failed, found = tl.full((), -1, tl.int32), tl.zeros((), tl.int32) + _TL_NUM_DEPTHS
    while found - failed > 1:
        middle = (failed + found) // 2
        depth = middle.to(tl.float32) * _TL_DEPTH_STEP
        least = tl.maximum(tl.exp(-depths), sums - ((1 << GROUP_BITS) - 1) * tl.exp(-depth))
        is_enough = tl.sum(tl.where(depths <= depth, least, 0.0), 0) >= needed
        failed, found = tl.where(is_enough, failed, middle), tl.where(is_enough, middle, found)
    # Slightly lower, because depths are rounded.
    depth = found.to(tl.float64) * _TL_DEPTH_STEP + 1e-3
    return tl.where(found < _TL_NUM_DEPTHS, max_score.to(tl.float64) - temperature * depth, float("-inf"))


@jit(do_not_specialize=["num_repeats"])
def _list_groups_kernel(
    temperatures, top_ks, top_ps, tile_maxes, tile_sums, group_maxes, group_sums, lists, num_listed, low_keys,
    vocab_size, num_tiles, num_groups, num_repeats,
    KEY_BITS: tl.constexpr, TILE_T: tl.constexpr, TILE_G: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = row // num_repeats
    temperature, top_k, top_p = tl.load(temperatures + request), tl.load(top_ks + request), tl.load(top_ps + request)
    by_count = has_top_k(top_k, vocab_size)
    if (temperature < _TL_MIN_TEMPERATURE) | ((by_count == 0) & (top_p >= 1)):
        tl.store(num_listed + row, 0)
        return
    group = tl.arange(0, TILE_G)
    is_group = group < num_groups
    maxes = tl.load(group_maxes + row * num_groups + group, mask=is_group, other=float("-inf"))
    low = tl.full((), -(1 << (KEY_BITS - 1)), tl.int64)
    keys = tl.where(is_group, score_keys(maxes, KEY_BITS), low.to(tl.int32))
    if by_count:
        low = kth_key(keys, top_k, low, tl.max(keys, 0).to(tl.int64) + 1)
    else:
        sums, max_score = scaled_sums(tile_maxes, tile_sums, row, num_tiles, temperature, TILE_T)
        # Even if all tokens were below this score, their sum would be less than the share that top-p removes.
        mass = tl.maximum(tl.sum(sums, 0), 1.0)
        share = (1 - top_p) * mass
        low_score = max_score.to(tl.float64) - temperature * tl.log(2.0 * vocab_size / share)
        # Require slightly more weight, because the sums are float32. Take one key less, because the logit is rounded.
        needed = (mass - 0.99 * share + 1e-5 * mass).to(tl.float32)
        by_groups = _low_score(
            maxes, tile_maxes, group_sums, row, num_tiles, num_groups, needed, max_score, temperature,
            TILE_G, GROUPS, GROUP_BITS,
        )  # fmt: skip
        low_score = tl.maximum(low_score, by_groups)
        low = score_keys(low_score.to(tl.float32), KEY_BITS).to(tl.int64) - 1
    is_listed = is_group & (keys >= low.to(tl.int32))
    rank = tl.cumsum(is_listed.to(tl.int32), 0)
    row_groups, _ = choose_list(lists, row < 0, row, num_groups, 0)
    tl.store(row_groups + rank - 1, group, mask=is_listed)
    tl.store(num_listed + row, tl.max(rank, 0))
    tl.store(low_keys + row, low.to(tl.int32))


@jit
def load_listed(row_logits, row_list, bits, first, num_listed, vocab_size, TILE_L: tl.constexpr):
    """Load one tile of a list from the entry `first` on: token ids and scores.

    An entry of a list of groups is a token id without its last `bits`. An entry of a list of tokens is a token id, with
    `bits` 0. After the end of the list, ids are `vocab_size`.
    """
    index = tl.arange(0, TILE_L)
    place = first + (index >> bits)
    entry = tl.load(row_list + place, mask=place < num_listed, other=0)
    token = tl.where(place < num_listed, (entry << bits) + (index & ((1 << bits) - 1)), vocab_size)
    return token, load_scores(row_logits, token, vocab_size)


@jit
def _list_tokens(
    row_logits, row_groups, row_tokens, num_listed, key, vocab_size, num_places,
    KEY_BITS: tl.constexpr, GROUP_BITS: tl.constexpr, TILE_L: tl.constexpr,
):  # fmt: skip
    """Write the tokens at or above a key in the listed groups, in the order of ids.

    Returns their number. Counting stops when the list is full.
    """
    count, first = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while (first < num_listed) & (count <= num_places):
        token, scores = load_listed(row_logits, row_groups, GROUP_BITS, first, num_listed, vocab_size, TILE_L)
        is_kept = (token < vocab_size) & (score_keys(scores, KEY_BITS) >= key)
        place = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(row_tokens + place, token, mask=is_kept & (place < num_places))
        count += tl.sum(is_kept.to(tl.int32), 0)
        first += TILE_L >> GROUP_BITS
    return count


@jit
def choose_list(lists, has_tokens, row, num_groups, GROUP_BITS: tl.constexpr):
    """Return the start of a row's list of groups or of tokens, and how many low bits of a token id its entries omit."""
    begin = row * (num_groups * (1 + _TL_LISTED_TOKENS)) + tl.where(has_tokens, num_groups, 0)
    return lists + begin, tl.where(has_tokens, 0, GROUP_BITS)


@jit
def shorten(
    row_logits, lists, row, num_listed, key, vocab_size, num_groups,
    KEY_BITS: tl.constexpr, GROUP_BITS: tl.constexpr, TILE_L: tl.constexpr,
):  # fmt: skip
    """Replace a row's list of groups by a list of tokens, if the groups need several reads and the tokens fit.

    Returns the number of entries of the row's list, and whether the entries are tokens.
    """
    are_tokens = num_listed < 0
    if num_listed > TILE_L >> GROUP_BITS:
        row_groups, _ = choose_list(lists, num_listed < 0, row, num_groups, GROUP_BITS)
        row_tokens, _ = choose_list(lists, num_listed > 0, row, num_groups, GROUP_BITS)
        num_places = num_groups * _TL_LISTED_TOKENS
        num_tokens = _list_tokens(
            row_logits, row_groups, row_tokens, num_listed, key, vocab_size, num_places, KEY_BITS, GROUP_BITS,
            2 * TILE_L,
        )  # fmt: skip
        tl.debug_barrier()  # each thread reads entries that other threads have written
        are_tokens = num_tokens <= num_places
        num_listed = tl.where(are_tokens, num_tokens, num_listed)
    return num_listed, are_tokens


def launch_lists(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, stats: TileStats) -> Candidates:
    """List the groups that may contain kept tokens of the logits [T, V], in one launch."""
    num_rows, vocab_size = logits.shape
    num_tiles, num_groups = stats.maxes.shape[1], stats.group_maxes.shape[1]
    lists = torch.empty((num_rows, num_groups * (1 + LISTED_TOKENS)), dtype=torch.int32, device=logits.device)
    num_listed, low_keys = (torch.empty(num_rows, dtype=torch.int32, device=logits.device) for _ in range(2))
    tile_g, group_bits = power_of_2(num_groups), stats.group.bit_length() - 1
    _list_groups_kernel[(num_rows,)](
        temperatures, top_ks, top_ps, stats.maxes, stats.sums, stats.group_maxes, stats.group_sums, lists, num_listed,
        low_keys, vocab_size, num_tiles, num_groups, num_rows // len(temperatures), KEY_BITS=KEY_BITS[logits.dtype],
        TILE_T=power_of_2(num_tiles), TILE_G=tile_g, GROUPS=stats.tile // stats.group, GROUP_BITS=group_bits,
        num_warps=8, maxnreg=64,  # four programs per multiprocessor, with a few spilled registers
    )  # fmt: skip
    sizes = {"GROUP_BITS": group_bits, "TILE_L": min(LISTED_TILE, tile_g * stats.group)}
    return Candidates(lists, num_listed, low_keys, sizes)
