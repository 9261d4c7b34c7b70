"""Choose one of a few candidates at each drafted position, from left to right, by pairs of neighbours (DFlash 2).

The score of a candidate is its logit plus a score of the pair of the token before it and the candidate. So a later
choice depends on earlier ones, and only this short walk is sequential: one program walks all positions of a request.
Source: z-lab/dflash 0.1.0 model.py, CandidateSelector.

Axis letters: R requests, K drafted positions, C candidates, E rank of the codebooks, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.categorical import categorical_ref, first_above
from dflash_kernels.launch_config import check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.temperature import MIN_TEMPERATURE
from dflash_kernels.uniform import DRAFT, stream, uniform_ref, uniform_tile

_TL_MIN_TEMPERATURE = constexpr(MIN_TEMPERATURE)


class Walk(NamedTuple):
    """The chosen tokens, and the scores that each choice was made from."""

    token_ids: Tensor
    """[R, K] int64"""
    scores: Tensor
    """[R, K, C] float32, or float64 for float64 logits"""


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
    hidden: Tensor,
    predecessors: Tensor,
    successors: Tensor,
    anchors: Tensor,
    draws: WalkDraws | None = None,
) -> Walk:
    """Choose a candidate at each position: the one with the highest score, or a sample at the request's temperature.

    logits        [R, K, C]
    candidates    [R, K, C] int64, token ids in ascending order
    hidden        [R, K, E]   the position's projected hidden state
    predecessors  [V, E]      row of the token before
    successors    [V, E]      row of a candidate
    anchors       [R] int64   the token before the first position
    draws         None chooses the highest score everywhere, as a temperature below MIN_TEMPERATURE does
    score = logit + sum over E of predecessors[token before] * hidden * successors[candidate].
    Among equal scores the lowest id is chosen.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    before, tokens, all_scores = anchors, [], []
    for position in range(logits.shape[1]):
        ids = candidates[:, position]
        left = predecessors[before].to(wide) * hidden[:, position].to(wide)
        scores = logits[:, position].to(wide) + (left[:, None] * successors[ids].to(wide)).sum(-1)
        before = ids.gather(1, _choose_ref(scores, position, draws)[:, None])[:, 0]
        tokens.append(before)
        all_scores.append(scores)
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
def _candidate_walk_kernel(
    logits, candidates, hidden, predecessors, successors, anchors, temperatures, seeds, positions, salt,
    token_ids, scores, num_positions, hidden_row,
    NUM: tl.constexpr, RANK: tl.constexpr, IS_SAMPLED: tl.constexpr, TILE_C: tl.constexpr, TILE_E: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    candidate, rank = tl.arange(0, TILE_C), tl.arange(0, TILE_E)
    is_candidate, is_rank = candidate < NUM, rank < RANK
    temperature = 0.0
    if IS_SAMPLED:
        temperature = tl.load(temperatures + request)
    before = tl.load(anchors + request).to(tl.int64)
    for position in range(num_positions):
        row = request * num_positions + position
        ids = tl.load(candidates + row * NUM + candidate, mask=is_candidate, other=0)
        left = tl.load(predecessors + before * RANK + rank, mask=is_rank, other=0.0).to(tl.float32)
        left *= tl.load(hidden + row * hidden_row + rank, mask=is_rank, other=0.0).to(tl.float32)
        pairs = is_candidate[:, None] & is_rank[None, :]
        right = tl.load(successors + ids[:, None] * RANK + rank[None, :], mask=pairs, other=0.0).to(tl.float32)
        logit = tl.load(logits + row * NUM + candidate, mask=is_candidate, other=float("-inf")).to(tl.float32)
        score = logit + tl.sum(left[None, :] * right, 1)
        tl.store(scores + row * NUM + candidate, score, mask=is_candidate)
        best = tl.max(score, 0)
        chosen = tl.min(tl.where(score == best, candidate, NUM - 1), 0)
        if IS_SAMPLED:  # noqa: SIM102  without temperatures the inner block is not compiled
            if temperature >= _TL_MIN_TEMPERATURE:
                weights = tl.where(is_candidate, tl.exp((score - best).to(tl.float64) / temperature), 0.0)
                number = uniform_tile(tl.load(seeds + request), tl.load(positions + row), salt)
                chosen = first_above(weights, 0.0, number * tl.sum(weights, 0), TILE_C)
        before = tl.sum(tl.where(candidate == chosen, ids, 0), 0)
        tl.store(token_ids + row, before)


def candidate_walk(
    logits: Tensor,
    candidates: Tensor,
    hidden: Tensor,
    predecessors: Tensor,
    successors: Tensor,
    anchors: Tensor,
    draws: WalkDraws | None = None,
) -> Walk:
    """Compute `candidate_walk_ref` in one launch."""
    check_tensors(logits, candidates, hidden, predecessors, successors, anchors)
    num_requests, num_positions, num = logits.shape
    rank = predecessors.shape[1]
    require(candidates.shape == logits.shape, "candidates", "the shape of the logits")
    require(hidden.shape == (num_requests, num_positions, rank), "hidden", "[requests, positions, rank]")
    require(predecessors.shape == successors.shape, "predecessors, successors", "equal shapes")
    tensors = (logits, candidates, predecessors, successors, anchors)
    require(all(item.is_contiguous() for item in tensors), "logits, candidates, codebooks, anchors", "contiguous")
    are_rows = hidden.stride(2) == 1 and hidden.stride(0) == num_positions * hidden.stride(1)
    require(are_rows, "hidden", "rows of equal distance")
    token_ids = torch.empty((num_requests, num_positions), dtype=torch.int64, device=logits.device)
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if token_ids.numel():
        temperatures, seeds, positions = (anchors, anchors, anchors) if draws is None else draws
        _candidate_walk_kernel[(num_requests,)](
            logits, candidates, hidden, predecessors, successors, anchors, temperatures, seeds,
            positions.contiguous(), stream(DRAFT), token_ids, scores, num_positions, hidden.stride(1),
            NUM=num, RANK=rank, IS_SAMPLED=draws is not None, TILE_C=power_of_2(num), TILE_E=power_of_2(rank),
        )  # fmt: skip
    return Walk(token_ids, scores)
