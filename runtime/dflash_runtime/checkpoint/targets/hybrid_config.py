"""Read the config of a target with recurrent layers by the gated delta rule. Needs no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.targets.experts_config import read_experts_in_every_layer, read_shared_experts
from dflash_runtime.checkpoint.targets.hf_config import common_facts, foreign_parts, not_run, read_body
from dflash_runtime.checkpoint.targets.layer_kinds import FULL, LINEAR
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.json_values import is_number
from dflash_runtime.target_config import ExpertsConfig, RecurrenceConfig, TargetConfig

ExpertsReader = Callable[[Mapping[str, Any], int, Path], ExpertsConfig]
"""Reads the experts from a decoder's config, given its number of layers; see `experts_config`."""

HYBRIDS: Mapping[str, ExpertsReader | None] = {
    "qwen3_5": None, "qwen3_5_text": None, "qwen3_5_moe": read_experts_in_every_layer,
    "qwen3_5_moe_text": read_experts_in_every_layer, "qwen3_next": read_shared_experts,
}  # fmt: skip
"""Model type that this module reads -> the reader of its experts."""

KNOWN = (
    "multimodal", "layer_types linear_attention", "linear attention", "full attention in some layers only",
    "partial rope", "a gated query",
)  # fmt: skip
"""Parts of a decoder, as `foreign_parts` names them, that such a target has."""

USUAL_SHARE = 0.25
"""The rotated share of each head if a config states none. Source: transformers' Qwen3_5TextConfig."""


def read_hybrid_config(config: Mapping[str, Any], path: Path) -> TargetConfig:
    """Read a hybrid target: layers are recurrent or have full attention.

    Raises:
        UnsupportedError: the target has other layers, or parts that this runtime does not compute.
        InvalidConfig: a key is missing or wrong.
    """
    text, _ = decoder_config(config, path)
    facts = common_facts(config, text, path)
    kinds = facts["layer_kinds"]
    others = sorted({kind for kind in kinds if kind not in (FULL, LINEAR)})
    read_experts = HYBRIDS.get(facts["model_type"])
    known = KNOWN if read_experts is None else (*KNOWN, "experts")
    parts = [*foreign_parts(config, text, path, known=known), *(f"layers of kind {kind}" for kind in others)]
    if kinds and FULL not in kinds:
        parts.append("no layer with attention")
    if parts:
        raise not_run(facts["model_type"], *parts, path=path)
    if not kinds:
        raise InvalidConfig("layer_types", text.get("layer_types"), "the kind of each layer", path=path)
    experts = None if read_experts is None else read_experts(text, len(kinds), path)
    if experts is not None and len(experts.layers) == len(kinds):  # no layer has the width of a dense one
        text = {**text, "intermediate_size": experts.intermediate_size}
    body = {**read_body(text, path), "experts": experts}
    body["windows"] = (None,) * body["num_layers"]
    body["rotary_dim"] = _rotary_dim(text, body, path)
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    body["recurrence"] = _recurrence(text, layers, path) if layers else None
    return TargetConfig(**{**facts, **body})


def _recurrence(text: Mapping[str, Any], layers: tuple[int, ...], path: Path) -> RecurrenceConfig:
    return RecurrenceConfig(
        layers=layers,
        num_key_heads=require_int(text, "linear_num_key_heads", path),
        num_value_heads=require_int(text, "linear_num_value_heads", path),
        key_size=require_int(text, "linear_key_head_dim", path),
        value_size=require_int(text, "linear_value_head_dim", path),
        num_taps=require_int(text, "linear_conv_kernel_dim", path),
    )


def _rotary_dim(text: Mapping[str, Any], body: Mapping[str, Any], path: Path) -> int:
    share = body["rope"].params.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    share = USUAL_SHARE if share is None else share
    rotated = int(body["head_dim"] * share) if is_number(share) and 0 < share <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise InvalidConfig(
            "partial_rotary_factor", share, "a share that leaves an even number of dimensions", path=path
        )
    return rotated
