"""Load a target: with the code of its native family, or with transformers' code."""

import gc
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dflash_runtime.checkpoint.layout import HEAD
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.quantised.fp8_format import read_fp8_format
from dflash_runtime.checkpoint.quantised.target_quantization import read_quantization
from dflash_runtime.checkpoint.stored.non_finite import naming_tensor
from dflash_runtime.checkpoint.targets.hosted_config import open_decoder, read_hosted_config, read_own_cache_config
from dflash_runtime.checkpoint.targets.rank_sizes import OPTION
from dflash_runtime.checkpoint.targets.runs_here import TargetRuntime, how_it_runs
from dflash_runtime.errors import InvalidConfig, UnsupportedError, naming_file
from dflash_runtime.models.expert_shapes import with_fused_experts
from dflash_runtime.models.hosting.hosted import load_hosted
from dflash_runtime.models.hosting.hosted_quantization import quantised_bytes
from dflash_runtime.models.hosting.own_cache_trial import load_own_cache
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import EMBEDDING, Target, family_config, target_families, target_shapes
from dflash_runtime.models.target_shares import Cut, cut_info, cut_tensors, share_config
from dflash_runtime.models.text_part import text_tensors
from dflash_runtime.models.weights import load_weights, loaded_bytes, native_bytes
from dflash_runtime.ranks.rank_group import ALONE, Ranks
from dflash_runtime.target_config import TargetConfig

logger = logging.getLogger(__name__)


def find_target_runtime(source: TargetSource, wanted: str) -> tuple[TargetRuntime, TargetConfig]:
    """Return the code that runs a target, and the target's config as that code reads it; see `how_it_runs`.

    `load_target` may still find that our pages cannot serve the target, after a trial.

    Raises:
        UnsupportedError: no code runs the model type or its layers. With `auto` the error says why transformers cannot.
        CheckpointError: the config is malformed.
    """
    answer = how_it_runs(source, wanted, refuse_native=family_config, read_decoder=open_decoder)
    if answer.runtime is None:
        assert answer.refusal is not None
        raise answer.refusal
    return answer.runtime, CONFIG_READERS[answer.runtime](source)


CONFIG_READERS: Mapping[TargetRuntime, Callable[[TargetSource], TargetConfig]] = {
    "native": family_config,
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
    refuse_other_head(source, config)
    cuts = target_cuts(source, ranks)
    weights = load_weights(source.checkpoint, target_shapes(source), placement, arrange=arrange, cuts=cuts)
    return family(share_config(config, ranks.size), weights, placement)


def refuse_other_head(source: TargetSource, config: TargetConfig) -> None:
    """Refuse a stored head that differs from the embedding to which the config ties it.

    transformers then computes with the stored head, and inference servers with the embedding.

    Raises:
        InvalidConfig: both are stored and differ.
    """
    checkpoint = source.checkpoint
    if not config.tie_word_embeddings or HEAD not in checkpoint.tensors:
        return
    embedding = next(name for name in target_shapes(source) if name.endswith(EMBEDDING))
    first, second = (dict(checkpoint.load_many([name], "cpu"))[name] for name in (embedding, HEAD))
    if not torch.equal(first, second):
        expected = f"false, since {HEAD} differs from {embedding}"
        raise InvalidConfig("tie_word_embeddings", True, expected, path=checkpoint.config_path)


def try_target(source: TargetSource, placement: Placement, runtime: TargetRuntime) -> Target:
    """Load a target through transformers and try it out; see `load_target`."""
    config = CONFIG_READERS[runtime](source)
    if runtime == "transformers":
        try:
            with naming_file(source.checkpoint.path), naming_tensor(source.checkpoint):
                return load_hosted(source, config, placement)
        except UnsupportedError as error:
            logger.info("not over pages: %s", error.message)
        gc.collect()  # free the refused model: memory may not hold two
        config = read_own_cache_config(source)
    with naming_file(source.checkpoint.path), naming_tensor(source.checkpoint):
        return load_own_cache(source, config, placement)


def target_cuts(source: TargetSource, ranks: Ranks) -> dict[str, Cut]:
    """Return the cut of each tensor that this rank loads in part, of a native target.

    Raises:
        UnsupportedError: the ranks do not divide the target; see `share_config`. Or the family does not run on several
            ranks.
    """
    if ranks.size == 1:
        return {}
    config = family_config(source)
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
    loaded = (cut_info(tensors[name], cuts.get(name)) for name in target_shapes(source))
    return native_bytes(loaded, dtype, read_fp8_format(source.checkpoint))
