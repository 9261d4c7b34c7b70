"""How likely the target accepts a draft token after all tokens before it: a logistic regression, refitted online.

The feature is the logit of the draft's confidence in a position: its largest probability there, or the prediction of a
confidence head. It belongs to the position's distribution and not to the drawn token, so rows may be given by it
without changing sampled text. All positions share one weight, and each position has a bias:

    p = sigmoid(weight * feature + bias of the position)

Labels: an accepted token is 1, the first rejected token of a step is 0, and later tokens are not judged. A refit is one
Newton step from the sums since the last refit (`odds_refit.py`), by a bound of the likelihood's curvature
(`draft_odds.py`), so it never overshoots. The ridge holds it near the last fit. The step is damped, so that a few
tokens change little: one rejection of a very likely token has a large gradient and little curvature. A position that
was judged rarely or long ago takes the bias of the position before it. A budget that verifies few rows would otherwise
never learn that deeper rows are worth their time. Everything runs on the device, and nothing waits for it.

Axis letters: R requests, K draft tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.steps.draft_odds import NUM_SUMS, DraftOdds, add_outcomes_ref
from dflash_kernels.steps.odds_refit import newton_step
from dflash_kernels.suite import Kernels
from dflash_runtime.models.placement import as_current

FIRST_WEIGHT, FIRST_BIAS = 1.0, 0.0
"""The model before any observation: the draft's confidence as it is."""

REFIT_STEPS = 8
"""Steps from one refit to the next, after the first ones. Each refit is one launch."""


def is_refit_due(num_steps: int) -> bool:
    """Whether a refit follows the n-th step: steps 1, 2, 4, ... for a fast start, then every REFIT_STEPS steps."""
    return num_steps % REFIT_STEPS == 0 or (num_steps < REFIT_STEPS and num_steps.bit_count() == 1)


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
        """The sums of a Newton step over R steps, each of one request: see `add_outcomes_ref`, [NUM_SUMS, K]."""
        sums = torch.zeros(NUM_SUMS, len(self.biases), dtype=torch.float64, device=features.device)
        add_outcomes_ref(sums, *self, features, num_accepted, num_verified)
        return sums

    def stepped(self, sums: Tensor) -> "AcceptanceModel":
        """The model after one damped Newton step."""
        return AcceptanceModel(*newton_step(sums, *self))


class OnlineAcceptance:
    """The model of an engine: it predicts in every step, and is refitted when `is_refit_due`."""

    def __init__(self, num_draft_tokens: int, device: torch.device, kernels: Kernels) -> None:
        self.model = AcceptanceModel.first(num_draft_tokens, device)
        self._kernels = kernels
        self._sums = torch.zeros(NUM_SUMS, num_draft_tokens, dtype=torch.float64, device=device)
        self._num_judged = torch.zeros(num_draft_tokens, dtype=torch.float64, device=device)
        self._num_steps = 0
        with as_current(device):  # compiles the kernel, which no captured step launches
            self._refit(AcceptanceModel.first(num_draft_tokens, device), torch.zeros_like(self._num_judged))

    def predict(self, confidences: Tensor, max_accepted: Tensor) -> DraftOdds:
        """Predict the acceptance of draft tokens with confidences [R, K]; see `draft_odds_ref`."""
        return self._kernels.draft_odds(confidences, *self.model, max_accepted)

    def observe(self, features: Tensor, num_accepted: Tensor, num_verified: Tensor) -> None:
        """Add the results of a step; see `add_outcomes_ref`. A captured step may call it."""
        self._kernels.add_outcomes(self._sums, *self.model, features, num_accepted, num_verified)

    def count_step(self) -> None:
        """Queue a refit if it is due. Its tensors keep their addresses, because captured steps read them."""
        self._num_steps += 1
        if is_refit_due(self._num_steps):
            self._refit(self.model, self._num_judged)

    def _refit(self, model: AcceptanceModel, num_judged: Tensor) -> None:
        """Refit a model in place by the sums, and empty them; see `refit_odds_ref`."""
        self._kernels.refit_odds(self._sums, *model, num_judged)
