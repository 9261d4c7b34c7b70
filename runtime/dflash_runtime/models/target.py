"""The interface of a target, as the runner calls it, and the registry of target families.

A family is one file in this package with a class decorated `@TARGETS.register(model_type)`, where `model_type` is that
of the checkpoint's config.

Axis letters: T flat rows, F feature width (taps x hidden), V vocabulary.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from dflash_runtime.checkpoint.hf_config import not_run
from dflash_runtime.checkpoint.layout import Shapes, compare_tensors
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import TargetConfig
from dflash_runtime.errors import TensorMismatch
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.weights import Weights, load_weights
from dflash_runtime.registry import Registry


class Target(Protocol):
    """A decoder whose layers' outputs can be tapped."""

    config: TargetConfig
    embedding: Tensor  # [V, hidden]
    head: Linear  # [V, hidden]

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids and positions [T] -> normalised hidden states [T, hidden], features [T, F].

        Features are the outputs of the decoder layers `taps`, concatenated in that order; None without taps.
        """
        ...


class TargetFamily(Protocol):
    """A class of targets: which tensors one has, and how it is built from them."""

    def expected_shapes(self, config: TargetConfig) -> Shapes:
        """Every tensor a target must have, with its shape."""
        ...

    def __call__(self, config: TargetConfig, weights: Weights, placement: Placement) -> Target: ...


TARGETS: Registry[TargetFamily] = Registry("target family")


@cache
def target_families() -> Registry[TargetFamily]:
    """The registry with every family of this package in it."""
    TARGETS.discover("dflash_runtime.models")
    return TARGETS


def check_target_runs(source: TargetSource) -> None:
    """Refuse a target that no family serves, by its config alone.

    Raises:
        UnsupportedError: its model type, or what its layers are.
        InvalidConfig: its family is served, and its config is malformed.
    """
    kind, known = source.facts.model_type, target_families()
    if kind not in known:
        reasons = (f"it runs {', '.join(sorted(known))}", *source.facts.not_known)
        raise not_run(kind, reasons, source.checkpoint.config_path)
    _ = source.config


def load_target(source: TargetSource, placement: Placement) -> Target:
    """Load a target's weights onto a device. Tensors its family does not know are left alone.

    Raises:
        UnsupportedError: a model type that no registered family runs.
        TensorMismatch: tensors that are missing or misshapen, all at once.
    """
    check_target_runs(source)
    family = target_families()[source.config.model_type]
    expected = family.expected_shapes(source.config)
    found = {name: info.shape for name, info in source.checkpoint.tensors.items()}
    missing, _, wrong = compare_tensors(expected, found)
    if missing or wrong:
        raise TensorMismatch(missing=missing, wrong=wrong, path=source.checkpoint.path)
    return family(source.config, load_weights(source.checkpoint, expected, placement), placement)
