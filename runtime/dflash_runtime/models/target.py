"""The interface of a target, as the runner calls it, and the registry of target families. Importing it needs no torch.

A family is one file in this package with a class decorated `@TARGETS.register(model_type)`, where `model_type` is the
value in the checkpoint's config. If the file imports torch only inside functions, a checkpoint with other tensors than
the family lists is refused before torch is loaded.

Axis letters: T flat rows, F feature width (taps x hidden), V vocabulary.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from dflash_runtime.checkpoint.layout import Shapes, compare_tensors, unapplied_tensors
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.quantised.fp8_format import scale_tensors
from dflash_runtime.checkpoint.stored.element_types import wrong_dtypes
from dflash_runtime.checkpoint.targets.hf_config import refuse_other_layers
from dflash_runtime.checkpoint.targets.runs_here import FAMILIES, family_files, refuse_quantised, without_native_family
from dflash_runtime.errors import TensorMismatch, UnsupportedError
from dflash_runtime.models.expert_shapes import with_fused_experts
from dflash_runtime.registry import Registry
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_runtime.models.layers import Attend, Linear
    from dflash_runtime.models.placement import Placement
    from dflash_runtime.models.weights import Weights


class TargetEnds(Protocol):
    """The parts of a target that a draft uses."""

    @property
    def embedding(self) -> "Tensor":
        """[V, hidden]. Of a target on several ranks, a `SplitEmbedding`, which only looks up rows."""
        ...

    @property
    def head(self) -> "Linear":
        """[V, hidden]."""
        ...

    @property
    def embedding_scale(self) -> float:
        """The factor that the target applies to rows of its embedding."""
        ...


class Target(TargetEnds, Protocol):
    """A decoder with taps on the outputs of its layers.

    A target may have `follows_from_shapes`. If it is true, the target never reads a tensor's value on the host: its
    launches depend only on shapes, so that steps can be captured as CUDA graphs.
    """

    config: TargetConfig

    def __call__(
        self,
        token_ids: "Tensor",
        positions: "Tensor",
        attend: "Attend",
        taps: Sequence[int],
        wanted: "Tensor | None" = None,
    ) -> "tuple[Tensor, Tensor | None]":
        """Token ids and positions [T] -> normalised hidden states [T, hidden], features [T, F].

        With `wanted` [S] the hidden states have only these rows, [S, hidden]. During prefill the last layer then
        computes only K and V for rows that nobody reads. Features are the outputs of the decoder layers `taps`,
        concatenated in that order, or None without taps.
        """
        ...


class TargetFamily(Protocol):
    """A class of targets: lists the tensors of a target, and builds a target from them.

    A family may have `read_config(config, path)`, which returns the `TargetConfig` of a config.json with keys that
    `hf_config.read_target_config` refuses as parts of another decoder. It may have `arrange`, which `load_weights`
    calls.
    """

    def expected_shapes(self, config: TargetConfig) -> Shapes:
        """Return every tensor that a target must have, with its shape."""
        ...

    def __call__(self, config: TargetConfig, weights: "Weights", placement: "Placement") -> Target: ...


EMBEDDING = "embed_tokens.weight"
"""The name of the embedding inside a decoder."""

NUM_NAMED = 5
"""The most tensors that a message names before it counts the rest."""

TARGETS: Registry[TargetFamily] = Registry("target family")


@cache
def target_families() -> Registry[TargetFamily]:
    """Return the registry after importing the file of every family of this package."""
    for file in family_files():
        import_module(f"{FAMILIES}.{file.module}")
    return TARGETS


def family_config(source: TargetSource) -> TargetConfig:
    """Return the config of a target as its native family reads it.

    Raises:
        UnsupportedError: no native family runs the target.
        CheckpointError: the config is malformed.
    """
    kind, known = source.facts.model_type, target_families()
    if kind not in known:
        raise without_native_family(source, frozenset(known))
    read_config = getattr(known[kind], "read_config", None)
    checkpoint = source.checkpoint
    config: TargetConfig = (
        source.config if read_config is None else read_config(checkpoint.config, checkpoint.config_path)
    )
    refuse_other_layers(config, checkpoint.config_path)
    refuse_quantised(source, config)
    return config


def target_shapes(source: TargetSource) -> Shapes:
    """Return every tensor that a native target loads, with its shape, from the headers.

    Raises:
        UnsupportedError: a model type without a native family, another quantization than FP8, or tensors that are not
            applied.
        TensorMismatch: lists all missing and misshapen tensors and matrices of integers.
    """
    config, path = family_config(source), source.checkpoint.path
    expected, missing, wrong = _compare_with_family(source, config)
    found = source.checkpoint.tensors
    wrong |= wrong_dtypes(source.checkpoint.tensors[name] for name in expected if name in found and name not in wrong)
    if missing or wrong:
        raise TensorMismatch(missing=missing, wrong=wrong, path=path)
    unread = found.keys() - expected.keys() - scale_tensors(source.checkpoint)
    if config.nested_in is not None:  # the other parts of a multimodal model are outside the decoder, under any name
        stem = next(name for name in expected if name.endswith(EMBEDDING)).removesuffix(EMBEDDING)
        unread = {name for name in unread if name.startswith((stem, "lm_head."))}
    surplus = unapplied_tensors(unread, stored=found, num_layers=config.num_layers)
    if surplus:
        more = f" and {len(surplus) - NUM_NAMED} more" if len(surplus) > NUM_NAMED else ""
        raise UnsupportedError(
            f"{', '.join(surplus[:NUM_NAMED])}{more}: tensors that this runtime does not apply to a "
            f"{config.model_type} target",
            id="tensors-not-applied",
            path=path,
            field=surplus[0],
            found=tuple(surplus),
            hint="without them it would be another model",
        )
    return expected


def check_hosted_tensors(source: TargetSource) -> None:
    """Require the tensors of a target that transformers runs, if its model type has a native family.

    Transformers renames some tensors, so it judges a target that lacks most of the family's names.

    Raises:
        TensorMismatch: lists all missing and misshapen tensors.
    """
    expected, missing, wrong = _compare_with_family(source, family_config(source))
    if (missing or wrong) and 2 * len(missing) < len(expected):
        raise TensorMismatch(missing=missing, wrong=wrong, path=source.checkpoint.path)


def _compare_with_family(
    source: TargetSource, config: TargetConfig
) -> tuple[Shapes, list[str], dict[str, tuple[str, str]]]:
    """Return the tensors that the native family loads, and the missing and misshapen ones."""
    found = {name: info.shape for name, info in source.checkpoint.tensors.items()}
    expected = with_fused_experts(target_families()[config.model_type].expected_shapes(config), found)
    missing, _, wrong = compare_tensors(expected, found)
    return expected, missing, wrong
