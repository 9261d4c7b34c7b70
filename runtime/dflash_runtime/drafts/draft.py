"""The interface of a draft, as the runner calls it, and the registry of draft families.

A family is one file in this package with a class decorated `@DRAFTS.register(name)`, where `name` is the `family` of
`DraftConfig`. A draft is fed context features (the target's hidden states), keeps K and V made from them, and proposes
a whole block from an anchor.

Axis letters: R requests, N block rows, T flat rows, F features, V' output vocabulary.
"""

from functools import cache
from typing import Protocol

from torch import Tensor

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.files import MASK_FILE
from dflash_runtime.checkpoint.layout import Shapes, select_tensors
from dflash_runtime.checkpoint.pair import DraftLike
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.layers import Attend, PagedKV
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import TargetEnds
from dflash_runtime.models.weights import Weights, load_weights
from dflash_runtime.registry import Registry

MASK_EMBEDDINGS = ("mask_embedding.pt", MASK_FILE)
"""A vector some drafts bring for the mask token instead of the target's embedding of it."""


class Draft(Protocol):
    """A block-diffusion draft bound to its target's embedding and head.

    `target_ids` maps the draft's output ids to the target's, [V'] int64, or is None where they are the same.
    `follows_from_shapes` is the same promise as a target's.
    """

    config: DraftConfig
    target_ids: Tensor | None

    def write_context(self, features: Tensor, positions: Tensor, cache: PagedKV, slots: Tensor) -> None:
        """Make context KV of features [T, F] at positions [T] and store it, all layers, in slots [T]."""
        ...

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        """Blocks [R, N], anchor first and masks after, at positions [R, N] -> logits [R, K, V'].

        K is `num_drafts`, by default N - 1. All rows of a block go through the layers whatever it is, since without
        causality the first depend on the last; only the first K masks need logits, and the last layer whole.
        """
        ...


class DraftFamily(Protocol):
    """A class of drafts: which tensors one owns, and how it is built from them and its target."""

    def expected_shapes(self, config: DraftConfig) -> Shapes:
        """Every tensor a draft owns, by canonical name, with its shape."""
        ...

    def __call__(self, config: DraftConfig, weights: Weights, target: TargetEnds, placement: Placement) -> Draft: ...


DRAFTS: Registry[DraftFamily] = Registry("draft family")


@cache
def draft_families() -> Registry[DraftFamily]:
    """The registry with every family of this package in it."""
    DRAFTS.discover("dflash_runtime.drafts")
    return DRAFTS


def load_draft(source: DraftLike, target: TargetEnds, placement: Placement) -> Draft:
    """Load the tensors a draft owns and build it; see `owned_tensors` for what is refused."""
    return build_draft(source.config, load_draft_weights(source, placement), target, placement)


def owned_tensors(source: DraftLike) -> tuple[str, ...]:
    """The tensors of a checkpoint that its draft owns, from the headers; the others are not loaded.

    Raises:
        UnsupportedError: packed weights, a mask embedding of its own, or a family that is not registered.
        TensorMismatch: missing, unexpected and misshapen tensors, all at once.
    """
    checkpoint = source.checkpoint
    refuse_packed(checkpoint.path, find_quantization(checkpoint))
    for name in MASK_EMBEDDINGS:
        if (checkpoint.path / name).exists():
            raise UnsupportedError(
                f"{checkpoint.path / name}: a learned mask embedding, which this runtime does not apply",
                hint="acceptance without it would not be the draft's own",
            )
    expected = draft_families()[source.config.family].expected_shapes(source.config)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    return select_tensors(expected, shapes, path=checkpoint.path).load


def load_draft_weights(source: DraftLike, placement: Placement) -> Weights:
    """Load the tensors a draft owns onto a device; see `owned_tensors` for what is refused."""
    return load_weights(source.checkpoint, owned_tensors(source), placement)


def build_draft(config: DraftConfig, weights: Weights, target: TargetEnds, placement: Placement) -> Draft:
    """A draft of the config's family from weights that are on the device; several may share them."""
    return draft_families()[config.family](config, weights, target, placement)
