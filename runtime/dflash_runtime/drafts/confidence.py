"""The confidence head of a DSpark draft: for each drafted token, how likely the target accepts it.

The prediction assumes that all earlier tokens of the block are accepted. It reads the hidden state that the token
is chosen from and, by config, the embedding of the token before it. Training compares it with 1 minus the total
variation distance between the draft's and the target's distribution of the token.
Sources: speculators 0.9.0 models/dspark/core.py; vLLM 0.33.0 models/qwen3_dspark.py, which computes it in float32.

Axis letters: R requests, K draft tokens, H hidden width, E rank of the bias.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from dflash_runtime.checkpoint.layout import CONFIDENCE, MARKOV
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.models.weights import Weights


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """A linear layer with one output. `before` [V, E] embeds the token before; None if the head does not read it."""

    weight: Tensor  # [1, H + E] or [1, H], float32 or float64
    bias: Tensor  # [1]
    before: Tensor | None

    @classmethod
    def read(cls, weights: Weights, config: DraftConfig, dtype: torch.dtype) -> "ConfidenceHead | None":
        """Return the head of a draft that runs in `dtype`, or None for a draft without one."""
        if not config.has_confidence:
            return None
        wide = torch.promote_types(dtype, torch.float32)
        reads_token = config.markov is not None and config.confidence_reads_token
        before = weights[f"{MARKOV}.markov_w1.weight"] if reads_token else None
        return cls(weights[f"{CONFIDENCE}.weight"].to(wide), weights[f"{CONFIDENCE}.bias"].to(wide), before)

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Hidden states [R, K, H] and the target's ids of the tokens before [R, K] -> probabilities [R, K].

        They are float32, or float64 for float64 states.
        """
        rows = hidden if self.before is None else torch.cat((hidden, self.before[tokens]), -1)
        return torch.sigmoid(linear(rows.to(self.weight.dtype), self.weight, self.bias))[..., 0]
