"""Cut distributions to their top-k and top-p tokens.

The reference sorts each row. The kernel finds, by bisection on the bits of a logit, the value below which nothing is
kept, skipping tiles whose highest logit is lower still: a row that keeps a few tokens costs a few tiles a bit instead
of a sort of the whole vocabulary. What is kept is the same, ties included; sums may differ in their last bit.

Axis letters: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.launch import jit, tl

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
def _count_from(logits, tile_tops, key, enough, vocab_size, num_tiles, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr):
    """How many logits are at or above `key`; stops counting at `enough`."""
    count = tl.zeros((), tl.int64)
    tile = 0
    while (tile < num_tiles) & (count < enough):
        if _keys(tl.load(tile_tops + tile), NUM_BITS) >= key:
            token = tile * TILE_V + tl.arange(0, TILE_V)
            is_above = (_load_keys(logits, token, vocab_size, NUM_BITS) >= key) & (token < vocab_size)
            count += tl.sum(is_above.to(tl.int64), 0)
        tile += 1
    return count


@jit
def _mass_from(
    logits, probs, tile_tops, key, enough, vocab_size, num_tiles, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr
):
    """Probability of all logits at or above `key`; stops adding at `enough`."""
    mass = tl.zeros((), tl.float64)
    tile = 0
    while (tile < num_tiles) & (mass < enough):
        if _keys(tl.load(tile_tops + tile), NUM_BITS) >= key:
            token = tile * TILE_V + tl.arange(0, TILE_V)
            is_above = _load_keys(logits, token, vocab_size, NUM_BITS) >= key
            mass += tl.sum(tl.load(probs + token, mask=is_above & (token < vocab_size), other=0.0), 0)
        tile += 1
    return mass


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
    vocab_size, row_stride, num_tiles, NUM_BITS: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """For each row the lowest key kept, the last id kept among those equal to it, and the probability kept."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    probs += row * vocab_size
    tile_tops += row * num_tiles
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    has_k = (top_k > 0) & (top_k < vocab_size)
    # Nothing to cut: keep every key, and divide by exactly 1.
    key = tl.zeros((), tl.int64)
    last_id = tl.zeros((), tl.int64) + vocab_size
    mass = tl.zeros((), tl.float64) + 1.0
    is_drawn = tl.load(temperatures + row) > 0
    kept = tl.zeros((), tl.int64) + vocab_size
    if is_drawn & has_k:
        for step in range(NUM_BITS):
            higher = key + (tl.full((), 1, tl.int64) << (NUM_BITS - 1 - step))
            if _count_from(logits, tile_tops, higher, top_k, vocab_size, num_tiles, NUM_BITS, TILE_V) >= top_k:
                key = higher
        above = _count_from(logits, tile_tops, key + 1, top_k, vocab_size, num_tiles, NUM_BITS, TILE_V)
        kept = top_k - above
        last_id, weight, _ = _place_of_tie(logits, probs, tile_tops, key, kept, vocab_size, num_tiles, NUM_BITS, TILE_V)
        mass = (
            _mass_from(logits, probs, tile_tops, key + 1, 2.0, vocab_size, num_tiles, NUM_BITS, TILE_V) + kept * weight
        )
    if is_drawn & (top_p < 1):
        level = top_p * mass
        low = key
        key = tl.zeros((), tl.int64)
        for step in range(NUM_BITS):
            higher = key + (tl.full((), 1, tl.int64) << (NUM_BITS - 1 - step))
            if _mass_from(logits, probs, tile_tops, higher, level, vocab_size, num_tiles, NUM_BITS, TILE_V) >= level:
                key = higher
        key = tl.maximum(key, low)
        above_mass = _mass_from(logits, probs, tile_tops, key + 1, 2.0, vocab_size, num_tiles, NUM_BITS, TILE_V)
        last_id, weight, ties = _place_of_tie(logits, probs, tile_tops, key, 1, vocab_size, num_tiles, NUM_BITS, TILE_V)
        # Of equal tokens those are kept before which the level is not reached, and no more than top-k left.
        needed = tl.ceil((level - above_mass) / tl.where(weight > 0, weight, 1.0))
        needed = tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float64)).to(tl.int64)
        needed = tl.minimum(needed, tl.where(key == low, kept, needed))
        if needed > 1:
            last_id, weight, ties = _place_of_tie(
                logits, probs, tile_tops, key, needed, vocab_size, num_tiles, NUM_BITS, TILE_V
            )
        mass = above_mass + needed * weight
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
        vocab_size, logits.stride(0), num_tiles, NUM_BITS=num_bits, TILE_V=tile, num_warps=8,
    )  # fmt: skip
    _cut_kernel[(num_tiles, num_rows)](
        logits, probs, keys, last_ids, masses, vocab_size, logits.stride(0), NUM_BITS=num_bits, TILE_V=tile
    )
