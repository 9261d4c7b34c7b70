"""Read the decoder fields that every Hugging Face style config shares: sizes, rope, windows.

A field is read in each spelling it is published in, a contradiction between two spellings is an error, and nothing
is filled in by a library's class defaults: those differ between readers, which is how drafts break in silence.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.experts_config import WITH_EXPERTS, read_experts
from dflash_runtime.config import RopeConfig, TargetConfig, TargetFacts
from dflash_runtime.errors import MISSING, InvalidConfig, UnsupportedError
from dflash_runtime.json_values import is_int, is_number

FULL = "full_attention"
SLIDING = "sliding_attention"

BODY_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_position_embeddings",
}
"""Published key -> our field, for the sizes every config must state."""

SLIDE_TOGETHER = ("mistral", "qwen3_moe")
"""Model types whose layers all slide or none does: transformers looks at `sliding_window`, never at `layer_types`."""

SLIDE_LATER = ("qwen2", "qwen3")
"""Model types whose layers slide from `max_window_layers` on, where `layer_types` does not say otherwise."""

NO_LAYER_TYPES = ("llama", *SLIDE_TOGETHER)
"""Model types for which transformers ignores `layer_types`, so that what it says has to agree with what is done."""

FOREIGN = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "latent attention": ("kv_lora_rank", "q_lora_rank"),
    "chunked attention": ("attention_chunk_size",),
    "linear attention": ("linear_num_value_heads", "linear_conv_kernel_dim", "full_attention_interval"),
    "convolutions": ("conv_L_cache", "full_attn_idxs"),
    "state-space layers": ("mamba_d_state", "ssm_state_size", "hybrid_override_pattern"),
    "another rope for each kind of layer": ("rope_local_base_freq", "no_rope_layers"),
    "a gated query": ("attn_output_gate",),
    "multipliers": ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    "scaled attention": ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    "layers run in loops": ("num_loops",),
    "partial rope": ("partial_rotary_factor",),
}
"""What a decoder may be beyond what `TargetConfig` describes -> the keys of published configs that say so."""


def read_body(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The body fields `DraftConfig` and `TargetConfig` share, by our names.

    Raises:
        InvalidConfig: a size that is missing or no positive integer, or a rope that is not stated.
    """
    body: dict[str, Any] = {field: require_int(config, key, path) for key, field in BODY_KEYS.items()}
    body["head_dim"] = _read_head_dim(config, body, path)
    body["rms_norm_eps"] = require_number(config, "rms_norm_eps", path)
    body["rope"] = read_rope(config, path)
    body["hidden_act"] = _optional(config, "hidden_act", str, path) or "silu"
    body["attention_bias"] = _optional(config, "attention_bias", bool, path) or False
    body["dtype"] = _optional(config, "dtype", str, path) or _optional(config, "torch_dtype", str, path)
    return body


def read_target_facts(config: Mapping[str, Any], path: Path) -> TargetFacts:
    """What can be told of any target from its config; what cannot is named in `not_known`.

    Raises:
        InvalidConfig: no width, depth or vocabulary is stated.
    """
    text = _text_config(config, path)
    limit = text.get("max_position_embeddings")
    rope, unread = _readable_rope(text, path)
    return TargetFacts(
        hidden_size=require_int(text, "hidden_size", path),
        num_layers=require_int(text, "num_hidden_layers", path),
        max_position_embeddings=limit if is_int(limit) and limit > 0 else None,
        rope=rope,
        not_known=(*_foreign_parts(text), *unread),
        **_identity(config, text, path),
    )


def read_target_config(config: Mapping[str, Any], path: Path) -> TargetConfig:
    """A target that the runtime runs.

    Raises:
        UnsupportedError: it is no decoder of full and sliding layers.
        InvalidConfig: it is one, and a key is missing or wrong.
    """
    text = _text_config(config, path)
    identity = _identity(config, text, path)
    has_experts = identity["model_type"] in WITH_EXPERTS
    foreign = (*_wrapper(config, text), *_foreign_parts(text, known=("experts",) if has_experts else ()))
    if foreign:
        raise not_run(identity["model_type"], foreign, path)
    body = read_body(text, path)
    body["windows"] = _read_target_windows(text, identity["model_type"], body["num_layers"], path)
    body["mlp_bias"] = _optional(text, "mlp_bias", bool, path) or False
    body["experts"] = read_experts(text, body["num_layers"], path) if has_experts else None
    return TargetConfig(**{**identity, **body})


def not_run(model_type: str, reasons: Sequence[str], path: Path) -> UnsupportedError:
    """The refusal to run a target that engines may serve; `path` is that of its config."""
    why = f": {', '.join(reasons)}" if reasons else ""
    return UnsupportedError(
        f"{path.parent}: this runtime does not run {model_type or 'unnamed'} targets{why}",
        hint="dflash validate and dflash serve-command work for it; measure acceptance in the engine that serves it",
    )


def _text_config(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The decoder's config, which a multimodal wrapper nests."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise InvalidConfig("text_config", text, "an object", path=path)
    return text


def _wrapper(outer: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, ...]:
    """The model around a decoder, whose other parts and names of tensors are not known here."""
    return ("part of a multimodal model (text_config)",) if outer is not text else ()


def _identity(outer: Mapping[str, Any], text: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields that do not depend on what the layers are."""
    dtype = _optional(text, "dtype", str, path) or _optional(text, "torch_dtype", str, path)
    return {
        "model_type": str(text.get("model_type", outer.get("model_type", ""))),
        "vocab_size": require_int(text, "vocab_size", path),
        "tie_word_embeddings": bool(outer.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        "eos_token_ids": read_token_ids(outer.get("eos_token_id", text.get("eos_token_id"))),
        "dtype": dtype or outer.get("dtype") or outer.get("torch_dtype"),
    }


def _foreign_parts(text: Mapping[str, Any], known: Sequence[str] = ()) -> tuple[str, ...]:
    """What the config says of layers that are no dense attention with one rope, each in a few words."""
    kinds = text.get("layer_types")
    foreign = {str(kind) for kind in kinds} - {FULL, SLIDING} if isinstance(kinds, list) else set()
    parts = [f"layer_types {', '.join(sorted(foreign))}"] if foreign else []
    for words, keys in FOREIGN.items():
        stated = next((key for key in keys if _says_something(text.get(key))), None)
        if stated is not None and words not in known:
            parts.append(f"{words} ({stated})")
    if any(_varies_by_kind(text.get(key)) for key in ("rope_parameters", "rope_scaling")):
        parts.append("another rope for each kind of layer (rope_parameters)")
    return tuple(parts)


def _says_something(value: Any) -> bool:
    """Whether a key's value is more than absence; a factor, a share or a count of one changes nothing."""
    return value is True or (bool(value) and value != 1)


def _varies_by_kind(rope: Any) -> bool:
    """Whether rope parameters are nested by layer type and differ."""
    nested = [item for item in rope.values() if isinstance(item, dict)] if isinstance(rope, dict) else []
    return any(item != nested[0] for item in nested)


def _readable_rope(text: Mapping[str, Any], path: Path) -> tuple[RopeConfig | None, tuple[str, ...]]:
    """The one rope of a target, and what is not known of it otherwise."""
    if any(_varies_by_kind(text.get(key)) for key in ("rope_parameters", "rope_scaling")):
        return None, ()
    try:
        return read_rope(text, path), ()
    except InvalidConfig:
        return None, ("rope",)


def read_rope(config: Mapping[str, Any], path: Path) -> RopeConfig:
    """Rope from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

    A missing theta is an error: readers default to 10,000 or to 1,000,000.
    """
    modern, legacy = config.get("rope_parameters"), config.get("rope_scaling")
    modern = _one_rope(modern, "rope_parameters", path) if modern else {}
    legacy = _one_rope(legacy, "rope_scaling", path) if legacy else {}
    thetas = {
        key: float(_number(value, key, path))
        for key, value in (
            ("rope_theta", config.get("rope_theta")),
            ("rope_parameters.rope_theta", modern.get("rope_theta")),
            ("rope_scaling.rope_theta", legacy.get("rope_theta")),
        )
        if value is not None
    }
    if not thetas:
        raise InvalidConfig("rope_theta", MISSING, "a number, here or in rope_parameters", path=path)
    if len(set(thetas.values())) > 1:
        raise InvalidConfig("rope_theta", thetas, "one value in every spelling", path=path)
    kinds = {
        str(source[key]) for source in (modern, legacy) for key in ("rope_type", "type") if source.get(key) is not None
    }
    if len(kinds) > 1:
        raise InvalidConfig("rope_type", sorted(kinds), "one type in every spelling", path=path)
    params = _merge_rope(legacy, modern, path)
    return RopeConfig(theta=next(iter(thetas.values())), kind=kinds.pop() if kinds else "default", params=params)


def rope_parameters(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What one spelling states beyond theta and type; a null states nothing."""
    return {
        key: value
        for key, value in rope.items()
        if key not in ("rope_theta", "rope_type", "type") and value is not None
    }


def read_layer_types(config: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...]:
    """`layer_types`, or all full where the key is absent."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return (FULL,) * num_layers
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        found = len(layer_types) if isinstance(layer_types, list) else layer_types
        raise InvalidConfig("layer_types", found, f"a list of {num_layers} entries", path=path)
    for kind in layer_types:
        if kind not in (FULL, SLIDING):
            raise InvalidConfig("layer_types", kind, f"{FULL} or {SLIDING}", path=path)
    return tuple(layer_types)


def read_windows(config: Mapping[str, Any], num_layers: int, path: Path) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for full attention.

    A sliding layer with no window that takes effect is an error: `use_sliding_window: false` makes some readers drop
    the window and others refuse.
    """
    layer_types = read_layer_types(config, num_layers, path)
    if SLIDING not in layer_types:
        return (None,) * num_layers
    window = config.get("sliding_window")
    if not is_int(window) or window < 1:
        raise InvalidConfig("sliding_window", window, "a positive integer for the sliding layers", path=path)
    if config.get("use_sliding_window") is False:
        raise InvalidConfig("use_sliding_window", False, "true, since layer_types has sliding layers", path=path)
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _read_target_windows(
    config: Mapping[str, Any], model_type: str, num_layers: int, path: Path
) -> tuple[int | None, ...]:
    """The windows that transformers gives the layers of a target, which depends on its model type.

    Raises:
        UnsupportedError: `layer_types` of a model type that has none, so that readers differ.
    """
    usual = _usual_layer_types(config, model_type, num_layers, path)
    if config.get("layer_types") is None:
        return read_windows({**config, "layer_types": usual}, num_layers, path)
    if model_type in NO_LAYER_TYPES and list(read_layer_types(config, num_layers, path)) != usual:
        raise not_run(model_type, ("layer_types unlike those of its kind, which transformers ignores",), path)
    return read_windows(config, num_layers, path)


def _usual_layer_types(config: Mapping[str, Any], model_type: str, num_layers: int, path: Path) -> list[str]:
    """Which layers slide by the other keys of a config."""
    is_on = model_type == "mistral" or config.get("use_sliding_window") is True
    if not is_on or model_type not in (*SLIDE_TOGETHER, *SLIDE_LATER) or config.get("sliding_window") is None:
        return [FULL] * num_layers
    first = require_int(config, "max_window_layers", path) if model_type in SLIDE_LATER else 0
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def read_token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of ids, or nothing, as a tuple."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    return tuple(item for item in ids if is_int(item))


def require_int(config: Mapping[str, Any], key: str, path: Path) -> int:
    """An integer that must be stated."""
    value = config.get(key, MISSING)
    if not is_int(value):
        raise InvalidConfig(key, value, "an integer", path=path)
    return value


def require_number(config: Mapping[str, Any], key: str, path: Path) -> float:
    """A number that must be stated."""
    return float(_number(config.get(key, MISSING), key, path))


def _optional(config: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        raise InvalidConfig(key, value, f"a {kind.__name__}", path=path)
    return value


def _number(value: Any, key: str, path: Path) -> float:
    if not is_number(value):
        raise InvalidConfig(key, value, "a number", path=path)
    return value


def _read_head_dim(config: Mapping[str, Any], body: Mapping[str, Any], path: Path) -> int:
    if config.get("head_dim") is not None:
        return require_int(config, "head_dim", path)
    if body["num_heads"] < 1 or body["hidden_size"] % body["num_heads"]:
        raise InvalidConfig("head_dim", MISSING, "an integer, since heads do not divide hidden_size", path=path)
    return int(body["hidden_size"] // body["num_heads"])


def _merge_rope(legacy: Mapping[str, Any], modern: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The parameters of both spellings, which readers do not choose between in the same way."""
    old, new = rope_parameters(legacy), rope_parameters(modern)
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            found = {f"rope_scaling.{key}": old[key], f"rope_parameters.{key}": new[key]}
            raise InvalidConfig(key, found, "one value in every spelling", path=path)
    return {**old, **new}


def _one_rope(value: Any, key: str, path: Path) -> dict[str, Any]:
    """Flatten rope parameters that are nested by layer type, where all types agree."""
    if not isinstance(value, dict):
        raise InvalidConfig(key, value, "an object", path=path)
    nested = [item for item in value.values() if isinstance(item, dict)]
    if not nested or len(nested) != len(value):
        return dict(value)
    if any(item != nested[0] for item in nested):
        raise InvalidConfig(key, value, "the same rope for every layer type", path=path)
    return dict(nested[0])
