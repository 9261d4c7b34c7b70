"""Choose one of a few candidates at each drafted position, from left to right, by pairs of neighbours (DFlash 2).

The score of a candidate is its logit plus a score of the pair of the token before it and the candidate. So a later
choice depends on earlier ones. The token before is itself one of a few candidates. So one launch scores all pairs and
chooses a candidate after each possible token before, and the second launch only follows these choices.
Source: z-lab/dflash 0.1.0 model.py, CandidateSelector.

Axis letters: P parts, R requests, K drafted positions, C candidates, E rank of the codebooks, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import check_dtypes, check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.logits.categorical import categorical_ref, first_above
from dflash_kernels.logits.temperature import MIN_TEMPERATURE
from dflash_kernels.logits.uniform import DRAFT, stream, uniform_ref, uniform_tile
from dflash_kernels.norms.rope_norm import check_parts, sum_parts, sum_parts_ref

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)


class Walk(NamedTuple):
    """The chosen tokens, and the scores that each choice was made from."""

    token_ids: Tensor
    """[R, K] int64"""
    scores: Tensor
    """[R, K, C] float32, or float64 for float64 logits"""


class Codebooks(NamedTuple):
    """The score of a pair: scale * sum over E of predecessors[token before] * hidden * successors[candidate]."""

    predecessors: Tensor
    """[V, E], rows of the token before"""
    successors: Tensor
    """[V', E], rows of a candidate"""
    scale: float = 1.0
    target_ids: Tensor | None = None
    """[V'] int64, the row in `predecessors` of each candidate, or None if it is the candidate's id"""


class WalkDraws(NamedTuple):
    """How the tokens of a walk are drawn."""

    temperatures: Tensor
    """[R] float64"""
    seeds: Tensor
    """[R] int64"""
    positions: Tensor
    """[R, K] int64, positions of the drawn tokens"""


def candidate_walk_ref(
    logits: Tensor,
    candidates: Tensor,
    hidden: Tensor | None,
    codebooks: Codebooks,
    anchors: Tensor,
    draws: WalkDraws | None = None,
) -> Walk:
    """Choose a candidate at each position: the one with the highest score, or a sample at the request's temperature.

    logits        [R, K, C]
    candidates    [R, K, C] int64, token ids in ascending order
    hidden        [P, R * K, E], the position's projected hidden state as parts of a product, or None for ones
    anchors       [R] int64, the rows in `predecessors` of the tokens before the first position
    draws         None chooses the highest score everywhere, as a temperature below MIN_TEMPERATURE does
    The score of a candidate is its logit plus the score of its pair. Among equal scores the lowest id is chosen.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = None
    if hidden is not None:
        rows = sum_parts_ref(hidden, logits.dtype).to(wide).unflatten(0, logits.shape[:2])
    before, tokens, all_scores = anchors, [], []
    for position in range(logits.shape[1]):
        ids = candidates[:, position]
        left = codebooks.predecessors[before].to(wide)
        if rows is not None:
            left = left * rows[:, position]
        pairs = (left[:, None] * codebooks.successors[ids].to(wide)).sum(-1)
        scores = logits[:, position].to(wide) + (pairs if codebooks.scale == 1 else pairs * codebooks.scale)
        before = ids.gather(1, _choose_ref(scores, position, draws)[:, None])[:, 0]
        tokens.append(before)
        all_scores.append(scores)
        if codebooks.target_ids is not None:
            before = codebooks.target_ids[before]
    if not tokens:
        return Walk(candidates.new_empty((len(logits), 0)), logits.to(wide))
    return Walk(torch.stack(tokens, 1), torch.stack(all_scores, 1))


def _choose_ref(scores: Tensor, position: int, draws: WalkDraws | None) -> Tensor:
    """Return the index of the chosen candidate of each request: [R, C] -> [R]."""
    best = scores.argmax(-1)
    if draws is None:
        return best
    is_sampled = draws.temperatures >= MIN_TEMPERATURE
    probs = (scores.double() / torch.where(is_sampled, draws.temperatures, 1.0)[:, None]).softmax(-1)
    drawn = categorical_ref(probs, uniform_ref(draws.seeds, draws.positions[:, position], DRAFT))
    return torch.where(is_sampled, drawn, best)


@jit(do_not_specialize=["num_positions"])
def _pair_scores_kernel(
    logits, candidates, hidden, predecessors, successors, target_ids, anchors, temperatures, seeds, positions, salt,
    choices, scores, num_positions, part_stride, hidden_row, scale,
    NUM: tl.constexpr, RANK: tl.constexpr, HAS_HIDDEN: tl.constexpr, NUM_PARTS: tl.constexpr, HAS_IDS: tl.constexpr,
    IS_SAMPLED: tl.constexpr, TILE_C: tl.constexpr, TILE_E: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Score all candidates of a position after one token before, and choose among them."""
    row, previous = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, position = tl.program_id(0) // num_positions, tl.program_id(0) % num_positions
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    if (position == 0) & (previous > 0):
        return  # only the anchor is before the first position
    candidate, rank = tl.arange(0, TILE_C), tl.arange(0, TILE_E)
    is_candidate, is_rank = candidate < NUM, rank < RANK
    before = tl.load(anchors + request).to(tl.int64)
    if position > 0:
        before = tl.load(candidates + (row - 1) * NUM + previous)
        if HAS_IDS:
            before = tl.load(target_ids + before)
    ids = tl.load(candidates + row * NUM + candidate, mask=is_candidate, other=0)
    left = tl.load(predecessors + before * RANK + rank, mask=is_rank, other=0.0).to(tl.float32)
    if HAS_HIDDEN:
        dtype: tl.constexpr = logits.dtype.element_ty
        places = row * hidden_row + rank
        left *= sum_parts(hidden, places, is_rank, part_stride, NUM_PARTS, dtype).to(tl.float32)
    pairs = is_candidate[:, None] & is_rank[None, :]
    right = tl.load(successors + ids[:, None] * RANK + rank[None, :], mask=pairs, other=0.0).to(tl.float32)
    logit = tl.load(logits + row * NUM + candidate, mask=is_candidate, other=float("-inf")).to(tl.float32)
    score = logit + tl.sum(left[None, :] * right, 1) * scale
    place = row * NUM + previous
    tl.store(scores + place * NUM + candidate, score, mask=is_candidate)
    best = tl.max(score, 0)
    chosen = tl.min(tl.where(score == best, candidate, NUM - 1), 0)
    if IS_SAMPLED:
        temperature = tl.load(temperatures + request)
        if temperature >= _TL_MIN_TEMPERATURE:
            weights = tl.where(is_candidate, tl.exp((score - best).to(tl.float64) / temperature), 0.0)
            number = uniform_tile(tl.load(seeds + request), tl.load(positions + row), salt)
            chosen = first_above(weights, 0.0, number * tl.sum(weights, 0), TILE_C)
    tl.store(choices + place, chosen)


@jit(do_not_specialize=["num_positions"])
def _candidate_walk_kernel(
    candidates, choices, all_scores, token_ids, scores, num_positions,
    NUM: tl.constexpr, TILE_K: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    position, candidate = tl.arange(0, TILE_K), tl.arange(0, TILE_C)
    row = request * num_positions + position
    is_row, is_candidate = position < num_positions, candidate < NUM
    # Entries of the first position after other tokens than the anchor are not written, and not used.
    is_pair = is_row[:, None] & is_candidate[None, :]
    table = tl.load(choices + row[:, None] * NUM + candidate[None, :], mask=is_pair, other=0)
    chosen = tl.zeros((), tl.int32)
    before, path = tl.zeros((TILE_K,), tl.int32), tl.zeros((TILE_K,), tl.int32)
    for place in range(num_positions):
        before = tl.where(position == place, chosen, before)
        is_next = (position == place)[:, None] & (candidate == chosen)[None, :]
        chosen = tl.sum(tl.sum(tl.where(is_next, table, 0), 1), 0)
        path = tl.where(position == place, chosen, path)
    tl.store(token_ids + row, tl.load(candidates + row * NUM + path, mask=is_row, other=0), mask=is_row)
    places = (row * NUM + before)[:, None] * NUM + candidate[None, :]
    found = tl.load(all_scores + places, mask=is_pair, other=0.0)
    tl.store(scores + row[:, None] * NUM + candidate[None, :], found, mask=is_pair)


def candidate_walk(
    logits: Tensor,
    candidates: Tensor,
    hidden: Tensor | None,
    codebooks: Codebooks,
    anchors: Tensor,
    draws: WalkDraws | None = None,
) -> Walk:
    """Compute `candidate_walk_ref` in two launches."""
    predecessors, successors, scale, target_ids = codebooks
    check_tensors(logits, candidates, predecessors, successors, anchors)
    check_dtypes(logits, predecessors, successors)
    num_requests, num_positions, num = logits.shape
    rank = predecessors.shape[1]
    require(candidates.shape == logits.shape, "candidates", "the shape of the logits")
    require(successors.shape[1] == rank, "predecessors, successors", "equal ranks")
    tensors = (logits, candidates, predecessors, successors, anchors)
    require(all(item.is_contiguous() for item in tensors), "logits, candidates, codebooks, anchors", "contiguous")
    read = logits.view(1, -1, num) if hidden is None else hidden
    if hidden is not None:
        check_tensors(logits, hidden)
        check_parts(hidden, logits.dtype)
        is_given = hidden.shape[1:] == (num_requests * num_positions, rank) and hidden.stride(2) == 1
        require(is_given, "hidden", "[parts, requests * positions, rank], contiguous rows")
    if target_ids is not None:
        check_tensors(logits, target_ids)
        require(target_ids.is_contiguous(), "target_ids", "contiguous")
    device, shape = logits.device, (num_requests, num_positions, num)
    token_ids = torch.empty(shape[:2], dtype=torch.int64, device=device)
    scores = torch.empty(shape, dtype=torch.float32, device=device)
    if token_ids.numel():
        choices = torch.empty((*shape, 1), dtype=torch.int32, device=device)
        all_scores = torch.empty((*shape, num), dtype=torch.float32, device=device)
        temperatures, seeds, positions = (anchors, anchors, anchors) if draws is None else draws
        tile_c = power_of_2(num)
        _pair_scores_kernel[(num_requests * num_positions, num)](
            logits, candidates, read, predecessors, successors, anchors if target_ids is None else target_ids, anchors,
            temperatures, seeds, positions.contiguous(), stream(DRAFT), choices, all_scores, num_positions,
            read.stride(0), read.stride(1), float(scale),
            NUM=num, RANK=rank, HAS_HIDDEN=hidden is not None, NUM_PARTS=len(read), HAS_IDS=target_ids is not None,
            IS_SAMPLED=draws is not None, TILE_C=tile_c, TILE_E=power_of_2(rank), **early(device),
        )  # fmt: skip
        _candidate_walk_kernel[(num_requests,)](
            candidates, choices, all_scores, token_ids, scores, num_positions,
            NUM=num, TILE_K=power_of_2(num_positions), TILE_C=tile_c, num_warps=1, **early(device),
        )  # fmt: skip
    return Walk(token_ids, scores)
