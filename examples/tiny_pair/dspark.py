"""A DSpark draft for training: DFlash with a bias of the logits by the token before, and a confidence per draft token.

The layout is anchor-first: every row of a block predicts the token after it, so that a block of N rows drafts N tokens.
Parameters have the names of the checkpoint. `runtime/dflash_runtime/drafts/dspark.py` runs the result.

Axis letters: B sequences, A anchors, N rows of a block, K draft tokens (K = N), H hidden width, V vocabulary, E rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .draft import Draft, weighted_mean
from .settings import DraftRecipe, Settings


class MarkovHead(nn.Module):
    """A bias of all logits by the token before, of low rank. It begins at zero."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: Tensor) -> Tensor:
        """Tokens before [...] -> bias [..., V]."""
        bias: Tensor = self.markov_w2(self.markov_w1(before))
        return bias


class ConfidenceHead(nn.Module):
    """The logit of the chance that the target accepts a draft token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)

    def forward(self, features: Tensor) -> Tensor:
        """[..., H + E] -> [...]."""
        logit: Tensor = self.proj(features)[..., 0]
        return logit


class DSparkDraft(Draft):
    """A DFlash draft in the anchor-first layout, with a vanilla Markov head and a confidence head."""

    kind = "dspark"
    samples_from_anchor = True

    def __init__(self, settings: Settings, recipe: DraftRecipe, mask_token_id: int) -> None:
        super().__init__(settings, recipe, mask_token_id)
        rank = recipe.markov.rank
        self.markov_rank = rank
        self.markov_head = MarkovHead(settings.vocab_size, rank)
        self.confidence_head = ConfidenceHead(settings.shape.hidden_size + rank)

    def loss(
        self, hidden: Tensor, head: Tensor, before: Tensor, labels: Tensor, targets: Tensor | None, decay: float
    ) -> tuple[Tensor, Tensor]:
        """See `Draft.loss`. Confidence learns how much the draft's and the target's distributions have in common."""
        logits = (F.linear(hidden, head) + self.markov_head(before)).float()
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
        if targets is not None:
            with torch.no_grad():
                common = torch.minimum(logits.softmax(-1), targets.float().softmax(-1)).sum(-1).clamp(0, 1)
            # Confidence reads the draft without changing it.
            features = torch.cat((hidden, self.markov_head.markov_w1(before)), -1).detach()
            guess = self.confidence_head(features).float()
            losses = losses + F.binary_cross_entropy_with_logits(guess, common, reduction="none")
        right = logits.argmax(-1) == labels
        return weighted_mean(losses, decay), right.int().cumprod(-1).sum(-1)

    def choose(self, hidden: Tensor, head: Tensor, anchor_ids: Tensor) -> Tensor:
        """See `Draft.choose`."""
        logits = F.linear(hidden, head)
        before, chosen = anchor_ids, []
        for position in range(hidden.shape[2]):
            before = (logits[:, :, position] + self.markov_head(before)).argmax(-1)
            chosen.append(before)
        return torch.stack(chosen, -1)

    def extra_keys(self) -> dict[str, object]:
        """See `Draft.extra_keys`."""
        return {
            "confidence_head_with_markov": True,
            "dspark_bonus_anchor": False,
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": self.markov_rank,
            "sample_from_anchor": True,
        }
