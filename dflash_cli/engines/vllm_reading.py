"""The values that each release of vLLM reads from a native config.

Source: the code of each release from 0.24.0 to 0.33.0, in model_executor/models/qwen3_dflash.py,
v1/worker/gpu/spec_decode/utils.py, eagle/eagle3_utils.py and dflash/; run on the configs of
tests/golden/engine_verdicts.json.
"""

from collections.abc import Mapping
from typing import Any

from dflash_cli.engines.config_class import LEGACY_KINDS, EngineStops
from dflash_cli.engines.engine_reading import (
    EngineReading,
    causal_of,
    check_architecture,
    check_captured,
    check_mask,
    check_rope,
    check_shapes,
    resolve_auto,
    whole,
)
from dflash_cli.engines.family_reading import read_logits
from dflash_cli.engines.packed_weights import is_packed
from dflash_cli.engines.partial_loads import partial_loads
from dflash_cli.engines.serving_engine import Release
from dflash_cli.engines.vllm_packing import load_packing
from dflash_cli.engines.vllm_settings import check_head, settings_of
from dflash_cli.formats.fields import AUX_KEY
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_runtime.checkpoint.layout import CONFIDENCE
from dflash_runtime.checkpoint.targets.hf_config import SLIDING
from dflash_runtime.json_values import is_int, is_number

READS_OUTER_KEYS: Release = (0, 25)
"""The first release that reads target_layer_ids and mask_token_id at the top level."""
READS_WINDOWS: Release = (0, 25)
"""The first release with windows, attention sinks and mask_embedding.pt (vllm-project/vllm#46104), but without mixed
layers.
"""
READS_KINDS: Release = (0, 26)
"""The first release with causality by kind of layer, with mixed layers, and with the speculators flag, which it applies
to every layer (vllm-project/vllm#47745). Earlier releases read one flag, dflash_config.causal, false if absent.
"""
COUNTS_CAPTURED: Release = (0, 27)
"""The first release that sizes fc.weight by the captured layers. Earlier releases count dflash_config.target_layer_ids
and take target_hidden_size as it is. This is also the first release that refuses sample_from_anchor.
"""
READS_IS_CAUSAL: Release = (0, 28)
"""The first release that reads is_causal, which it prefers to dflash_config.causal, and encoder names of tensors."""
READS_ROPE_STYLE: Release = (0, 29)
"""The first release that reads is_neox_style. 0.28 uses the target's rope style."""
SCALES_VALUES: Release = (0, 31)
"""The first release that reads dflash_config.attention_value_scale."""
READS_PACKED: Release = (0, 33)
"""The first release with a recording of packed weights."""
MIXED_BY_DEFAULT = ("gemma2",)
"""Model types outside the modelled classes that have both kinds of layers if no key states them."""
OLDER_TRANSFORMERS: Release = (0, 31)
"""The one release that needs transformers before 5.18, which does not know the older names of kinds of layers."""
DRAFTS_OF_TARGETS: Mapping[Release, frozenset[str]] = {
    (0, 24): frozenset(
        {
            "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_mtp", "pangu_ultra_moe", "ernie4_5_moe",
            "qwen3_next", "exaone_moe", "qwen3_5", "qwen3_5_moe", "intern_s2_preview", "longcat_flash",
        }
    ),
    (0, 28): frozenset({"qwen3_5_text", "qwen3_5_moe_text", "kimi_k3"}),
    (0, 30): frozenset({"qwen4_exp", "qwen4_exp_text"}),
}  # fmt: skip
"""First release -> model types that it reads as the MTP layers of a target. It stops at such a draft.
Source: config/speculative.py hf_config_override of each release.
"""
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def read_native(subject: Subject, release: Release) -> EngineReading | None:
    """The values of vLLM's config and model; None for a config class that is not modelled.

    Raises:
        EngineStops: the key at which the release stops.
    """
    config, nested = subject.config, subject.config.get("dflash_config", {}) or {}
    if not isinstance(nested, dict) or config.get("dflash_config", {}) is None:
        raise EngineStops("dflash_config", f"found {config['dflash_config']!r}, expected an object")
    if subject.format.architecture is not None:  # S34 reports the models of other families
        check_architecture(config, subject.format.architecture)
    _check_type(config.get("model_type"), release)
    found = resolve_auto(config)
    _check_kinds(config, release)
    if found is None:
        return None
    aux, mask = _captured(config, nested, subject, release), read_mask(config, nested, release)
    stated = config.get("is_causal") if release >= READS_IS_CAUSAL else None
    return read_model(subject, release, config, found, {**nested, "is_causal": stated}, aux, mask)


def _check_type(model_type: Any, release: Release) -> None:
    """Require a model type that vLLM reads a draft of."""
    types = [types for first, types in DRAFTS_OF_TARGETS.items() if release >= first]
    if isinstance(model_type, str) and any(model_type in item for item in types):
        raise EngineStops("model_type", f"found {model_type}, which vLLM takes for the MTP layers of such a target")


def _check_kinds(config: Mapping[str, Any], release: Release) -> None:
    """Require kinds of layers that the release and its transformers know: 0.31 needs one before 5.18."""
    kinds, mixes = config.get("layer_types"), config.get("model_type") in MIXED_BY_DEFAULT
    if kinds is None and mixes and READS_WINDOWS <= release < READS_KINDS and config.get("num_hidden_layers") != 1:
        raise EngineStops("layer_types", "missing, and this model type then mixes sliding and full layers")
    listed = kinds if isinstance(kinds, list) else []
    old = next((item for item in listed if isinstance(item, str) and item in LEGACY_KINDS), None)
    if old is not None and release[:2] == OLDER_TRANSFORMERS:
        raise EngineStops("layer_types", f"found {old!r}, which transformers before 5.18 does not know")


def read_model(
    subject: Subject,
    release: Release,
    config: Mapping[str, Any],
    found: dict[str, Any],
    nested: Mapping[str, Any],
    aux: list[int],
    mask: int,
) -> EngineReading:
    """The values of vLLM's model.

    config  the keys as the file states them
    found   the keys as the config class fills them in
    nested  dflash_config, and `is_causal` if the release reads that key
    aux     the captured layers, counted from 1
    mask    the mask token's id

    Raises:
        EngineStops: the key at which the release stops.
    """
    _check_model(config, found, nested, release)
    if subject.format.family == "dspark":
        check_head(subject)
    own, parts = settings_of(subject.format.family, config, found, nested, release)
    width = found.get("target_hidden_size", found["hidden_size"])
    if release >= COUNTS_CAPTURED:
        width = width or found["hidden_size"]
    if release < READS_KINDS:
        _check_biases(found, subject)
    packed = load_packing(subject, found, len(aux)) if release >= READS_PACKED and is_packed(subject) else None
    cut = partial_loads(found, subject).cut if packed is None else ()
    if packed is None and found["intermediate_size"] and found["num_attention_heads"]:
        check_shapes(found, len(aux), subject, resized=cut, target_hidden_size=width, **parts)
    check_captured([layer - 1 for layer in aux], width, subject)
    check_mask(mask, subject)
    sinks = nested.get("attention_sink_bias", config.get("add_swa_attention_sink_bias", False))
    return EngineReading(
        windows=_windows(found, nested, release),
        causal=_causal(nested, found, release),
        taps=tuple(sorted(layer - 1 for layer in aux)),
        packed=packed.faults if packed is not None else (),
        mask_token_id=mask,
        rope=found["rope_parameters"],
        eps=found["rms_norm_eps"],
        neox=release < READS_ROPE_STYLE or bool(config.get("is_neox_style", True)),
        sinks=release >= READS_WINDOWS and bool(sinks),
        value_scale=nested.get("attention_value_scale") if release >= SCALES_VALUES else None,
        logit_scale=config.get("logit_scale", 1.0),
        cut=cut,
        own=own,
        **(read_logits(nested) if subject.format.family == "dflash2" else {}),
    )


def _check_biases(found: Mapping[str, Any], subject: Subject) -> None:
    """Require no bias that the model lacks. Later releases pass over such a bias, this one over a confidence head's.

    Source: 0.25.0 qwen3_dflash.py load_weights, which looks every name up among the parameters; qwen3_dspark.py:173.
    """
    biases = (item for item in subject.tensors or () if item.endswith(".bias"))
    name = next((item for item in biases if not item.startswith(CONFIDENCE)), None)
    if name is not None and not found["attention_bias"]:
        raise EngineStops(f"{WEIGHTS}:{name}", "the model has no biases, and this release stops at one")


def _captured(config: Mapping[str, Any], nested: Mapping[str, Any], subject: Subject, release: Release) -> list[int]:
    """The layers that vLLM captures, counted from 1, in the order of the file."""
    key, taps = AUX_KEY, config.get(AUX_KEY)
    if not taps:
        key, taps = "target_layer_ids", nested.get("target_layer_ids")
        if not taps and release >= READS_OUTER_KEYS:
            stated = (item.value for item in subject.stated.statements("target_layer_ids"))
            taps = next((value for value in stated if value), None)
    offset = 0 if key == AUX_KEY else 1
    if not isinstance(taps, list) or not taps or not all(is_number(tap) and tap == int(tap) for tap in taps):
        raise EngineStops(key, f"found {taps!r}, expected a list of integers")
    aux = [int(tap) + offset for tap in taps]
    if min(aux) < 0 or len(set(aux)) < len(aux):
        raise EngineStops(key, f"{taps}: vLLM captures fewer layers than fc.weight reads")
    if release < COUNTS_CAPTURED:
        _check_count(config, nested, aux)
    return aux


def _check_count(config: Mapping[str, Any], nested: Mapping[str, Any], aux: list[int]) -> None:
    """Require as many captured layers as dflash_config.target_layer_ids lists, or as the draft has layers."""
    if "target_layer_ids" not in nested:
        counted = config.get("num_hidden_layers")
    else:
        listed = nested["target_layer_ids"]
        counted = len(listed) if isinstance(listed, list | str) else None
    if counted != len(aux):
        why = f"this release sizes fc.weight for {counted} layers and captures {len(aux)}"
        raise EngineStops("dflash_config.target_layer_ids", why)


def read_mask(config: Mapping[str, Any], nested: Mapping[str, Any], release: Release) -> int:
    """The mask token's id, from the first key that vLLM finds."""
    if "mask_token_id" in nested:
        return whole("dflash_config.mask_token_id", nested["mask_token_id"])
    keys = MASK_KEYS if release >= READS_OUTER_KEYS else MASK_KEYS[2:]
    named = {key: config[key] for key in keys if key in config}
    if named.get("mask_token_id", 0) is None:
        del named["mask_token_id"]
    if not named:
        raise EngineStops("mask_token_id", "missing")
    return whole(*next(iter(named.items())))


def _windows(found: Mapping[str, Any], nested: Mapping[str, Any], release: Release) -> tuple[int | None, ...]:
    """The window of each layer. use_swa gives a window to every layer of a draft without sliding layers."""
    kinds = found["layer_types"]
    if release < READS_WINDOWS:
        return (None,) * len(kinds)
    if release < READS_KINDS and 0 < kinds.count(SLIDING) < len(kinds):
        raise EngineStops("layer_types", "both sliding and full layers, which this release refuses")
    everywhere = bool(nested.get("use_swa", False)) and SLIDING not in kinds
    window = nested.get("swa_window_size", found["sliding_window"] or None)
    if window is None and (everywhere or SLIDING in kinds):
        raise EngineStops("sliding_window", "missing or switched off, although a layer is sliding")
    return tuple(window if everywhere or kind == SLIDING else None for kind in kinds)


def _causal(nested: Mapping[str, Any], found: Mapping[str, Any], release: Release) -> tuple[bool, ...]:
    """The causality of each layer."""
    if release < READS_KINDS:
        return (bool(nested.get("causal", False)),) * len(found["layer_types"])
    outer = nested["is_causal"]
    return causal_of(nested.get("causal") if outer is None else outer, found)


def _check_model(config: Mapping[str, Any], found: dict[str, Any], nested: Mapping[str, Any], release: Release) -> None:
    """Require what vLLM builds the draft's modules from. The rope gets vLLM's names of its types."""
    _check_rope(config, found)
    if release >= COUNTS_CAPTURED and nested.get("sample_from_anchor"):
        raise EngineStops("dflash_config.sample_from_anchor", "true, and vLLM refuses it there")
    if found["hidden_act"] != "silu":
        raise EngineStops("hidden_act", f"found {found['hidden_act']!r}, expected silu")
    for key in ("draft_vocab_size", "target_hidden_size"):
        may_be_null = key == "draft_vocab_size" or release >= COUNTS_CAPTURED
        if key in found and not (is_int(found[key]) or (found[key] is None and may_be_null)):
            raise EngineStops(key, f"found {found[key]!r}, expected an integer")
    for key in ("max_position_embeddings", "vocab_size"):
        if found[key] < (1 if key == "max_position_embeddings" else 0):
            raise EngineStops(key, f"found {found[key]}")


def _check_rope(config: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Require a rope that vLLM's DFlash model computes, and give it vLLM's name of its type."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if "type" in rope and "rope_type" in rope and rope["type"] != rope["rope_type"]:
        raise EngineStops("rope_scaling.type", f"{rope['type']!r}, but rope_type is {rope['rope_type']!r}")
    if found["rope_parameters"]["rope_type"] == "mrope" and "mrope_section" in found["rope_parameters"]:
        found["rope_parameters"] = {**found["rope_parameters"], "rope_type": "default"}
    if found["rope_parameters"]["rope_type"] == "longrope":
        raise EngineStops("rope_scaling.rope_type", "longrope, and vLLM's DFlash model lacks its table of positions")
    check_rope(found["rope_parameters"], "factor", "partial_rotary_factor")
