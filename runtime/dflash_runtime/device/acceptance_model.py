"""How likely the target accepts a draft token after all tokens before it: a logistic regression, refitted online.

The feature is the logit of the draft's confidence in a position: its largest probability there, or the prediction of a
confidence head. It belongs to the position's distribution and not to the drawn token, so rows may be given by it
without changing sampled text. All positions share one weight, and each position has a bias:

    p = sigmoid(weight * feature + bias of the position)

Labels: an accepted token is 1, the first rejected token of a step is 0, and later tokens are not judged. A refit is one
Newton step from the sums since the last refit. The ridge holds it near the last fit, so a position that is no longer
judged keeps its bias. The step is damped, so that a few tokens change little: one rejection of a very likely token has
a large gradient and almost no curvature. Everything runs on the device, and nothing waits for it.

Axis letters: R requests, K draft tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIRST_WEIGHT, FIRST_BIAS = 1.0, 0.0
"""The model before any observation: the draft's confidence as it is."""

RIDGE = 1.0
"""The curvature that holds a refit near the last fit, as about four tokens with even odds do."""

DAMPING = 50.0
"""A step from as many tokens is halved: n tokens take n / (n + DAMPING) of it."""

REFIT_STEPS = 32
"""Steps from one refit to the next. Each refit is some thirty small launches."""

LARGEST_FEATURE = 12.0
"""Features are limited to this size. It is close to the largest logit of a float32 probability below 1."""

NUM_SUMS = 6
"""Rows of `sums_of`."""


class AcceptanceModel(NamedTuple):
    """A weight [] and biases [K], float64."""

    weight: Tensor
    biases: Tensor

    @classmethod
    def first(cls, num_draft_tokens: int, device: torch.device | None = None) -> "AcceptanceModel":
        """The model before any observation."""
        biases = torch.full((num_draft_tokens,), FIRST_BIAS, dtype=torch.float64, device=device)
        return cls(torch.tensor(FIRST_WEIGHT, dtype=torch.float64, device=device), biases)

    def probabilities(self, features: Tensor) -> Tensor:
        """Features [R, K] -> conditional probabilities [R, K]. Fewer positions than biases are the first ones."""
        return torch.sigmoid(self.weight * features + self.biases[: features.shape[1]])

    def sums_of(self, features: Tensor, num_accepted: Tensor, num_verified: Tensor) -> Tensor:
        """The sums of a Newton step over R steps, each of one request: [NUM_SUMS, K].

        features      [R, K]
        num_accepted  [R] int64
        num_verified  [R] int64   drafts that were verified, 0 for a step that does not count
        Rows: tokens, residuals, residuals times feature, curvatures, curvatures times feature and times its square.
        """
        place = torch.arange(features.shape[1], device=features.device)
        is_accepted = place < num_accepted[:, None]
        is_judged = (place <= num_accepted[:, None]) & (place < num_verified[:, None])
        likely = self.probabilities(features)
        residuals = torch.where(is_judged, is_accepted.to(likely.dtype) - likely, 0)
        curvatures = torch.where(is_judged, likely * (1 - likely), 0)
        tokens = is_judged.to(likely.dtype)
        parts = (tokens, residuals, residuals * features, curvatures, curvatures * features, curvatures * features**2)
        return torch.stack([part.sum(0) for part in parts])

    def stepped(self, sums: Tensor) -> "AcceptanceModel":
        """The model after one damped Newton step. The Hessian is an arrow, so a step is a few sums over positions."""
        tokens, gradients, weighted, curvatures, mixed, squared = sums
        own = curvatures + RIDGE
        stiffness = squared.sum() + RIDGE - (mixed**2 / own).sum()
        weight_step = (weighted.sum() - (mixed * gradients / own).sum()) / stiffness
        bias_steps = (gradients - mixed * weight_step) / own
        total = tokens.sum()
        weight = self.weight + weight_step * total / (total + DAMPING)
        return AcceptanceModel(weight, self.biases + bias_steps * tokens / (tokens + DAMPING))


class OnlineAcceptance:
    """The model of an engine: it predicts in every step, and is refitted after REFIT_STEPS steps."""

    def __init__(self, num_draft_tokens: int, device: torch.device) -> None:
        self.model = AcceptanceModel.first(num_draft_tokens, device)
        self._sums = torch.zeros(NUM_SUMS, num_draft_tokens, dtype=torch.float64, device=device)
        self._num_steps = 0

    def likely(self, features: Tensor) -> Tensor:
        """See `AcceptanceModel.probabilities`."""
        return self.model.probabilities(features)

    def observe(self, features: Tensor, num_accepted: Tensor, num_verified: Tensor) -> None:
        """Add the results of a step; see `AcceptanceModel.sums_of`. A captured step may call it."""
        self._sums[:, : features.shape[1]] += self.model.sums_of(features, num_accepted, num_verified)

    def count_step(self) -> None:
        """Queue a refit if it is due. Its tensors keep their addresses, because captured steps read them."""
        self._num_steps += 1
        if self._num_steps % REFIT_STEPS == 0:
            for own, fitted in zip(self.model, self.model.stepped(self._sums), strict=True):
                own.copy_(fitted)
            self._sums.zero_()


def features_of(confidences: Tensor) -> Tensor:
    """The logits of confidences [R, K], limited to LARGEST_FEATURE, float64. NaN becomes 0."""
    logits = torch.logit(confidences.double().nan_to_num(0.5))
    return logits.clamp(-LARGEST_FEATURE, LARGEST_FEATURE)
