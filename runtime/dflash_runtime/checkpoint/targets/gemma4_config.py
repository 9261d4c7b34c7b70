"""Read the config of a Gemma 4 target. Needs no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.targets.hf_config import (
    PER_LAYER,
    common_facts,
    foreign_parts,
    not_run,
    read_body,
    read_windows,
)
from dflash_runtime.checkpoint.targets.layer_kinds import FULL, SLIDING
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.checkpoint.targets.rope_fields import read_rope
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.errors import MISSING, InvalidConfig
from dflash_runtime.json_values import as_index, as_object, is_int
from dflash_runtime.target_config import ExpertsConfig, GemmaConfig, TargetConfig

GEMMA4 = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
"""Model types of Gemma 4: the text part alone, and the multimodal models."""

KNOWN = (
    "multimodal", "experts", "scaled attention", "another rope for each kind of layer (rope_parameters)",
    "layers that differ",
)  # fmt: skip
"""Parts of a decoder, as `foreign_parts` names them, that such a target may have."""

USUAL: Mapping[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
"""Values of absent keys, on which readers agree. Source: transformers' Gemma4TextConfig."""

INPUTS, USUAL_INPUTS = "hidden_size_per_layer_input", 256
"""Width of the inputs of each layer, and transformers' default, which the unified model type does not have."""

USUAL_FULL_HEAD = 512
"""Head size of full layers if a config states none. Source: transformers' Gemma4TextConfig."""


MAY_DIFFER = frozenset({"num_key_value_heads", "head_dim"})
"""Keys in which full layers may differ from the others."""


def read_gemma4_config(config: Mapping[str, Any], path: Path) -> TargetConfig:
    """Read a Gemma 4 target: sliding and full layers with heads of their own, and perhaps experts in every layer.

    Raises:
        UnsupportedError: the target has inputs of each layer, shares keys and values between layers, or has other parts
            that this runtime does not compute.
        InvalidConfig: a key is missing or wrong.
    """
    stated, nested_in = decoder_config(config, path)
    text = {**USUAL, **{key: value for key, value in stated.items() if value is not None}}
    outer = config if nested_in is not None else {**config, "tie_word_embeddings": text["tie_word_embeddings"]}
    facts = common_facts(outer, text, path)
    parts = [part for part in foreign_parts(config, text, path, known=KNOWN) if part not in KNOWN]
    parts += _parts_not_run(text, facts["model_type"])
    if parts:
        raise not_run(facts["model_type"], *parts, path=path)
    if "layer_types" not in text:
        raise InvalidConfig("layer_types", MISSING, "the kind of each layer", path=path)
    ropes = _read_ropes(text, path)
    alike = {**text, "rope_parameters": ropes[SLIDING].to_parameters(), "hidden_act": text["hidden_activation"]}
    body = read_body(alike, path)
    body["windows"] = read_windows(text, body["num_layers"], path)
    full = tuple(layer for layer, window in enumerate(body["windows"]) if window is None)
    return TargetConfig(
        **{
            **facts,
            **body,
            "ropes": ropes,
            "experts": _read_experts(text, body["num_layers"], path) if text.get("enable_moe_block") else None,
            "other_kv_shapes": _full_heads(text, body, full, path),
            "gemma": GemmaConfig(
                has_equal_kv=bool(text.get("attention_k_eq_v")), logit_cap=text.get("final_logit_softcapping")
            ),
        }
    )


def _parts_not_run(text: Mapping[str, Any], model_type: str) -> Iterator[str]:
    """Name the parts of some Gemma 4 targets that this runtime does not compute."""
    is_unified = model_type.startswith("gemma4_unified")
    if text.get(INPUTS, 0 if is_unified else USUAL_INPUTS):
        yield f"inputs of each layer ({INPUTS})"
    if text.get("num_kv_shared_layers"):
        yield "layers that share keys and values (num_kv_shared_layers)"
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        yield "attention to later tokens (use_bidirectional_attention)"
    if text.get("attention_bias"):
        yield "biases (attention_bias)"
    others = {key for item in as_object(text.get(PER_LAYER)).values() for key in as_object(item)} - MAY_DIFFER
    if others:
        yield f"layers that differ in {', '.join(sorted(others))} ({PER_LAYER})"
    if any(as_object(rope).get("truncate") is False for rope in as_object(text.get("rope_parameters")).values()):
        yield "a rope of some layers with truncate false, which transformers does not read there (rope_parameters)"
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds and kinds[-1] != "full_attention":
        yield "a last layer that slides, while transformers reads it as full (layer_types)"


def _read_ropes(text: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the ropes of sliding and of full layers."""
    nested = as_object(text.get("rope_parameters"))
    names = {SLIDING: "sliding_attention", FULL: "full_attention"}
    for name in names.values():
        if not isinstance(nested.get(name), dict):
            raise InvalidConfig(f"rope_parameters.{name}", nested.get(name, MISSING), "an object", path=path)
    return {kind: read_rope({"rope_parameters": nested[name]}, path) for kind, name in names.items()}


def _full_heads(
    text: Mapping[str, Any], body: Mapping[str, Any], full: tuple[int, ...], path: Path
) -> dict[int, tuple[int, int]]:
    """Return KV heads and head size of full layers, in either spelling."""
    usual, stated = (body["num_kv_heads"], body["head_dim"]), as_object(text.get(PER_LAYER))
    if stated:
        changes = {layer: as_object(item) for key, item in stated.items() if (layer := as_index(key)) is not None}
        if len(changes) != len(stated) or changes.keys() != set(full):
            raise InvalidConfig(PER_LAYER, sorted(stated), "the number of every full layer", path=path)
        shapes = {
            layer: (item.get("num_key_value_heads", usual[0]), item.get("head_dim", usual[1]))
            for layer, item in changes.items()
        }
        if len(set(map(str, shapes.values()))) > 1:
            raise InvalidConfig(PER_LAYER, stated, "the same sizes in every full layer", path=path)
    elif isinstance(text.get(PER_LAYER), dict):  # no layer differs; transformers writes this
        shapes = {}
    else:
        count = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
        shapes = dict.fromkeys(full, (count or usual[0], text.get("global_head_dim", USUAL_FULL_HEAD)))
    for shape in shapes.values():
        if not all(is_int(number) and number > 0 for number in shape):
            raise InvalidConfig("global_head_dim", shape, "positive integers", path=path)
    return {layer: shape for layer, shape in shapes.items() if shape != usual}


def _read_experts(text: Mapping[str, Any], num_layers: int, path: Path) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=require_int(text, "num_experts", path),
        num_chosen=require_int(text, "top_k_experts", path),
        intermediate_size=require_int(text, "moe_intermediate_size", path),
        has_normalised_scores=True,
        layers=tuple(range(num_layers)),
    )
