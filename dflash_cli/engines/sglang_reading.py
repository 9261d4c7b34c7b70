"""The values that SGLang reads from a native config.

Source: SGLang 0.5.23 speculative/dflash_utils.py and models/dflash.py; run on the configs of
tests/golden/engine_verdicts.json and family_verdicts.json.
"""

from collections.abc import Mapping
from typing import Any

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import (
    EngineReading,
    causal_of,
    check_architecture,
    check_captured,
    check_mask,
    check_packing,
    check_rope,
    check_shapes,
    real,
    resolve_auto,
    whole,
    windows_of,
)
from dflash_cli.engines.family_reading import selector_parts
from dflash_cli.engines.packed_weights import is_packed
from dflash_cli.engines.partial_loads import PartialLoads, partial_loads
from dflash_cli.engines.sglang_packing import load_packing
from dflash_cli.engines.sglang_settings import read_block, read_markov, read_selector_of_sglang
from dflash_cli.formats.fields import guess_taps
from dflash_cli.rules.subject import Subject
from dflash_runtime.json_values import as_object, is_int, is_number

LEAST_DEPTH = 4
"""The fewest layers from which SGLang guesses the tapped ones."""

PADDED = ("gate_proj", "up_proj", "down_proj", "o_proj")
"""Projections that SGLang extends by zeros if the config states a larger size."""

NO_LAST_LAYER = frozenset(
    {
        "llama", "mellum", "ministral3", "mistral", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    }
)  # fmt: skip
"""Values of model_type for which SGLang never captures the last layer's output."""


def read_native(subject: Subject) -> EngineReading | None:
    """The values of SGLang's parser and model; None for a config class that is not modelled.

    Raises:
        EngineStops: the key at which SGLang stops.
    """
    config = subject.config
    nested = as_object(config.get("dflash_config"))
    if subject.format.architecture is not None:  # S34 reports the models of other families
        check_architecture(config, subject.format.architecture)
    found = resolve_auto(config)
    _check_type(config)
    if found is None or _has_own_embedding(config):
        return None
    if not is_packed(subject):
        check_packing(config)
    stated = {**config, **nested}
    depth = _optional("num_target_layers", stated)
    block = _optional("block_size", stated)
    mask, taps = _mask(stated), _taps(stated, depth, found, subject)
    num_taps = len(taps)
    scales = _scales(nested)
    own, parts = {}, {}
    if subject.format.family == "dflash2":
        own = read_selector_of_sglang(nested)
        parts = selector_parts(own, found)
    elif subject.format.family == "dspark":
        own, parts = read_markov(config, found, subject)
        block, mask, taps = read_block(config, block, mask, taps)
    _check_taps(taps, num_taps, found, subject)
    _check_model(found)
    check_mask(mask, subject)
    packed = load_packing(subject, found, num_taps) if is_packed(subject) else None
    loads = PartialLoads() if packed is not None else partial_loads(found, subject, padding=PADDED)
    if packed is None:
        check_shapes(found, num_taps, subject, resized=(*loads.cut, *loads.padded), **parts)
    return EngineReading(
        windows=tuple(window if (window or 0) > 0 else None for window in windows_of(found)),
        causal=causal_of(config.get("is_causal"), found),
        taps=tuple(sorted(taps)),
        mask_token_id=mask,
        rope=found["rope_parameters"],
        eps=found["rms_norm_eps"],
        block_size=block,
        neox=bool(config.get("rope_is_neox_style", config.get("is_neox_style", True))),
        gemma_norms=bool(config.get("use_gemma_norm", False)),
        **scales,
        cut=loads.cut,
        padded=loads.padded,
        packed=packed.faults if packed is not None else (),
        own=own,
    )


def _scales(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The sinks, and the numbers that scale values and logits, as fields of a reading.

    Raises:
        EngineStops: the key at which SGLang stops.
    """
    sinks, scale = nested.get("attention_sink_bias", False), nested.get("attention_value_scale")
    if not isinstance(sinks, bool):
        raise EngineStops("dflash_config.attention_sink_bias", f"found {sinks!r}, expected true or false")
    if scale is not None and not is_number(scale):
        raise EngineStops("dflash_config.attention_value_scale", f"found {scale!r}, expected a number")
    multiplier = real("dflash_config.output_multiplier", nested.get("output_multiplier", 1.0))
    if multiplier <= 0:
        raise EngineStops("dflash_config.output_multiplier", f"found {multiplier}, expected a positive number")
    softcap = real("dflash_config.final_logit_softcapping", nested.get("final_logit_softcapping") or 0.0)
    caps = softcap if softcap > 0 else None
    return {"sinks": sinks, "value_scale": scale, "output_multiplier": multiplier, "final_logit_softcapping": caps}


def _optional(key: str, stated: Mapping[str, Any]) -> int | None:
    """A count that may be absent or null."""
    return None if stated.get(key) is None else whole(key, stated[key], least=1)


def _mask(stated: Mapping[str, Any]) -> int | None:
    """The mask token's id; None if the tokenizer has to tell it."""
    mask, token = stated.get("mask_token_id"), stated.get("mask_token")
    if token is not None and not (isinstance(token, str) and token):
        raise EngineStops("mask_token", f"found {token!r}, expected a text")
    if mask is not None and not (is_int(mask) and mask >= 0):
        raise EngineStops("mask_token_id", f"found {mask!r}, expected an id of 0 or more")
    return mask


def _taps(stated: Mapping[str, Any], depth: int | None, found: Mapping[str, Any], subject: Subject) -> list[int]:
    """The tapped layers, which SGLang captures before the next layer and so never after the target's last."""
    given, runtime = stated.get("target_layer_ids"), subject.num_target_layers
    if given is None:
        count = depth or found["num_hidden_layers"]
        taps = guess_taps(runtime or count, found["num_hidden_layers"])
        if min(count, runtime or count) < LEAST_DEPTH and found["num_hidden_layers"] > 1:
            raise EngineStops("num_target_layers", f"too few to guess the tapped layers from: {count}")
    elif not isinstance(given, list) or not given:
        raise EngineStops("target_layer_ids", f"found {given!r}, expected a list of integers")
    else:
        taps = [whole("target_layer_ids", item) for item in given]
        limit = depth or max(taps) + 1
        if any(not 0 <= tap < limit for tap in taps):
            raise EngineStops("target_layer_ids", f"lists layers outside 0..{limit - 1}")
    return taps


def _check_taps(taps: list[int], num_taps: int, found: Mapping[str, Any], subject: Subject) -> None:
    """Require as many captured layers as fc.weight reads."""
    check_captured(taps, found["hidden_size"], subject)
    depth = subject.num_target_layers
    is_lost = subject.target is not None and subject.target.model_type in NO_LAST_LAYER and depth == max(taps) + 1
    if len(set(taps)) < num_taps or is_lost:
        raise EngineStops("target_layer_ids", f"{taps}: SGLang captures fewer layers than the draft reads")


def _check_model(found: Mapping[str, Any]) -> None:
    """Require what SGLang builds the draft's modules from."""
    check_rope(found["rope_parameters"], "factor")
    real("partial_rotary_factor", found.get("partial_rotary_factor", 1.0))
    if found["max_position_embeddings"] < 0:
        raise EngineStops("max_position_embeddings", "negative")
    is_clamped = found["hidden_act"] == "swigluoai" and {"swiglu_alpha", "swiglu_limit"} <= found.keys()
    if found["hidden_act"] != "silu" and not is_clamped:
        raise EngineStops("hidden_act", f"found {found['hidden_act']!r}, expected silu")


def _check_type(config: Mapping[str, Any]) -> None:
    """Require a model type that the DFlash model can read. Source: 0.5.23, run on drafts of each type."""
    if config["model_type"] == "qwen3_5_text":
        raise EngineStops("model_type", "found qwen3_5_text, whose config class gives a rope without a type")
    if config["model_type"] == "minimax" and config.get("layer_types") is None:
        raise EngineStops("layer_types", "missing, and for minimax every second layer is then linear attention")


def _has_own_embedding(config: Mapping[str, Any]) -> bool:
    """Whether the file may be a Nemotron 3.5 draft, which SGLang reads in its own way."""
    return bool(config.get("has_embed_tokens")) and bool(config.get("quantization_config"))
