"""The interface of a target, as the runner calls it, and the registry of target families.

A family is one file in this package with a class decorated `@TARGETS.register(model_type)`, where `model_type` is the
value in the checkpoint's config.

Axis letters: T flat rows, F feature width (taps x hidden), V vocabulary.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_runtime.checkpoint.fp8_format import scale_tensors
from dflash_runtime.checkpoint.hf_config import refuse_other_layers
from dflash_runtime.checkpoint.hosted_config import open_decoder, read_hosted_config, read_own_cache_config
from dflash_runtime.checkpoint.layout import Shapes, compare_tensors, unapplied_tensors
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.runs_here import (
    TargetRuntime,
    how_it_runs,
    refuse_quantised,
    without_native_family,
)
from dflash_runtime.checkpoint.target_quantization import read_quantization
from dflash_runtime.errors import TensorMismatch, UnsupportedError, naming_file
from dflash_runtime.models.expert_stacks import with_fused_experts
from dflash_runtime.models.hosted import load_hosted
from dflash_runtime.models.hosted_quantization import quantised_bytes
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.own_cache_trial import load_own_cache
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.rank_sizes import OPTION
from dflash_runtime.models.target_shares import Cut, cut_info, cut_tensors, share_config
from dflash_runtime.models.text_part import text_tensors
from dflash_runtime.models.weights import Weights, load_weights, loaded_bytes, native_bytes
from dflash_runtime.ranks.rank_group import ALONE, Ranks
from dflash_runtime.registry import Registry
from dflash_runtime.target_config import TargetConfig


class TargetEnds(Protocol):
    """The parts of a target that a draft uses."""

    @property
    def embedding(self) -> Tensor:
        """[V, hidden]. Of a target on several ranks, a `SplitEmbedding`, which only looks up rows."""
        ...

    @property
    def head(self) -> Linear:
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
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
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

    def __call__(self, config: TargetConfig, weights: Weights, placement: Placement) -> Target: ...


logger = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"
"""The name of the embedding inside a decoder."""

NUM_NAMED = 5
"""The most tensors that a message names before it counts the rest."""

TARGETS: Registry[TargetFamily] = Registry("target family")


@cache
def target_families() -> Registry[TargetFamily]:
    """Return the registry after importing every family of this package."""
    TARGETS.discover("dflash_runtime.models")
    return TARGETS


def find_target_runtime(source: TargetSource, wanted: str) -> tuple[TargetRuntime, TargetConfig]:
    """Return the code that runs a target, and the target's config as that code reads it; see `how_it_runs`.

    `load_target` may still find that our pages cannot serve the target, after a trial.

    Raises:
        UnsupportedError: no code runs the model type or its layers. With `auto` the error says why transformers cannot.
        CheckpointError: the config is malformed.
    """
    answer = how_it_runs(source, wanted, refuse_native=_native_config, read_decoder=open_decoder)
    if answer.runtime is None:
        assert answer.refusal is not None
        raise answer.refusal
    return answer.runtime, CONFIG_READERS[answer.runtime](source)


def _native_config(source: TargetSource) -> TargetConfig:
    """Return the config of a target that a family of this package runs."""
    kind, known = source.facts.model_type, target_families()
    if kind not in known:
        raise without_native_family(source, frozenset(known))
    read_config = getattr(known[kind], "read_config", None)
    checkpoint = source.checkpoint
    config: TargetConfig = (
        source.config if read_config is None else read_config(checkpoint.config, checkpoint.config_path)
    )
    refuse_other_layers(config, checkpoint.config_path)
    refuse_quantised(source)
    return config


CONFIG_READERS: Mapping[TargetRuntime, Callable[[TargetSource], TargetConfig]] = {
    "native": _native_config,
    "transformers": read_hosted_config,
    "transformers-cache": read_own_cache_config,
}


def load_target(source: TargetSource, placement: Placement, runtime: str = "native") -> Target:
    """Load a target's weights onto a device. Raises the errors of `target_shapes` and `load_own_cache`.

    If the trial of `load_hosted` shows that our pages cannot serve the target, the target keeps its own cache.
    """
    found, config = find_target_runtime(source, runtime)
    if found != "native":
        return try_target(source, placement, found)
    family, ranks = target_families()[config.model_type], placement.ranks
    arrange = getattr(family, "arrange", None)
    cuts = target_cuts(source, ranks)
    weights = load_weights(source.checkpoint, target_shapes(source), placement, arrange=arrange, cuts=cuts)
    return family(share_config(config, ranks.size), weights, placement)


def try_target(source: TargetSource, placement: Placement, runtime: TargetRuntime) -> Target:
    """Load a target through transformers and try it out; see `load_target`."""
    config = CONFIG_READERS[runtime](source)
    if runtime == "transformers":
        try:
            with naming_file(source.checkpoint.path):
                return load_hosted(source, config, placement)
        except UnsupportedError as error:
            logger.info("not over pages: %s", error.message)
        gc.collect()  # free the refused model: memory may not hold two
        config = read_own_cache_config(source)
    with naming_file(source.checkpoint.path):
        return load_own_cache(source, config, placement)


def target_cuts(source: TargetSource, ranks: Ranks) -> dict[str, Cut]:
    """Return the cut of each tensor that this rank loads in part, of a native target.

    Raises:
        UnsupportedError: the ranks do not divide the target; see `share_config`. Or the family does not run on several
            ranks.
    """
    if ranks.size == 1:
        return {}
    config = _native_config(source)
    family: Any = target_families()[config.model_type]
    if not hasattr(family, "joined_parts"):
        raise UnsupportedError(
            id="family-on-one-rank", path=source.checkpoint.config_path, field="model_type", found=config.model_type,
            expected="a family that runs on several GPUs", hint=f"leave out {OPTION}",
        )  # fmt: skip
    return family_cuts(family, config, ranks, source.checkpoint.tensors)


def family_cuts(family: Any, config: TargetConfig, ranks: Ranks, stored: Iterable[str] = ()) -> dict[str, Cut]:
    """Return the cut of each tensor that this rank has in part.

    `config` is the whole target's. `stored` are the names of the checkpoint's tensors, which may have fused experts.
    """
    whole, own = (
        with_fused_experts(family.expected_shapes(item), stored) for item in (config, share_config(config, ranks.size))
    )
    parts = {name: found for name in whole if (found := family.joined_parts(config, name)) is not None}
    return cut_tensors(whole, own, ranks, parts)


def target_bytes(source: TargetSource, dtype: torch.dtype, runtime: TargetRuntime, ranks: Ranks = ALONE) -> int:
    """Return the bytes of a target's weights after loading, from the headers. Of several ranks, of this one."""
    tensors = source.checkpoint.tensors
    if runtime != "native":
        quantization, tensors = read_quantization(source), text_tensors(tensors.values())
        return (
            loaded_bytes(tensors.values(), dtype)
            if quantization is None
            else quantised_bytes(quantization, tensors, dtype)
        )
    cuts = target_cuts(source, ranks)
    return native_bytes((cut_info(tensors[name], cuts.get(name)) for name in target_shapes(source)), dtype)


def target_shapes(source: TargetSource) -> Shapes:
    """Return every tensor that a native target loads, with its shape, from the headers.

    Raises:
        UnsupportedError: a model type without a native family, another quantization than FP8, or tensors that are not
            applied.
        TensorMismatch: lists all missing and misshapen tensors.
    """
    config, path = _native_config(source), source.checkpoint.path
    found = {name: info.shape for name, info in source.checkpoint.tensors.items()}
    expected = with_fused_experts(target_families()[config.model_type].expected_shapes(config), found)
    missing, _, wrong = compare_tensors(expected, found)
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
