"""The interface of a draft, as the runner calls it, and the registry of draft families.

A family is one file in this package. The file registers a class with `@DRAFTS.register(name)` and a function that lists
the draft's tensors with `@LAYOUTS.register(name)`, where `name` is the `family` of `DraftConfig`. A draft reads context
features (the target's hidden states), keeps K and V made from them, and proposes a whole block from an anchor.

Axis letters: R requests, N block rows, K draft tokens, T flat rows, F features, V' output vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dflash_kernels.logits.sampling import Distribution
from dflash_runtime.checkpoint.draft_tensors import owned_tensors
from dflash_runtime.checkpoint.layout import CONFIDENCE
from dflash_runtime.checkpoint.pair import DraftLike
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.token_masks import TokenMasks
from dflash_runtime.models.layers import Attend, PagedKV
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import TargetEnds
from dflash_runtime.models.weights import Weights, load_weights
from dflash_runtime.registry import Registry


class Draft(Protocol):
    """A block-diffusion draft bound to its target's embedding and head.

    target_ids            the target id of each draft output id, [V'] int64, or None if the ids are equal
    follows_from_shapes   see `models.target.Target`
    """

    config: DraftConfig
    target_ids: Tensor | None

    def write_context(self, features: Tensor, positions: Tensor, cache: PagedKV, slots: Tensor) -> None:
        """Make the context KV of features [T, F] at positions [T], and store it in slots [T] of every layer."""
        ...

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        """Return logits [R, K, V'] of blocks [R, N] (the anchor, then masks) at positions [R, N].

        K is `num_drafts`, by default N - 1. Every row of a block goes through the layers whatever K is: without
        causality the first rows depend on the last. Only the first K masks need logits and the whole last layer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Draws:
    """How R requests sample K drafted tokens each. The top-k and top-p of a request apply to the target only.

    temperatures [R] float64, seeds [R] int64   of the requests
    positions [R, K] int64                      positions of the drafted tokens
    """

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor


class Drawn(NamedTuple):
    """Drafted tokens, [R, K] int64 ids of the draft, and the R * K distributions they were drawn from, if any were.

    `confidences` [R, K] are the draft's predictions that the target accepts a token, if the draft makes them. `logits`
    [R, K, V'] belong to the positions, before or after the walk.
    """

    token_ids: Tensor
    distribution: Distribution | Tensor | None = None
    confidences: Tensor | None = None
    logits: Tensor | None = None


@runtime_checkable
class WalkingDraft(Draft, Protocol):
    """A draft that chooses its tokens itself, because later tokens of a block depend on earlier ones."""

    def propose(
        self,
        block_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        num_drafts: int,
        draws: Draws | None,
        masks: TokenMasks | None = None,
    ) -> Drawn:
        """Choose the first `num_drafts` tokens of blocks [R, N]: the best ones, or with `draws` at temperatures.

        With `masks` each choice is among the tokens that they allow, and `masks.take` receives it.
        """
        ...

    def logits_along(self, block_ids: Tensor, positions: Tensor, attend: Attend, text: Tensor) -> Tensor:
        """Return the logits [R, K, V'] by which `propose` would choose each token after the tokens of a text [R, K].

        As long as the text has the best tokens, these are the logits of a greedy block. A token that the draft cannot
        choose has minus infinity.
        """
        ...


@runtime_checkable
class SelectingDraft(WalkingDraft, Protocol):
    """A walking draft that chooses among few candidates of each position, by the token before alone."""

    def candidate_scores(
        self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int
    ) -> tuple[Tensor, Tensor]:
        """Return the C candidates of the first K = `num_drafts` masks of blocks [R, N], and scores of each pair.

        Candidates are [R, K, C] ids of the draft. Scores are [R, K, C, C], by the candidate of the position before and
        by candidate. The first position follows the anchor, so all its rows are equal.
        """
        ...


DraftFamily = Callable[[DraftConfig, Weights, TargetEnds, Placement], Draft]
"""Builds a draft of one family, usually its class."""

DRAFTS: Registry[DraftFamily] = Registry("draft family")


@cache
def draft_families() -> Registry[DraftFamily]:
    """Return the registry after importing every family of this package."""
    DRAFTS.discover("dflash_runtime.drafts")
    return DRAFTS


def load_draft(source: DraftLike, target: TargetEnds, placement: Placement) -> Draft:
    """Load the tensors that a draft owns and build it. Raises the errors of `owned_tensors`."""
    return build_draft(source.config, load_draft_weights(source, placement), target, placement)


def load_draft_weights(source: DraftLike, placement: Placement) -> Weights:
    """Load the tensors that a draft owns onto a device. Raises the errors of `owned_tensors`.

    A confidence head keeps its dtype, because engines compute it in float32 beside a bfloat16 draft.
    """
    return load_weights(source.checkpoint, owned_tensors(source), placement, as_stored=CONFIDENCE)


def to_target(draft: Draft, draft_ids: Tensor) -> Tensor:
    """Return the target's ids of the draft's token ids, of any shape."""
    return draft_ids if draft.target_ids is None else draft.target_ids[draft_ids]


def draft_places(draft: Draft, vocab_size: int) -> Tensor | None:
    """Return the draft's id of every target id [V], or -1 without one. None if both models have the same ids."""
    if draft.target_ids is None:
        return None
    places = draft.target_ids.new_full((vocab_size,), -1)
    places[draft.target_ids] = torch.arange(len(draft.target_ids), device=places.device)
    return places


def build_draft(config: DraftConfig, weights: Weights, target: TargetEnds, placement: Placement) -> Draft:
    """Build a draft of the config's family from weights on the device. Several drafts may share the weights."""
    return draft_families()[config.family](config, weights, target, placement)
