"""Cut distributions to their top-k and top-p tokens.

The reference sorts each row. The kernels search for each row's threshold, the lowest logit that stays, by refining a
key of its leading bits: each pass over all rows and tiles of the vocabulary fixes two more bits, and skips the tiles
whose highest logit lies below every candidate. top-k counts the tokens above a candidate, top-p adds up their
probabilities, one search after the other. The tokens kept are the reference's, ties included; sums are made in a fixed
order and may differ from the reference's in their last bit.

Axis letters: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.launch_config import MIN_TEMPERATURE, constexpr, jit, power_of_2, tl

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)

_KEY_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}
"""Leading bits that tell any two logits of a dtype apart, once widened to float32; an even number."""


def cut_ref(logits: Tensor, probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Rows cut to top-k, then to top-p, renormalised; rows with no filter come back bit for bit.

    logits  [T, V]           what ranks the tokens; equal ones rank by id
    probs   [T, V] float64   their distribution, at any temperature
    top_ks  [T] int64        0 keeps all
    top_ps  [T] float64      1 keeps all; the most likely token is kept whatever it says
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
    # Without the first test a top_p of 1 would drop tail tokens whenever the sum rounds up to 1 early.
    ranked = ranked.masked_fill((top_ps < 1)[:, None] & (before >= top_ps[:, None]) & (rank > 0), 0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    # A row's numbers must not depend on whether another row of the batch is filtered.
    is_cut = (limits < vocab_size) | (top_ps < 1)
    return torch.where(is_cut[:, None], torch.zeros_like(probs).scatter(-1, order, ranked), probs)


@jit
def _keys(scores, NUM_BITS: tl.constexpr):
    """Floats as int64 in the same order, from 0 up, by their leading bits; the two zeros are one."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return ordered >> (32 - NUM_BITS)


@jit
def _load_keys(logits, token, vocab_size, NUM_BITS: tl.constexpr):
    scores = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return _keys(tl.where(scores == scores, scores, float("-inf")), NUM_BITS)


@jit
def _refined_key(keys, tile_sums, row, level, num_tiles, shift, TILE_T: tl.constexpr):
    """The key after a pass: two more bits, those of the highest candidate at or above which the sums reach `level`."""
    key = tl.load(keys + row)
    tiles = tl.arange(0, TILE_T)
    for candidate in tl.static_range(3):
        cell = tile_sums + (row * 3 + candidate) * num_tiles + tiles
        row_sum = tl.sum(tl.load(cell, mask=tiles < num_tiles, other=0.0), 0)
        key += (row_sum >= level).to(tl.int64) << shift
    return key


@jit
def _refine_threshold_kernel(
    logits, probs, tile_maxes, levels, keys, tile_sums, new_keys, new_tile_sums,
    vocab_size, row_stride, num_tiles, shift,
    IS_FIRST: tl.constexpr, BY_MASS: tl.constexpr, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """One pass: how many tokens, or how much probability, a tile has at or above each of three candidate keys."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    level = tl.load(levels + row)
    if level == 0:
        return
    key = tl.zeros((), tl.int64)
    if not IS_FIRST:
        key = _refined_key(keys, tile_sums, row, level, num_tiles, shift + 2, TILE_T)
    if tile == 0:
        tl.store(new_keys + row, key)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    cell = new_tile_sums + row * 3 * num_tiles + tile
    one = tl.full((), 1, tl.int64) << shift
    # Most tiles of most rows have nothing as high as the keys in question.
    if _keys(tl.load(tile_maxes + row * num_tiles + tile), NUM_BITS) >= key + one:
        token_keys = _load_keys(logits + row * row_stride, token, vocab_size, NUM_BITS)
        weights = tl.where(token < vocab_size, 1.0, 0.0).to(tl.float64)
        if BY_MASS:
            is_above = (token_keys >= key + one) & (token < vocab_size)
            weights = tl.load(probs + row * vocab_size + token, mask=is_above, other=0.0)
        for candidate in tl.static_range(3):
            is_above = token_keys >= key + one * (candidate + 1)
            tl.store(cell + candidate * num_tiles, tl.sum(tl.where(is_above, weights, 0.0), 0))
    else:
        for candidate in tl.static_range(3):
            tl.store(cell + candidate * num_tiles, 0.0)


@jit
def _tie_stats_kernel(
    logits, probs, levels, low_keys, keys, tile_sums, new_keys, tie_stats, vocab_size, row_stride, num_tiles,
    NUM_BITS: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """At the threshold: a tile's number and probability above it, the number equal to it, and one's probability."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    level = tl.load(levels + row)
    if level == 0:
        return
    key = _refined_key(keys, tile_sums, row, level, num_tiles, 0, TILE_T)
    key = tl.maximum(key, tl.load(low_keys + row))
    if tile == 0:
        tl.store(new_keys + row, key)
    token = tile * TILE_V + tl.arange(0, TILE_V)
    token_keys = _load_keys(logits + row * row_stride, token, vocab_size, NUM_BITS)
    is_token = token < vocab_size
    above, equal = is_token & (token_keys > key), is_token & (token_keys == key)
    weights = tl.load(probs + row * vocab_size + token, mask=above | equal, other=0.0)
    cell = tie_stats + row * 4 * num_tiles + tile
    tl.store(cell, tl.sum(above.to(tl.int32), 0).to(tl.float64))
    tl.store(cell + num_tiles, tl.sum(tl.where(above, weights, 0.0), 0))
    tl.store(cell + 2 * num_tiles, tl.sum(equal.to(tl.int32), 0).to(tl.float64))
    tl.store(cell + 3 * num_tiles, tl.max(tl.where(equal, weights, 0.0), 0))


@jit
def _resolve_ties_kernel(
    logits, temperatures, top_ks, top_ps, levels, tie_stats, tie_keys, keys, last_ids, masses, num_ties_kept,
    vocab_size, row_stride, num_tiles,
    BY_MASS: tl.constexpr, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """Decide how many tokens equal to the threshold are kept, and find the last. After top-k, set top-p's level."""
    row = tl.program_id(0).to(tl.int64)
    level, mass = tl.load(levels + row), tl.load(masses + row)
    if level > 0:
        tiles = tl.arange(0, TILE_T)
        is_tile = tiles < num_tiles
        cell = tie_stats + row * 4 * num_tiles + tiles
        above_mass = tl.sum(tl.load(cell + num_tiles, mask=is_tile, other=0.0), 0)
        ties = tl.load(cell + 2 * num_tiles, mask=is_tile, other=0.0)
        weight = tl.max(tl.load(cell + 3 * num_tiles, mask=is_tile, other=0.0), 0)
        key = tl.load(tie_keys + row)
        if BY_MASS:
            # Those are kept before which the level is not reached, and no more than top-k left of them.
            needed = tl.ceil((level - above_mass) / tl.where(weight > 0, weight, 1.0))
            max_ties = tl.where(key == tl.load(keys + row), tl.load(num_ties_kept + row), vocab_size).to(tl.float64)
            needed = tl.minimum(tl.maximum(needed, 1.0), max_ties)
        else:
            needed = level - tl.sum(tl.load(cell, mask=is_tile, other=0.0), 0)
        needed = tl.minimum(needed, tl.sum(ties, 0))
        rank = tl.cumsum(ties, 0)
        tile = tl.min(tl.where(rank >= needed, tiles, TILE_T - 1), 0)
        before = tl.sum(tl.where(tiles < tile, ties, 0.0), 0)
        token = tile * TILE_V + tl.arange(0, TILE_V)
        is_tie = (_load_keys(logits + row * row_stride, token, vocab_size, NUM_BITS) == key) & (token < vocab_size)
        is_last = is_tie & (tl.cumsum(is_tie.to(tl.int32), 0).to(tl.float64) + before == needed)
        tl.store(last_ids + row, tl.max(tl.where(is_last, token, 0), 0).to(tl.int64))
        mass = above_mass + needed * weight
        tl.store(masses + row, mass)
        tl.store(keys + row, key)
        tl.store(num_ties_kept + row, needed.to(tl.int64))
    if not BY_MASS:
        top_p = tl.load(top_ps + row)
        is_cut = (tl.load(temperatures + row) >= _TL_MIN_TEMPERATURE) & (top_p < 1)
        # Above 0, which means that there is nothing to do.
        tl.store(levels + row, tl.where(is_cut, tl.maximum(top_p * mass, 1e-300), 0.0))


@jit
def _cut_kernel(
    logits, probs, keys, last_ids, masses, vocab_size, row_stride, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE_V + tl.arange(0, TILE_V)
    lowest = tl.load(keys + row)
    key = _load_keys(logits + row * row_stride, token, vocab_size, NUM_BITS)
    is_kept = (key > lowest) | ((key == lowest) & (token <= tl.load(last_ids + row)))
    is_token = token < vocab_size
    prob = tl.load(probs + row * vocab_size + token, mask=is_token & is_kept, other=0.0)
    tl.store(probs + row * vocab_size + token, prob / tl.load(masses + row), mask=is_token)


def launch_cut(
    logits: Tensor, probs: Tensor, tile_maxes: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, tile: int
) -> None:
    """`cut_ref` in place; greedy rows stay as they are. A launch for every two bits of a logit, twice.

    tile_maxes  [T, tiles] float32   the highest logit of each tile of `tile` tokens
    """
    num_rows, vocab_size = logits.shape
    num_tiles, num_bits = tile_maxes.shape[1], _KEY_BITS[logits.dtype]
    sizes = vocab_size, logits.stride(0), num_tiles
    tiling = {"NUM_BITS": num_bits, "TILE_V": tile, "TILE_T": power_of_2(num_tiles)}
    # Until a filter says otherwise: keep every key, and divide by exactly 1.
    keys = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    last_ids, num_ties_kept = (torch.full_like(keys, vocab_size) for _ in range(2))
    masses = torch.ones(num_rows, dtype=torch.float64, device=logits.device)
    tie_stats = torch.empty((num_rows, 4, num_tiles), dtype=torch.float64, device=logits.device)
    levels = torch.where((temperatures >= MIN_TEMPERATURE) & (top_ks < vocab_size), top_ks, 0).double()
    for by_mass in (False, True):
        pass_keys, tile_sums = keys, tie_stats
        for shift in range(num_bits - 2, -1, -2):
            new_pass_keys = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
            new_tile_sums = torch.empty((num_rows, 3, num_tiles), dtype=torch.float64, device=logits.device)
            _refine_threshold_kernel[(num_rows, num_tiles)](
                logits, probs, tile_maxes, levels, pass_keys, tile_sums, new_pass_keys, new_tile_sums, *sizes, shift,
                IS_FIRST=shift == num_bits - 2, BY_MASS=by_mass, **tiling,
            )  # fmt: skip
            pass_keys, tile_sums = new_pass_keys, new_tile_sums
        tie_keys = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        _tie_stats_kernel[(num_rows, num_tiles)](
            logits, probs, levels, keys, pass_keys, tile_sums, tie_keys, tie_stats, *sizes, **tiling
        )
        _resolve_ties_kernel[(num_rows,)](
            logits, temperatures, top_ks, top_ps, levels, tie_stats, tie_keys, keys, last_ids, masses, num_ties_kept,
            *sizes, BY_MASS=by_mass, **tiling,
        )  # fmt: skip
    _cut_kernel[(num_rows, num_tiles)](
        logits, probs, keys, last_ids, masses, vocab_size, logits.stride(0), NUM_BITS=num_bits, TILE_V=tile
    )
