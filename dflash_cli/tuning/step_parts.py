"""Split the time of a drafting step into draft, target and the rest, by timing steps without one of the models.

A step is one CUDA graph, or launches that the host queues ahead, so a clock inside the step would measure something
else. Here a stub that returns zeros at once replaces one model. The time of that model is the time the step saves.

Axis letters: R requests, K drafted tokens, T flat rows, F features, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any

import torch
from torch import Tensor

from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.tuning.round_intervals import mean_interval
from dflash_kernels.logits.uniform import DRAFT
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.documents import NOT_REQUIRED, computed_key
from dflash_runtime.drafts.draft import Drawn, Draws, WalkingDraft
from dflash_runtime.models.weights import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Milliseconds of a drafting step: the draft with its context KV, the target with its head, and the rest."""

    draft_ms: float
    verify_ms: float
    rest_ms: Annotated[float, "of the step, less draft and verify; below 0 if these exceed the step"]
    draft_ms_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds"] = None
    verify_ms_interval: Annotated[Interval | None, NOT_REQUIRED, "over rounds"] = None

    @classmethod
    def of_steps(
        cls, whole: Sequence[float], without_draft: Sequence[float], without_target: Sequence[float]
    ) -> "StepParts":
        """Return the parts, given milliseconds of steps with both models, without the draft and without the target.

        Each has one value per round. Noise can make a step without a model slower, so a part can be negative.
        """
        draft, verify = (
            [one - two for one, two in zip(whole, item, strict=True)] for item in (without_draft, without_target)
        )
        return cls(
            draft_ms=fmean(draft),
            verify_ms=fmean(verify),
            rest_ms=fmean(whole) - fmean(draft) - fmean(verify),
            draft_ms_interval=mean_interval(draft),
            verify_ms_interval=mean_interval(verify),
        )

    @property
    @computed_key
    def adds_up(self) -> bool:
        """Whether every part is 0 or more. Otherwise the rounds were disturbed, or the parts overlap in time."""
        return min(self.draft_ms, self.verify_ms, self.rest_ms) >= 0


def silence_draft(pair: LoadedPair) -> LoadedPair:
    """Return the pair with a stub draft, which proposes the same token everywhere and stores no context KV."""
    kind = _SilentWalk if isinstance(pair.draft, WalkingDraft) else _SilentDraft
    return replace(pair, draft=kind(pair))


def silence_target(pair: LoadedPair) -> LoadedPair:
    """Return the pair with a stub target, which chooses the same token everywhere. The text is wrong."""
    target: Any = _SilentTarget(pair)
    return replace(pair, target=target)


class _SilentDraft:
    def __init__(self, pair: LoadedPair) -> None:
        assert pair.draft is not None
        self.config, self.target_ids = pair.draft.config, pair.draft.target_ids
        self.follows_from_shapes = getattr(pair.draft, "follows_from_shapes", False)
        self._dtype, self._kernels = pair.placement.dtype, pair.placement.kernels

    def write_context(self, features: Tensor, positions: Tensor, cache: object, slots: Tensor) -> None:
        pass

    def logits(self, block_ids: Tensor, positions: Tensor, attend: object, num_drafts: int | None = None) -> Tensor:
        """Return zeros, [R, K, V]."""
        size = (len(block_ids), num_drafts or block_ids.shape[1] - 1, self.config.draft_vocab_size)
        return torch.zeros(size, dtype=self._dtype, device=block_ids.device)


class _SilentWalk(_SilentDraft):
    """Chooses its own tokens, as the replaced draft does, so that the step without the draft lacks a walk."""

    def propose(
        self,
        block_ids: Tensor,
        positions: Tensor,
        attend: object,
        num_drafts: int,
        draws: Draws | None,
        masks: object = None,
    ) -> Drawn:
        """Return tokens 0, [R, K], and if they are drawn, even distributions. Grammars are not timed: no masks."""
        token_ids = block_ids.new_zeros((len(block_ids), num_drafts))
        if draws is None:
            return Drawn(token_ids)
        logits = self.logits(block_ids, positions, attend, num_drafts).flatten(0, 1)
        whole, all_ids = torch.ones_like(draws.temperatures), torch.zeros_like(draws.seeds)
        drawn = self._kernels.sample(
            logits, draws.temperatures, all_ids, whole, draws.seeds, draws.positions.flatten(), has_filters=False,
            purpose=DRAFT,
        )  # fmt: skip
        return Drawn(drawn.token_ids.view_as(token_ids), drawn.distribution)

    def logits_along(self, block_ids: Tensor, positions: Tensor, attend: object, text: Tensor) -> Tensor:
        """See `drafts.draft.WalkingDraft`."""
        return self.logits(block_ids, positions, attend, text.shape[1])


class _SilentTarget:
    def __init__(self, pair: LoadedPair) -> None:
        self.config, self.embedding = pair.target.config, pair.target.embedding
        self.follows_from_shapes = getattr(pair.target, "follows_from_shapes", False)
        self.head = _SilentHead(pair.target.head.weight)
        self._dtype = pair.placement.dtype

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: object, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return zeros: hidden states [T, hidden], or [S, hidden] with `wanted` [S], and features [T, F]."""
        size, rows = self.config.hidden_size, token_ids if wanted is None else wanted
        hidden = torch.zeros((len(rows), size), dtype=self._dtype, device=token_ids.device)
        return hidden, hidden.new_zeros((len(token_ids), len(taps) * size)) if taps else None


class _SilentHead:
    def __init__(self, weight: Matrix) -> None:
        self.weight, self.bias = weight, None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return zeros, [T, V]."""
        return hidden.new_zeros((len(hidden), len(self.weight)))
