"""How the time of a drafting step divides: what it loses when the draft, or the target, answers at once with nothing.

A step is one graph, or launches that the host runs ahead of, so a clock inside it would time something else. Without
one of its models it is run as it always is, and is faster by what that model costs it.

Axis letters: R requests, K drafted tokens, T flat rows, F features, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.device.loading import LoadedPair


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Milliseconds of a drafting step: the draft with its context KV, the target with its head, and all else."""

    draft_ms: float
    verify_ms: float
    rest_ms: float

    @classmethod
    def of_steps(cls, whole: float, without_draft: float, without_target: float) -> "StepParts":
        """From milliseconds of steps with both models and without either. Where steps vary, a part may come out 0."""
        draft, verify = max(0.0, whole - without_draft), max(0.0, whole - without_target)
        return cls(draft_ms=draft, verify_ms=verify, rest_ms=max(0.0, whole - draft - verify))


def silence_draft(pair: LoadedPair) -> LoadedPair:
    """The pair with a draft that proposes the same token everywhere and keeps no context, at no cost."""
    return replace(pair, draft=_SilentDraft(pair))


def silence_target(pair: LoadedPair) -> LoadedPair:
    """The pair with a target that says the same token everywhere, at no cost; it gives wrong text."""
    target: Any = _SilentTarget(pair)
    return replace(pair, target=target)


class _SilentDraft:
    def __init__(self, pair: LoadedPair) -> None:
        assert pair.draft is not None
        self.config, self.target_ids = pair.draft.config, pair.draft.target_ids
        self.follows_from_shapes = getattr(pair.draft, "follows_from_shapes", False)
        self._dtype = pair.placement.dtype

    def write_context(self, features: Tensor, positions: Tensor, cache: object, slots: Tensor) -> None:
        pass

    def logits(self, block_ids: Tensor, positions: Tensor, attend: object, num_drafts: int | None = None) -> Tensor:
        """[R, K, V] zeros."""
        size = (len(block_ids), num_drafts or block_ids.shape[1] - 1, self.config.draft_vocab_size)
        return torch.zeros(size, dtype=self._dtype, device=block_ids.device)


class _SilentTarget:
    def __init__(self, pair: LoadedPair) -> None:
        self.config, self.embedding = pair.target.config, pair.target.embedding
        self.follows_from_shapes = getattr(pair.target, "follows_from_shapes", False)
        self.head = _SilentHead(pair.target.head.weight)
        self._dtype = pair.placement.dtype

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: object, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[T, hidden], or [S, hidden] of those wanted, and [T, F]: zeros."""
        size, rows = self.config.hidden_size, token_ids if wanted is None else wanted
        hidden = torch.zeros((len(rows), size), dtype=self._dtype, device=token_ids.device)
        return hidden, hidden.new_zeros((len(token_ids), len(taps) * size)) if taps else None


class _SilentHead:
    def __init__(self, weight: Tensor) -> None:
        self.weight, self.bias = weight, None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, V] zeros."""
        return hidden.new_zeros((len(hidden), len(self.weight)))
