"""What the runner asks of a draft.

A family is one file in this package with a class decorated `@DRAFTS.register(name)`. A draft is fed context features
(the target's hidden states), keeps K and V made from them, and proposes a whole block from an anchor.

Axis letters: R requests, N block rows, K drafted tokens, T flat tokens, L layers, KV heads, D head dim, F features.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from dflash_runtime.config import DraftConfig
from dflash_runtime.layout import plan_tensors
from dflash_runtime.models.base import Target
from dflash_runtime.models.layers import Attend, Weights
from dflash_runtime.pair import DraftSource
from dflash_runtime.registry import Registry


class Draft(Protocol):
    """A block-diffusion draft bound to its target's embedding and head."""

    config: DraftConfig

    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, F] at positions [T] -> keys and values of every layer, each [L, T, KV, D]."""
        ...

    def propose(self, block_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Blocks [R, N], anchor first and masks after, at positions [R, N] -> drafted target ids [R, N - 1]."""
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
    source: DraftSource, target: Target, *, num_positions: int, device: torch.device, dtype: torch.dtype
) -> Draft:
    """Load the tensors a draft owns onto a device; those it does not own are skipped by name.

    Raises:
        TensorMismatch: missing, unexpected and misshapen tensors, all at once.
    """
    checkpoint = source.checkpoint
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    plan = plan_tensors(source.config, shapes, path=checkpoint.path)
    weights = {
        name: tensor.to(device=device, dtype=dtype) if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in checkpoint.load_many(list(plan.load))
    }
    family = draft_families()["dflash"]
    return family(source.config, weights, target, num_positions=num_positions, device=device, dtype=dtype)
