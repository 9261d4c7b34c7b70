"""The refit of the regression behind `draft_odds`: a damped Newton step, then biases of neighbours for rare positions.

Separate operations would take forty launches.

Axis letters: B biases, one per draft token.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, wait_for_launches_before
from dflash_kernels.launch import check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.steps.draft_odds import NUM_SUMS

RIDGE = 1.0
"""The curvature that holds a refit near the last fit, as about four tokens with even odds do."""

DAMPING = 20.0
"""A step from as many tokens is halved: n tokens take n / (n + DAMPING) of it."""

NEIGHBOUR_TOKENS = 4.0
"""The number of judged tokens that weigh as much as the bias of the position before."""

HOPE = 0.5
"""The bias of a never judged position minus the bias of the position before it, so that the position is tried."""

REMEMBERED = 0.9
"""The share of earlier judged tokens that still counts after a refit."""

_TL_RIDGE, _TL_DAMPING, _TL_HOPE = constexpr(RIDGE), constexpr(DAMPING), constexpr(HOPE)
_TL_NEIGHBOUR_TOKENS, _TL_REMEMBERED = constexpr(NEIGHBOUR_TOKENS), constexpr(REMEMBERED)


def newton_step(sums: Tensor, weight: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [] and biases [B] after one damped Newton step from sums [NUM_SUMS, B]; see `add_outcomes_ref`.

    The Hessian is an arrow, so a step is a few sums over positions.
    """
    tokens, gradients, weighted, curvatures, mixed, squared = sums
    own = curvatures + RIDGE
    stiffness = squared.sum() + RIDGE - (mixed**2 / own).sum()
    weight_step = (weighted.sum() - (mixed * gradients / own).sum()) / stiffness
    bias_steps = (gradients - mixed * weight_step) / own
    total = tokens.sum()
    return weight + weight_step * total / (total + DAMPING), biases + bias_steps * tokens / (tokens + DAMPING)


def with_neighbours(biases: Tensor, num_judged: Tensor) -> Tensor:
    """Mix each bias [B] with the result of the position before, by its number of judged tokens [B].

    A position without judged tokens gets that result plus HOPE. Tokens take the hope away faster than the result.
    """
    own = num_judged / (num_judged + NEIGHBOUR_TOKENS)
    own[0] = 1
    place = torch.arange(len(own), device=own.device)
    shares = torch.where(place > place[:, None], 1 - own, 1).cumprod(1).triu()  # of position i in position k, [i, k]
    return (own * biases + HOPE * (1 - own) ** 2) @ shares


def refit_odds_ref(sums: Tensor, weight: Tensor, biases: Tensor, num_judged: Tensor) -> None:
    """Refit a weight and biases by the sums since the last refit, and empty the sums.

    sums        [NUM_SUMS, B] float64   see `add_outcomes_ref`
    weight      [] float64
    biases      [B] float64
    num_judged  [B] float64             judged tokens of each position; those before a refit count REMEMBERED
    """
    fitted_weight, fitted_biases = newton_step(sums, weight, biases)
    num_judged.mul_(REMEMBERED).add_(sums[0])
    weight.copy_(fitted_weight)
    biases.copy_(with_neighbours(fitted_biases, num_judged))
    sums.zero_()


@jit
def _then(share, value, next_share, next_value):
    """Return the composition of two functions x -> share * x + value."""
    return share * next_share, next_share * value + next_value


@jit
def _take(sums, row: tl.constexpr, num_biases, place):
    """Load a row of the sums, and set it to zero."""
    at, is_bias = sums + row * num_biases + place, place < num_biases
    values = tl.load(at, mask=is_bias, other=0.0)
    tl.store(at, tl.zeros_like(values), mask=is_bias)
    return values


@jit
def _refit_odds_kernel(sums, weight, biases, num_judged, num_biases, TILE_B: tl.constexpr, IS_EARLY: tl.constexpr):
    wait_for_launches_before(IS_EARLY)
    place = tl.arange(0, TILE_B)
    is_bias = place < num_biases
    tokens = _take(sums, 0, num_biases, place)
    gradients = _take(sums, 1, num_biases, place)
    weighted = _take(sums, 2, num_biases, place)
    own = _take(sums, 3, num_biases, place) + _TL_RIDGE
    mixed = _take(sums, 4, num_biases, place)
    stiffness = tl.sum(_take(sums, 5, num_biases, place) - mixed * mixed / own, 0) + _TL_RIDGE
    weight_step = tl.sum(weighted - mixed * gradients / own, 0) / stiffness
    total = tl.sum(tokens, 0)
    tl.store(weight, tl.load(weight) + weight_step * total / (total + _TL_DAMPING))
    bias_steps = (gradients - mixed * weight_step) / own
    before = tl.load(biases + place, mask=is_bias, other=0.0)
    fitted = before + bias_steps * tokens / (tokens + _TL_DAMPING)
    judged = tl.load(num_judged + place, mask=is_bias, other=0.0) * _TL_REMEMBERED + tokens
    tl.store(num_judged + place, judged, mask=is_bias)
    share = tl.where(place > 0, _TL_NEIGHBOUR_TOKENS / (judged + _TL_NEIGHBOUR_TOKENS), 0.0)
    _, joined = tl.associative_scan((share, (1.0 - share) * fitted + _TL_HOPE * share * share), 0, _then)
    tl.store(biases + place, joined, mask=is_bias)


def refit_odds(sums: Tensor, weight: Tensor, biases: Tensor, num_judged: Tensor) -> None:
    """Compute `refit_odds_ref` in one launch of one program."""
    check_tensors(sums, weight, biases, num_judged)
    numbers, shape = (sums, weight, biases, num_judged), biases.shape
    require(all(item.dtype == torch.float64 and item.is_contiguous() for item in numbers), "numbers", "float64")
    require(sums.shape == (NUM_SUMS, *shape) and num_judged.shape == shape, "sums, num_judged", "one per bias")
    if len(biases):
        _refit_odds_kernel[(1,)](
            sums, weight, biases, num_judged, len(biases), TILE_B=power_of_2(len(biases)), num_warps=1,
            **early(biases.device),
        )  # fmt: skip
