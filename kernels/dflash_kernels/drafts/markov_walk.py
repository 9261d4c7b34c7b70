"""Choose the best token of each drafted position, from left to right, with a bias by the token before (DSpark).

The bias of a position's logits is a product of low rank: a row of the token before, times a weight with a row per
token. The choice at a position needs the token before it, so each position takes one launch. It computes the product,
adds the logits and finds the best token, so no biased logits are written. Programs combine their results by an atomic
maximum of a score's key and the token's inverted id, which gives the same token in any order.

The weight is larger than the cache, and each position reads it whole. Every other position reads it backwards, and so
begins with the part that the position before has left in the cache.
Source: speculators 0.9.0 models/dspark (vanilla Markov head).

Axis letters: R requests, K drafted positions, E rank, V vocabulary of the target, V' of the draft.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.launch_config import MIN_DOT, fitting_stages, num_multiprocessors
from dflash_kernels.logits.candidates import score_keys
from dflash_kernels.logits.logit_tiles import without_nans

LEAST = -(2**63)
_TL_LEAST = constexpr(LEAST)


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """Tiling of one position: requests and tokens of a tile, programs per multiprocessor, and launch options."""

    rows: int
    tokens: int
    together: int
    num_stages: int
    num_warps: int


MARKOV_SHAPES = ((16, MarkovShape(16, 64, 2, 3, 4)), (64, MarkovShape(32, 64, 2, 3, 4)))
"""Most requests, and the tiling. The last one also serves more requests."""


def markov_shape(num_requests: int) -> MarkovShape:
    return next((shape for most, shape in MARKOV_SHAPES if num_requests <= most), MARKOV_SHAPES[-1][1])


def markov_walk_ref(
    logits: Tensor,
    before: Tensor,
    after: Tensor,
    anchors: Tensor,
    scale: float = 1.0,
    target_ids: Tensor | None = None,
) -> Tensor:
    """Choose the token with the highest biased logit at each position.

    logits      [R, K, V']
    before      [V, E]      row of the token before
    after       [V', E]     row of a token
    anchors     [R] int64   target ids of the tokens before the first position
    target_ids  [V'] int64  target id of each of the draft's tokens, or None if the ids are equal
    biased logit = logit + scale * sum over E of before[token before] * after[token], rounded to the logits' dtype once.
    Among equal ones the lowest id is chosen. Returns ids of the draft, [R, K] int64.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows, tokens, chosen = after.to(wide), anchors, []
    for position in range(logits.shape[1]):
        bias = before[tokens].to(wide) @ rows.t()
        biased = logits[:, position].to(wide) + (bias if scale == 1 else bias * scale)
        tokens = biased.to(logits.dtype).argmax(-1)
        chosen.append(tokens)
        if target_ids is not None:
            tokens = target_ids[tokens]
    return torch.stack(chosen, 1) if chosen else logits.new_empty((len(logits), 0), dtype=torch.int64)


@jit(do_not_specialize=["num_rows", "num_positions", "position", "num_programs"])
def _markov_walk_kernel(
    logits, before, after, anchors, target_ids, best, scale, num_rows, num_positions, position, num_programs,
    request_stride, position_stride,
    VOCAB: tl.constexpr, RANK: tl.constexpr, HAS_IDS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_V: tl.constexpr, TILE_E: tl.constexpr, STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    row = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    is_row = row < num_rows
    rank = tl.arange(0, TILE_E)
    is_rank = rank < RANK
    row_best = best + row.to(tl.int64) * num_positions + position
    if position == 0:
        token = tl.load(anchors + row, mask=is_row, other=0).to(tl.int64)
    else:
        token = (~tl.load(row_best - 1, mask=is_row, other=-1)) & 0xFFFFFFFF
        if HAS_IDS:
            token = tl.load(target_ids + token, mask=is_row, other=0)
    places = token[:, None] * RANK + rank[None, :]
    left = tl.load(before + places, mask=is_row[:, None] & is_rank[None, :], other=0.0)
    row_logits = logits + row.to(tl.int64) * request_stride + position.to(tl.int64) * position_stride
    NUM_TILES: tl.constexpr = (VOCAB + TILE_V - 1) // TILE_V
    is_backward = position % 2 == 1
    highest = tl.full((TILE_V, TILE_R), _TL_LEAST, tl.int64)
    for index in tl.range(tl.program_id(0), NUM_TILES, num_programs, num_stages=STAGES):
        tile = tl.where(is_backward, NUM_TILES - 1 - index, index)
        column = tile * TILE_V + tl.arange(0, TILE_V)
        is_column = column < VOCAB
        is_weight = is_column[:, None] & is_rank[None, :]
        right = tl.load(after + column[:, None].to(tl.int64) * RANK + rank[None, :], mask=is_weight, other=0.0)
        is_logit = is_column[:, None] & is_row[None, :]
        logit = tl.load(row_logits[None, :] + column[:, None], mask=is_logit, other=0.0)
        bias = tl.dot(right, tl.trans(left), input_precision="ieee")
        biased = (logit.to(tl.float32) + bias * scale).to(logits.dtype.element_ty).to(tl.float32)
        keys = score_keys(without_nans(biased), 32).to(tl.int64)
        both = (keys << 32) | (~column[:, None].to(tl.int64) & 0xFFFFFFFF)
        highest = tl.maximum(highest, tl.where(is_logit, both, _TL_LEAST))
    let_next_launch_begin(IS_EARLY)
    tl.atomic_max(row_best, tl.max(highest, 0), mask=is_row)


def markov_walk(
    logits: Tensor,
    before: Tensor,
    after: Tensor,
    anchors: Tensor,
    scale: float = 1.0,
    target_ids: Tensor | None = None,
) -> Tensor:
    """Compute `markov_walk_ref` in one launch per position."""
    check_tensors(logits, before, after, anchors, *(() if target_ids is None else (target_ids,)))
    check_dtypes(logits, before, after)
    (num_requests, num_positions, vocab_size), rank = logits.shape, before.shape[1]
    require(after.shape == (vocab_size, rank), "after", "one row per logit, as wide as `before`")
    require(logits.stride(2) == 1, "logits", "contiguous rows")
    tensors = (before, after, anchors, *(() if target_ids is None else (target_ids,)))
    require(all(item.is_contiguous() for item in tensors), "before, after, anchors, target_ids", "contiguous")
    require(anchors.shape == (num_requests,), "anchors", "one per request")
    best = torch.full((num_requests, num_positions), LEAST, dtype=torch.int64, device=logits.device)
    if best.numel():
        shape, tile_e = markov_shape(num_requests), max(power_of_2(rank), MIN_DOT)
        row_bytes = shape.together * tile_e * logits.element_size()
        num_stages = fitting_stages(
            shape.num_stages, shape.tokens * row_bytes, 2 * shape.rows * row_bytes, logits.device
        )
        num_tiles = ceil_div(vocab_size, shape.tokens)
        num_programs = min(shape.together * num_multiprocessors(logits.device), num_tiles)
        for position in range(num_positions):
            _markov_walk_kernel[(num_programs, ceil_div(num_requests, shape.rows))](
                logits, before, after, anchors, anchors if target_ids is None else target_ids, best, float(scale),
                num_requests, num_positions, position, num_programs, logits.stride(0), logits.stride(1),
                VOCAB=vocab_size, RANK=rank, HAS_IDS=target_ids is not None,
                TILE_R=shape.rows, TILE_V=shape.tokens, TILE_E=tile_e, STAGES=num_stages,
                num_warps=shape.num_warps, **early(logits.device),
            )  # fmt: skip
    return ~best & 0xFFFFFFFF
