"""How likely draft tokens are accepted, by a logistic regression on confidences, and the sums that refit it.

Each function is a few numbers per draft token. Separate operations would take forty launches per step.

Axis letters: R requests, K draft tokens, B biases, at least K.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, wait_for_launches_before
from dflash_kernels.launch import check_tensors, constexpr, jit, power_of_2, require, tl

LARGEST_FEATURE = 12.0
"""Features are limited to this size. It is close to the largest logit of a float32 probability below 1."""

LEAST_SCORE = 1e-3
"""Smaller scores have the curvature of this score, which differs from 1/4 by 2e-8."""

NUM_SUMS = 6
"""Rows of the sums: tokens, residuals, residuals times feature, curvatures, curvatures times feature and times its
square."""

_TL_LARGEST, _TL_LEAST_SCORE = constexpr(LARGEST_FEATURE), constexpr(LEAST_SCORE)


class DraftOdds(NamedTuple):
    """Predictions for the draft tokens of a step, [R, K] float64 each."""

    features: Tensor
    """logits of the confidences"""
    likely: Tensor
    """probability that a token is accepted if all tokens before it are"""
    survivals: Tensor
    """probability that a token and all tokens before it are accepted; 0 for tokens that may not be accepted"""


def features_of(confidences: Tensor) -> Tensor:
    """Return the logits of confidences [R, K], limited to LARGEST_FEATURE, float64. NaN becomes 0."""
    return torch.logit(confidences.double().nan_to_num(0.5)).clamp(-LARGEST_FEATURE, LARGEST_FEATURE)


def draft_odds_ref(confidences: Tensor, weight: Tensor, biases: Tensor, max_accepted: Tensor) -> DraftOdds:
    """Predict the acceptance of draft tokens: sigmoid(weight * logit of the confidence + bias of the position).

    confidences   [R, K]          NaN counts as 0.5
    weight        [] float64
    biases        [B] float64
    max_accepted  [R] int64       most draft tokens that a request may accept
    """
    features = features_of(confidences)
    likely = torch.sigmoid(weight * features + biases[: features.shape[1]])
    place = torch.arange(features.shape[1], device=features.device)
    return DraftOdds(features, likely, torch.where(place < max_accepted[:, None], likely.cumprod(1), 0))


def add_outcomes_ref(
    sums: Tensor, weight: Tensor, biases: Tensor, features: Tensor, num_accepted: Tensor, num_verified: Tensor
) -> None:
    """Add the outcomes of a step to the sums of a refit of the regression.

    sums          [NUM_SUMS, B] float64
    features      [R, K] float64
    num_accepted  [R] int64     may have a stride
    num_verified  [R] int64     draft tokens that were verified, 0 for a request that does not count
    An accepted token has label 1 and the first rejected token label 0. Later tokens do not count. The curvature of a
    token with score s is tanh(s / 2) / 2 s, at least the likelihood's own. A step by it never overshoots. A step by the
    likelihood's own curvature does, if confidences near 0 or 1 are wrong.
    Source: Jaakkola and Jordan 2000, "Bayesian parameter estimation via variational methods".
    """
    num_drafts = features.shape[1]
    place = torch.arange(num_drafts, device=features.device)
    is_accepted = place < num_accepted[:, None]
    is_judged = (place <= num_accepted[:, None]) & (place < num_verified[:, None])
    scores = weight * features + biases[:num_drafts]
    residuals = torch.where(is_judged, is_accepted.to(scores.dtype) - torch.sigmoid(scores), 0)
    size = scores.abs().clamp(min=LEAST_SCORE)
    curvatures = torch.where(is_judged, torch.tanh(size / 2) / (2 * size), 0)
    tokens = is_judged.to(scores.dtype)
    parts = (tokens, residuals, residuals * features, curvatures, curvatures * features, curvatures * features**2)
    sums[:, :num_drafts] += torch.stack([part.sum(0) for part in parts])


@jit
def _sigmoid(value):
    return 1.0 / (1.0 + tl.exp(-value))


@jit
def _draft_odds_kernel(
    confidences, weight, biases, max_accepted, features, likely, survivals, num_drafts,
    TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE_K)
    is_draft = place < num_drafts
    at = request * num_drafts + place
    given = tl.load(confidences + at, mask=is_draft, other=0.5).to(tl.float64)
    sure = tl.minimum(tl.maximum(tl.where(given == given, given, 0.5), 1e-7), 1 - 1e-7)  # with finite logits
    feature = tl.minimum(tl.maximum(tl.log(sure / (1.0 - sure)), -_TL_LARGEST), _TL_LARGEST)
    own = _sigmoid(tl.load(weight) * feature + tl.load(biases + place, mask=is_draft, other=0.0))
    may_accept = place < tl.load(max_accepted + request)
    tl.store(features + at, feature, mask=is_draft)
    tl.store(likely + at, own, mask=is_draft)
    tl.store(survivals + at, tl.where(may_accept, tl.cumprod(own, 0), 0.0), mask=is_draft)


def draft_odds(confidences: Tensor, weight: Tensor, biases: Tensor, max_accepted: Tensor) -> DraftOdds:
    """Compute `draft_odds_ref` in one launch, one program per request."""
    check_tensors(confidences, weight, biases, max_accepted)
    num_requests, num_drafts = confidences.shape
    require(weight.dtype == biases.dtype == torch.float64, "weight, biases", "float64")
    require(num_drafts <= len(biases), "biases", "one per draft token")
    require(max_accepted.shape == (num_requests,) and max_accepted.is_contiguous(), "max_accepted", "one per request")
    found = torch.empty((3, num_requests, num_drafts), dtype=torch.float64, device=confidences.device)
    if found.numel():
        _draft_odds_kernel[(num_requests,)](
            confidences.contiguous(), weight, biases, max_accepted, *found, num_drafts,
            TILE_K=power_of_2(num_drafts), num_warps=1, **early(confidences.device),
        )  # fmt: skip
    return DraftOdds(*found)


@jit
def _add(sums, row: tl.constexpr, values, num_biases, place):
    at = sums + row * num_biases + place
    tl.store(at, tl.load(at) + tl.sum(values, 0))


@jit(do_not_specialize=["num_requests"])
def _add_outcomes_kernel(
    sums, weight, biases, features, num_accepted, num_verified, accepted_stride, num_requests, num_drafts, num_biases,
    TILE_R: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    place = tl.program_id(0)
    request = tl.arange(0, TILE_R).to(tl.int64)
    is_request = request < num_requests
    accepted = tl.load(num_accepted + request * accepted_stride, mask=is_request, other=0)
    verified = tl.load(num_verified + request, mask=is_request, other=0)
    is_judged = (place <= accepted) & (place < verified)
    feature = tl.load(features + request * num_drafts + place, mask=is_judged, other=0.0)
    score = tl.load(weight) * feature + tl.load(biases + place)
    tokens = is_judged.to(tl.float64)
    residual = tl.where(is_judged, (place < accepted).to(tl.float64) - _sigmoid(score), 0.0)
    size = tl.maximum(tl.abs(score), _TL_LEAST_SCORE)
    # tanh(s / 2) is 2 sigmoid(s) - 1.
    curvature = tl.where(is_judged, (_sigmoid(size) - 0.5) / size, 0.0)
    _add(sums, 0, tokens, num_biases, place)
    _add(sums, 1, residual, num_biases, place)
    _add(sums, 2, residual * feature, num_biases, place)
    _add(sums, 3, curvature, num_biases, place)
    _add(sums, 4, curvature * feature, num_biases, place)
    _add(sums, 5, curvature * feature * feature, num_biases, place)


def add_outcomes(
    sums: Tensor, weight: Tensor, biases: Tensor, features: Tensor, num_accepted: Tensor, num_verified: Tensor
) -> None:
    """Compute `add_outcomes_ref` in one launch, one program per position."""
    check_tensors(sums, weight, biases, features, num_accepted, num_verified)
    num_requests, num_drafts = features.shape
    numbers = (sums, weight, biases, features)
    require(all(item.dtype == torch.float64 and item.is_contiguous() for item in numbers), "numbers", "float64")
    require(sums.shape == (NUM_SUMS, len(biases)) and num_drafts <= len(biases), "sums, biases", "one per draft token")
    require(len(num_accepted) == len(num_verified) == num_requests, "num_accepted, num_verified", "one per request")
    require(num_verified.is_contiguous(), "num_verified", "contiguous")
    if features.numel():
        _add_outcomes_kernel[(num_drafts,)](
            sums, weight, biases, features, num_accepted, num_verified, num_accepted.stride(0), num_requests,
            num_drafts, len(biases), TILE_R=power_of_2(num_requests), num_warps=4, **early(features.device),
        )  # fmt: skip
