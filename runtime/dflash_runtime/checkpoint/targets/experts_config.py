"""Read which layers of a target have experts, and how they are chosen. Needs no torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_runtime.errors import MISSING, InvalidConfig
from dflash_runtime.json_values import is_int
from dflash_runtime.target_config import ExpertsConfig

WITH_EXPERTS = ("qwen3_moe",)
"""Model types with experts that this module reads."""

COUNT_KEYS = ("num_experts", "num_local_experts")
"""The published key for the number of experts, and the key that transformers 5 writes."""


USUAL = {"norm_topk_prob": True, "decoder_sparse_step": 1}
"""Values of absent keys. Source: transformers' Qwen3NextConfig; its class for Qwen3.5 computes the same."""


def read_experts(config: Mapping[str, Any], num_layers: int, path: Path) -> ExpertsConfig:
    """Read the experts of a target of a model type in `WITH_EXPERTS`.

    Raises:
        InvalidConfig: a key is missing or wrong.
    """
    counts = {key: config[key] for key in COUNT_KEYS if config.get(key) is not None}
    if len(set(map(str, counts.values()))) != 1:
        raise InvalidConfig("num_experts", counts or MISSING, "one integer in every spelling", path=path)
    norm = config.get("norm_topk_prob", MISSING)
    if not isinstance(norm, bool):
        raise InvalidConfig("norm_topk_prob", norm, "true or false, since readers differ in the default", path=path)
    return ExpertsConfig(
        num_experts=next(iter(counts.values())),
        num_chosen=config.get("num_experts_per_tok", MISSING),
        intermediate_size=config.get("moe_intermediate_size", MISSING),
        has_normalised_scores=norm,
        layers=_layers_with_experts(config, num_layers, path),
    )


def read_shared_experts(config: Mapping[str, Any], num_layers: int, path: Path) -> ExpertsConfig:
    """As `read_experts`, with a shared expert beside the chosen ones, for Qwen3-Next.

    Absent keys have the defaults of transformers' config class, which other readers share.
    """
    stated = {key: value for key, value in config.items() if value is not None}
    experts = read_experts({**USUAL, **stated}, num_layers, path)
    return replace(experts, shared_size=stated.get("shared_expert_intermediate_size", MISSING))


def read_experts_in_every_layer(config: Mapping[str, Any], num_layers: int, path: Path) -> ExpertsConfig:
    """Return the experts of Qwen3.5, which has them in every layer; otherwise like `read_shared_experts`.

    Raises:
        InvalidConfig: a key that the classes of transformers ignore has another value, so readers differ.
    """
    experts = read_shared_experts(config, num_layers, path)
    if not experts.has_normalised_scores:
        raise InvalidConfig("norm_topk_prob", False, "true, as transformers computes this model type", path=path)
    if len(experts.layers) != num_layers:
        key = "mlp_only_layers" if config.get("mlp_only_layers") else "decoder_sparse_step"
        expected = "experts in every layer, as transformers computes this model type"
        raise InvalidConfig(key, config.get(key), expected, path=path)
    return experts


def _layers_with_experts(config: Mapping[str, Any], num_layers: int, path: Path) -> tuple[int, ...]:
    """Return every `decoder_sparse_step`-th layer, except the layers in `mlp_only_layers`."""
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", MISSING)
    if not isinstance(dense, list) or not all(is_int(layer) for layer in dense):
        raise InvalidConfig("mlp_only_layers", dense, "a list of layers", path=path)
    if not is_int(step) or step < 1:
        raise InvalidConfig("decoder_sparse_step", step, "a positive integer", path=path)
    return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
