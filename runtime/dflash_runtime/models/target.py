"""What the runner asks of a target, and the registry of target families.

A family is one file in this package with a class decorated `@TARGETS.register(model_type)`. Adding one is adding a
file.

Axis letters: T flat rows, F feature width (taps x hidden), V vocabulary.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from dflash_kernels.suite import Kernels
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import TargetConfig
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.registry import Registry


class Target(Protocol):
    """A decoder whose layers' outputs can be tapped."""

    config: TargetConfig
    embedding: Tensor  # [V, hidden]
    head: Linear  # [V, hidden]

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Iterable[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids and positions [T] -> normalised hidden states [T, hidden], features [T, F].

        Features are the outputs of the decoder layers `taps`, concatenated in that order; None without taps.
        """
        ...


class TargetFamily(Protocol):
    """Builds a target from its checkpoint."""

    def __call__(
        self,
        config: TargetConfig,
        weights: Mapping[str, Tensor],
        *,
        num_positions: int,
        kernels: Kernels,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Target: ...


TARGETS: Registry[TargetFamily] = Registry("target family")


@cache
def target_families() -> Registry[TargetFamily]:
    """The registry with every family of this package in it."""
    TARGETS.discover("dflash_runtime.models")
    return TARGETS


def load_target(
    source: TargetSource, *, num_positions: int, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> Target:
    """Load a target's weights onto a device.

    Raises:
        UnsupportedError: a model type no family serves.
        TensorMismatch: tensors that are missing or misshapen, all at once.
    """
    family = target_families()[source.config.model_type]
    names = list(source.checkpoint.tensors)
    weights = {
        name: tensor.to(device=device, dtype=dtype) if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in source.checkpoint.load_many(names)
    }
    return family(source.config, weights, num_positions=num_positions, kernels=kernels, device=device, dtype=dtype)
