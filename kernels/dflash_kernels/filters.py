"""Cut distributions to their top-k and top-p tokens.

The reference sorts each row. The kernel searches, from the highest logit down, for the value below which nothing is
kept, and skips tiles whose highest logit is lower still: a row that keeps a few tokens reads a few tiles some ten times
instead of sorting its vocabulary. What is kept is the same, ties included; sums may differ in their last bit.

Axis letters: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.launch import FILTER_TILES, jit, power_of_2, tl

_KEY_BITS = {torch.float32: 32, torch.float16: 19, torch.bfloat16: 16}
"""Leading bits that tell any two logits of a dtype apart, once widened to float32."""


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
def _amount_from(
    logits, probs, tile_tops, key, enough, vocab_size, num_tiles,
    BY_MASS: tl.constexpr, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """The probability, or the number, of the logits at or above `key`; adds up no further than `enough`.

    Visits TILE_T tiles at a time, and only where one of them has a logit that high.
    """
    amount = tl.zeros((), tl.float64)
    tile = 0
    while (tile < num_tiles) & (amount < enough):
        tiles = tile + tl.arange(0, TILE_T)
        top = tl.max(tl.load(tile_tops + tiles, mask=tiles < num_tiles, other=float("-inf")), 0)
        if _keys(top, NUM_BITS) >= key:
            token = tile * TILE_V + tl.arange(0, TILE_T * TILE_V)
            is_above = (_load_keys(logits, token, vocab_size, NUM_BITS) >= key) & (token < vocab_size)
            if BY_MASS:
                amount += tl.sum(tl.load(probs + token, mask=is_above, other=0.0), 0)
            else:
                amount += tl.sum(is_above.to(tl.int32), 0).to(tl.float64)
        tile += TILE_T
    return amount


@jit
def _highest_key(
    logits, probs, tile_tops, top_key, enough, vocab_size, num_tiles,
    BY_MASS: tl.constexpr, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """The highest key with `enough` at or above it: down from the top in growing steps, then by bisection."""
    low, high, step = top_key, top_key + 1, top_key * 0 + 1
    amount = _amount_from(
        logits, probs, tile_tops, low, enough, vocab_size, num_tiles, BY_MASS, NUM_BITS, TILE_V, TILE_T
    )
    while (amount < enough) & (low > 0):
        high = low
        low = tl.maximum(low - step, 0)
        step = step * 2
        amount = _amount_from(
            logits, probs, tile_tops, low, enough, vocab_size, num_tiles, BY_MASS, NUM_BITS, TILE_V, TILE_T
        )
    while high - low > 1:
        middle = (low + high) // 2
        amount = _amount_from(
            logits, probs, tile_tops, middle, enough, vocab_size, num_tiles, BY_MASS, NUM_BITS, TILE_V, TILE_T
        )
        low = tl.where(amount >= enough, middle, low)
        high = tl.where(amount >= enough, high, middle)
    return low


@jit
def _place_of_tie(
    logits, probs, tile_tops, key, number, vocab_size, num_tiles, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr
):
    """Id of the logit equal to `key` that is `number`-th by id (from 1), the probability of one, and their count."""
    seen = tl.zeros((), tl.int64)
    place = tl.zeros((), tl.int64) + vocab_size
    weight = tl.zeros((), tl.float64)
    tile = 0
    while tile < num_tiles:
        if _keys(tl.load(tile_tops + tile), NUM_BITS) >= key:
            token = tile * TILE_V + tl.arange(0, TILE_V)
            is_tie = (_load_keys(logits, token, vocab_size, NUM_BITS) == key) & (token < vocab_size)
            rank = seen + tl.cumsum(is_tie.to(tl.int64), 0)
            place = tl.minimum(place, tl.min(tl.where(is_tie & (rank == number), token, vocab_size), 0))
            weight = tl.maximum(weight, tl.max(tl.load(probs + token, mask=is_tie, other=0.0), 0))
            seen += tl.sum(is_tie.to(tl.int64), 0)
        tile += 1
    return place, weight, seen


@jit
def _threshold_kernel(
    logits, probs, tile_tops, temperatures, top_ks, top_ps, keys, last_ids, masses,
    vocab_size, row_stride, num_tiles, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr, TILE_T: tl.constexpr,
    ALL_TILES: tl.constexpr,
):  # fmt: skip
    """For each row the lowest key kept, the last id kept among those equal to it, and the probability kept."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    probs += row * vocab_size
    tile_tops += row * num_tiles
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    # Nothing to cut: keep every key, and divide by exactly 1.
    key = tl.zeros((), tl.int64)
    last_id = tl.zeros((), tl.int64) + vocab_size
    mass = tl.zeros((), tl.float64) + 1.0
    left = last_id
    if tl.load(temperatures + row) > 0:
        tiles = tl.arange(0, ALL_TILES)
        tops = tl.load(tile_tops + tiles, mask=tiles < num_tiles, other=float("-inf"))
        top_key = _keys(tl.max(tops, 0), NUM_BITS)
        if (top_k > 0) & (top_k < vocab_size):
            enough = top_k.to(tl.float64)
            key = _highest_key(
                logits, probs, tile_tops, top_key, enough, vocab_size, num_tiles, False, NUM_BITS, TILE_V, TILE_T
            )
            above = _amount_from(
                logits, probs, tile_tops, key + 1, enough, vocab_size, num_tiles, False, NUM_BITS, TILE_V, TILE_T
            )
            left = top_k - above.to(tl.int64)
            last_id, weight, _ = _place_of_tie(
                logits, probs, tile_tops, key, left, vocab_size, num_tiles, NUM_BITS, TILE_V
            )
            mass = left * weight + _amount_from(
                logits, probs, tile_tops, key + 1, 2.0, vocab_size, num_tiles, True, NUM_BITS, TILE_V, TILE_T
            )
        if top_p < 1:
            level, low = top_p * mass, key
            key = _highest_key(
                logits, probs, tile_tops, top_key, level, vocab_size, num_tiles, True, NUM_BITS, TILE_V, TILE_T
            )
            key = tl.maximum(key, low)
            above = _amount_from(
                logits, probs, tile_tops, key + 1, 2.0, vocab_size, num_tiles, True, NUM_BITS, TILE_V, TILE_T
            )
            first_id, weight, ties = _place_of_tie(
                logits, probs, tile_tops, key, 1, vocab_size, num_tiles, NUM_BITS, TILE_V
            )
            # Of equal tokens those are kept before which the level is not reached, and no more than top-k left.
            needed = tl.ceil((level - above) / tl.where(weight > 0, weight, 1.0))
            needed = tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float64)).to(tl.int64)
            needed = tl.minimum(needed, tl.where(key == low, left, needed))
            last_id = first_id
            if needed > 1:
                last_id, weight, ties = _place_of_tie(
                    logits, probs, tile_tops, key, needed, vocab_size, num_tiles, NUM_BITS, TILE_V
                )
            mass = above + needed * weight
    tl.store(keys + row, key)
    tl.store(last_ids + row, last_id)
    tl.store(masses + row, mass)


@jit
def _cut_kernel(
    logits, probs, keys, last_ids, masses, vocab_size, row_stride, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TILE_V + tl.arange(0, TILE_V)
    lowest = tl.load(keys + row)
    key = _load_keys(logits + row * row_stride, token, vocab_size, NUM_BITS)
    is_kept = (key > lowest) | ((key == lowest) & (token <= tl.load(last_ids + row)))
    is_token = token < vocab_size
    prob = tl.load(probs + row * vocab_size + token, mask=is_token & is_kept, other=0.0)
    tl.store(probs + row * vocab_size + token, prob / tl.load(masses + row), mask=is_token)


def launch_cut(
    logits: Tensor, probs: Tensor, tile_tops: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, tile: int
) -> None:
    """`cut_ref` in place, in two launches; rows of temperature 0 stay as they are.

    tile_tops  [T, tiles] float32   the highest logit of each tile of `tile` tokens
    """
    num_rows, vocab_size = logits.shape
    num_tiles, num_bits = tile_tops.shape[1], _KEY_BITS[logits.dtype]
    keys, last_ids = (torch.empty(num_rows, dtype=torch.int64, device=logits.device) for _ in range(2))
    masses = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    _threshold_kernel[(num_rows,)](
        logits, probs, tile_tops, temperatures, top_ks, top_ps, keys, last_ids, masses,
        vocab_size, logits.stride(0), num_tiles, NUM_BITS=num_bits, TILE_V=tile,
        TILE_T=min(FILTER_TILES, power_of_2(num_tiles)), ALL_TILES=power_of_2(num_tiles), num_warps=16,
    )  # fmt: skip
    _cut_kernel[(num_tiles, num_rows)](
        logits, probs, keys, last_ids, masses, vocab_size, logits.stride(0), NUM_BITS=num_bits, TILE_V=tile
    )
