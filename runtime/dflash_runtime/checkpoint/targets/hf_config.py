"""Read the decoder fields that every Hugging Face style config shares: sizes and windows.

`rope_fields.py` reads the rope.

A field is read in every published spelling. Two spellings with different values are an error. A library's class
defaults never fill in a value: they differ between readers, which is how drafts break in silence.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.targets.experts_config import WITH_EXPERTS, read_experts
from dflash_runtime.checkpoint.targets.recorded_types import has_sizes_elsewhere, is_no_decoder
from dflash_runtime.checkpoint.targets.required_fields import optional, require_int, require_number
from dflash_runtime.checkpoint.targets.rope_fields import read_rope, readable_rope, ropes_by_kind, varies_by_kind
from dflash_runtime.checkpoint.targets.target_facts import decoder_config, read_depth, read_hidden_size, read_traits
from dflash_runtime.errors import MISSING, InvalidConfig, UnsupportedError
from dflash_runtime.json_values import as_object, is_int
from dflash_runtime.target_config import TargetConfig, TargetFacts

FULL = "full_attention"
SLIDING = "sliding_attention"

PER_LAYER = "per_layer_config"
"""Key for the keys that differ between layers: the number of a layer -> its values."""

BODY_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_position_embeddings",
}
"""Published key -> our field, for the sizes that every config must state."""

SLIDE_TOGETHER = ("mistral", "qwen3_moe")
"""Model types in which `sliding_window` applies to every layer: transformers never reads `layer_types`."""

SLIDE_LATER = ("qwen2", "qwen3")
"""Model types in which layers slide from `max_window_layers` on, unless `layer_types` is stated."""

USUAL_WINDOW, USUAL_FIRST_WINDOW = 4096, 28
"""Qwen3Config's defaults of `sliding_window` and `max_window_layers`."""

NO_LAYER_TYPES = ("llama", *SLIDE_TOGETHER)
"""Model types for which transformers ignores `layer_types`, so a stated list must agree with the windows it uses."""

FOREIGN = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "latent attention": ("kv_lora_rank", "q_lora_rank"),
    "chunked attention": ("attention_chunk_size",),
    "linear attention": ("linear_num_value_heads", "linear_conv_kernel_dim", "linear_attn_config"),
    "full attention in some layers only": ("full_attention_interval", "hybrid_layer_pattern"),
    "convolutions": ("conv_L_cache", "full_attn_idxs"),
    "state-space layers": ("mamba_d_state", "ssm_state_size", "hybrid_override_pattern"),
    "another rope for each kind of layer": ("rope_local_base_freq", "swa_rope_theta", "no_rope_layers"),
    "a gated query": ("attn_output_gate",),
    "multipliers": ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    "scaled attention": ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    "layers run in loops": ("num_loops",),
    "partial rope": ("partial_rotary_factor",),
    "layers that differ": (PER_LAYER,),
}
"""Parts of a decoder that `TargetConfig` does not describe -> the keys of published configs that state them."""

SIZES_ELSEWHERE = "target-sizes-elsewhere"
"""Id of the refusal of a type with other keys for the sizes of its decoder."""

NATIVE_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
NATIVE_ROPES = ("default", "linear", "yarn", "llama3", "proportional")
"""The activation and the rope types that native layers compute."""


def read_body(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Read the fields that `DraftConfig` and `TargetConfig` share, by our names.

    Raises:
        InvalidConfig: a size is missing or not an integer, or the rope is missing.
    """
    body: dict[str, Any] = {field: require_int(config, key, path) for key, field in BODY_KEYS.items()}
    body["head_dim"] = _read_head_dim(config, body, path)
    body["rms_norm_eps"] = require_number(config, "rms_norm_eps", path)
    body["rope"] = read_rope(config, path)
    body["hidden_act"] = optional(config, "hidden_act", str, path) or "silu"
    body["attention_bias"] = optional(config, "attention_bias", bool, path) or False
    body["dtype"] = optional(config, "dtype", str, path) or optional(config, "torch_dtype", str, path)
    return body


def read_target_facts(config: Mapping[str, Any], path: Path) -> TargetFacts:
    """Read the facts that any target's config states. `not_known` names the parts that this module does not read.

    Raises:
        InvalidConfig: the width, depth or vocabulary is missing, or the list of layers has another length.
        UnsupportedError: a number is missing or wrong, in a type without a causal language model in transformers, or
            with other keys.
    """
    try:
        return _read_target_facts(config, path)
    except InvalidConfig as fault:
        kind = str(config.get("model_type"))
        if is_no_decoder(config):
            refusal = without_causal_model(kind, path)
        elif has_sizes_elsewhere(config):
            why = "its config states the sizes of its decoder under keys that are not read here"
            refusal = not_run(kind, why, id=SIZES_ELSEWHERE, path=path)
        else:
            raise
        refusal.hint = None  # other commands need these facts too
        raise refusal from fault


def _read_target_facts(config: Mapping[str, Any], path: Path) -> TargetFacts:
    text, _ = decoder_config(config, path)
    facts = common_facts(config, text, path)
    rope, unread = readable_rope(text, path)
    return TargetFacts(
        hidden_size=read_hidden_size(text, path),
        num_layers=read_depth(text, path),
        rope=rope,
        ropes=ropes_by_kind(text, facts["layer_kinds"], rope, path),
        not_known=(*foreign_parts(config, text, path), *unread),
        **facts,
    )


def read_target_config(config: Mapping[str, Any], path: Path) -> TargetConfig:
    """Read the config of a target that the runtime runs over its own pages.

    Raises:
        UnsupportedError: the target has other layers than full and sliding ones, or is part of another model.
        InvalidConfig: a key is missing or wrong.
    """
    text, _ = decoder_config(config, path)
    model_type = str(text.get("model_type", ""))
    has_experts = model_type in WITH_EXPERTS
    foreign = foreign_parts(config, text, path, known=("experts",) if has_experts else ())
    if foreign:
        raise not_run(model_type, *foreign, path=path)
    body = read_body(text, path)
    body["windows"] = _read_target_windows(text, model_type, body["num_layers"], path)
    body["mlp_bias"] = optional(text, "mlp_bias", bool, path) or False
    body["experts"] = read_experts(text, body["num_layers"], path) if has_experts else None
    return TargetConfig(**{**common_facts(config, text, path), **body})


def refuse_other_layers(config: TargetConfig, path: Path) -> None:
    """Refuse a config that native layers would not compute, before any weight is read.

    Raises:
        UnsupportedError: another activation or rope type, or an odd head size.
    """
    is_known = config.hidden_act in _native_activations(config)
    reasons = [] if is_known else [f"the activation {config.hidden_act} (hidden_act)"]
    ropes = (config.rope, *config.ropes.values())
    reasons += [f"rope type {kind}" for kind in sorted({rope.kind for rope in ropes} - {*NATIVE_ROPES})]
    sizes = sorted({size for _, size in config.kv_shapes if size % 2})
    reasons += [f"an odd head size (head_dim {size})" for size in sizes]
    if reasons:
        raise not_run(config.model_type, *reasons, path=path)


def _native_activations(config: TargetConfig) -> tuple[str, ...]:
    """The activations that native layers compute. Convolutions and experts in FP8 compute silu alone."""
    is_fp8 = config.experts is not None and config.experts.clamp is None and config.quantization is not None
    return ("silu",) if config.recurrence is not None or is_fp8 else NATIVE_ACTIVATIONS


def not_run(model_type: str, *reasons: str, id: str = "target-not-run", path: Path | None = None) -> UnsupportedError:
    """Return the refusal to run a target that engines may still serve. `path` is its config.json."""
    return UnsupportedError(
        f"this runtime does not run {model_type or 'unnamed'} targets: {', '.join(reasons)}",
        id=id,
        path=None if path is None else path.parent,
        field="model_type",
        found=model_type,
        hint="dflash validate and dflash serve-command work for it; measure acceptance in the engine that serves it",
    )


def without_causal_model(kind: str, path: Path) -> UnsupportedError:
    """Return the refusal of a model type that has no decoder for a draft, such as an encoder of images."""
    why = "transformers does not have a causal language model of this type"
    return not_run(kind, why, id="target-without-causal-model", path=path)


def common_facts(outer: Mapping[str, Any], text: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Read the fields that every kind of target states in the same way."""
    dtype = optional(text, "dtype", str, path) or optional(text, "torch_dtype", str, path)
    size = text if text.get("vocab_size") is not None else outer
    kinds = [optional(item, "model_type", str, path) for item in (text, outer)]
    return {
        "model_type": kinds[0] or kinds[1] or "",
        "vocab_size": require_int(size, "vocab_size", path),
        "tie_word_embeddings": bool(outer.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        "eos_token_ids": read_token_ids(outer.get("eos_token_id", text.get("eos_token_id"))),
        "dtype": dtype or outer.get("dtype") or outer.get("torch_dtype"),
        "nested_in": decoder_config(outer, path)[1],
        **read_traits(outer, text, path),
    }


def foreign_parts(
    outer: Mapping[str, Any], text: Mapping[str, Any], path: Path, known: Sequence[str] = ()
) -> tuple[str, ...]:
    """Name each part of a target that is more than dense attention with one rope in a text model."""
    nested_in = decoder_config(outer, path)[1]
    kinds = text.get("layer_types")
    foreign = {str(kind) for kind in kinds} - {FULL, SLIDING} if isinstance(kinds, list) else set()
    is_part = nested_in is not None and "multimodal" not in known
    parts = [f"part of a multimodal model ({nested_in})"] if is_part else []
    kinds_in_words = f"layer_types {', '.join(sorted(foreign))}"
    parts += [kinds_in_words] if foreign and kinds_in_words not in known else []
    rope = as_object(text.get("rope_parameters"))
    for words, keys in FOREIGN.items():
        stated = next((key for key in keys if _says_something(text.get(key, rope.get(key)))), None)
        if stated is not None and words not in known:
            parts.append(f"{words} ({stated})")
    if any(varies_by_kind(text.get(key)) for key in ("rope_parameters", "rope_scaling")):
        parts.append("another rope for each kind of layer (rope_parameters)")
    return tuple(parts)


def _says_something(value: Any) -> bool:
    """Whether a key's value changes the model: a factor, share or count of one does not."""
    return value is True or (bool(value) and value != 1)


def read_layer_types(config: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...]:
    """Return `layer_types`, or the kinds that transformers' config class gives the layers if the key is absent."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return usual_layer_types(config, num_layers)
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        found = len(layer_types) if isinstance(layer_types, list) else layer_types
        raise InvalidConfig("layer_types", found, f"a list of {num_layers} entries", path=path)
    for kind in layer_types:
        if kind not in (FULL, SLIDING):
            raise InvalidConfig("layer_types", kind, f"{FULL} or {SLIDING}", path=path)
    return tuple(layer_types)


def usual_layer_types(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Return the kinds of layers that transformers' Qwen3Config gives a draft that states none.

    Layers slide from `max_window_layers` on. z-lab's loader reads drafts of every model type with this class.
    Source: transformers 5.23.0 models/qwen3/configuration_qwen3.py; z-lab 0.1.0, run.
    """
    is_on = config.get("use_sliding_window") is True and config.get("sliding_window", USUAL_WINDOW) is not None
    first = config.get("max_window_layers", USUAL_FIRST_WINDOW)
    slides = is_on and is_int(first)
    return tuple(SLIDING if slides and layer >= first else FULL for layer in range(num_layers))


def read_windows(config: Mapping[str, Any], num_layers: int, path: Path) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None for full attention.

    A sliding layer without an effective window is an error. With `use_sliding_window: false` some readers drop the
    window and others refuse the config.
    """
    layer_types = read_layer_types(config, num_layers, path)
    if SLIDING not in layer_types:
        return (None,) * num_layers
    window = config.get("sliding_window", USUAL_WINDOW if config.get("layer_types") is None else None)
    if not is_int(window) or window < 1:
        raise InvalidConfig("sliding_window", window, "a positive integer for the sliding layers", path=path)
    if config.get("use_sliding_window") is False:
        raise InvalidConfig("use_sliding_window", False, "true, since layer_types has sliding layers", path=path)
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _read_target_windows(
    config: Mapping[str, Any], model_type: str, num_layers: int, path: Path
) -> tuple[int | None, ...]:
    """Return the window that transformers gives each layer of a target, which depends on the model type.

    Raises:
        UnsupportedError: `layer_types` contradicts the windows of a model type for which transformers ignores the key.
    """
    usual = _usual_layer_types(config, model_type, num_layers, path)
    if config.get("layer_types") is None:
        return read_windows({**config, "layer_types": usual}, num_layers, path)
    if model_type in NO_LAYER_TYPES and list(read_layer_types(config, num_layers, path)) != usual:
        raise not_run(
            model_type,
            "its layer_types contradict its windows, and transformers ignores layer_types for this model type",
            id="layer-types-ignored",
            path=path,
        )
    return read_windows(config, num_layers, path)


def _usual_layer_types(config: Mapping[str, Any], model_type: str, num_layers: int, path: Path) -> list[str]:
    """Return the layer types that follow from the other keys of a config."""
    is_on = model_type == "mistral" or config.get("use_sliding_window") is True
    if not is_on or model_type not in (*SLIDE_TOGETHER, *SLIDE_LATER) or config.get("sliding_window") is None:
        return [FULL] * num_layers
    first = require_int(config, "max_window_layers", path) if model_type in SLIDE_LATER else 0
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def read_token_ids(value: Any) -> tuple[int, ...]:
    """Return one id, a list of ids or None as a tuple of ids."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(item for item in ids if is_int(item))


def _read_head_dim(config: Mapping[str, Any], body: Mapping[str, Any], path: Path) -> int:
    if config.get("head_dim") is not None:
        return require_int(config, "head_dim", path)
    if body["num_heads"] < 1 or body["hidden_size"] % body["num_heads"]:
        raise InvalidConfig("head_dim", MISSING, "an integer, since heads do not divide hidden_size", path=path)
    return int(body["hidden_size"] // body["num_heads"])
