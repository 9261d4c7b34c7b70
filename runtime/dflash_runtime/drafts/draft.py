"""What the runner asks of a draft.

A family is one file in this package with a class decorated `@DRAFTS.register(name)`. A draft is fed context features
(the target's hidden states), keeps K and V made from them, and proposes a whole block from an anchor.

Axis letters: R requests, N block rows, T flat rows, F features, V' output vocabulary.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from dflash_kernels.suite import Kernels
from dflash_runtime.checkpoint.files import MASK_FILE
from dflash_runtime.checkpoint.layout import select_tensors
from dflash_runtime.checkpoint.pair import DraftSource
from dflash_runtime.config import DraftConfig
from dflash_runtime.device.kv import KVCache
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.layers import Attend, Weights
from dflash_runtime.models.target import Target
from dflash_runtime.registry import Registry

MASK_EMBEDDINGS = ("mask_embedding.pt", MASK_FILE)
"""A vector some drafts bring for the mask token instead of the target's embedding of it."""


class Draft(Protocol):
    """A block-diffusion draft bound to its target's embedding and head.

    `target_ids` maps the draft's output ids to the target's, [V'] int64, or is None where they are the same.
    """

    config: DraftConfig
    target_ids: Tensor | None

    def write_context(self, features: Tensor, positions: Tensor, cache: KVCache, slots: Tensor) -> None:
        """Make context KV of features [T, F] at positions [T] and store it, all layers, in slots [T]."""
        ...

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Blocks [R, N], anchor first and masks after, at positions [R, N] -> logits [R, N - 1, V']."""
        ...


class DraftFamily(Protocol):
    """Builds a draft from its checkpoint and its target."""

    def __call__(
        self,
        config: DraftConfig,
        weights: Weights,
        target: Target,
        *,
        num_positions: int,
        kernels: Kernels,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Draft: ...


DRAFTS: Registry[DraftFamily] = Registry("draft family")


@cache
def draft_families() -> Registry[DraftFamily]:
    """The registry with every family of this package in it."""
    import dflash_runtime.drafts as package

    DRAFTS.discover(package)
    return DRAFTS


def load_draft(
    source: DraftSource,
    target: Target,
    *,
    num_positions: int,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
) -> Draft:
    """Load the tensors a draft owns onto a device; those it does not own are skipped by name.

    Raises:
        TensorMismatch: missing, unexpected and misshapen tensors, all at once.
    """
    checkpoint = source.checkpoint
    for name in MASK_EMBEDDINGS:
        if (checkpoint.path / name).exists():
            raise UnsupportedError(
                f"{checkpoint.path / name}: a learned mask embedding, which this runtime does not apply",
                hint="acceptance without it would not be the draft's own",
            )
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    plan = select_tensors(source.config, shapes, path=checkpoint.path)
    weights = {
        name: tensor.to(device=device, dtype=dtype) if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in checkpoint.load_many(list(plan.load))
    }
    family = draft_families()["dflash"]
    return family(
        source.config, weights, target, num_positions=num_positions, kernels=kernels, device=device, dtype=dtype
    )
