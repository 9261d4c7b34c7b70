"""The decoder body, which the dialects describe with Hugging Face's keys: dimensions, rope, windows."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash_cli.formats.dialect import Json, all_formats
from dflash_cli.formats.fields import LOGIT_SCALE, Keys
from dflash_runtime.checkpoint.targets.hf_config import BODY_KEYS as SIZE_KEYS
from dflash_runtime.checkpoint.targets.hf_config import FULL, SLIDING, read_body
from dflash_runtime.checkpoint.targets.required_fields import require_number
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import InvalidConfig, LossyConversion
from dflash_runtime.json_values import as_object, is_int
from dflash_runtime.notices import Notice

BODY_FIELDS: Keys = {
    **{field: (key,) for key, field in SIZE_KEYS.items()},
    **{key: (key,) for key in ("head_dim", "rms_norm_eps", "vocab_size", "hidden_act", "attention_bias", "model_type")},
    LOGIT_SCALE: (LOGIT_SCALE,),
    "rope": ("rope_theta", "rope_scaling", "rope_parameters"),
    "windows": ("layer_types", "sliding_window", "use_sliding_window"),
    "dtype": ("dtype", "torch_dtype"),
}
"""Canonical field -> the keys that state it in a decoder config."""

BODY_KEYS = frozenset(key for keys in BODY_FIELDS.values() for key in keys) | {"tie_word_embeddings"}

NEVER_CARRIED = frozenset({"auto_map", "_name_or_path", "architectures", "is_causal"})
"""Keys that name the origin of a file or code that is not copied, and keys that `write_config` writes anew."""

NESTED = "dflash_config."
"""Prefix of carried keys from the native `dflash_config` object."""

LAYER_KINDS = (FULL, SLIDING)
ROPE_KEYS = ("rope_parameters", "rope_scaling")
"""The objects that state rope; Hugging Face's newer key first."""

STORED_AS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
"""Name of an element type in a config -> its name in safetensors."""

ROPE_KINDS = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3", "ntk", "proportional", "mrope"})


def read_draft_body(body: Mapping[str, Any], path: Path) -> Json:
    """The fields of a draft's decoder keys, by our names.

    Raises:
        InvalidConfig: a key is missing or wrong.
    """
    scale = 1.0 if body.get(LOGIT_SCALE) is None else require_number(body, LOGIT_SCALE, path)
    return {**read_body(body, path), LOGIT_SCALE: scale}


def write_body(config: DraftConfig) -> Json:
    """The decoder keys of a draft, with rope and windows under every key that some reader reads.

    Raises:
        LossyConversion: the layers have windows of different sizes.
    """
    sizes = sorted({window for window in config.windows if window is not None})
    if len(sizes) > 1:
        text = f"windows of sizes {sizes}: a config states one sliding_window for all layers"
        raise LossyConversion(text, id="several-windows", field="sliding_window", found=sizes)
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **_write_rope(config.rope),
        "layer_types": [FULL if window is None else SLIDING for window in config.windows],
        "sliding_window": sizes[0] if sizes else None,
        "use_sliding_window": bool(sizes),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        **({} if config.logit_scale == 1 else {LOGIT_SCALE: config.logit_scale}),
        **({"dtype": config.dtype} if config.dtype is not None else {}),
    }


def partial_rope_notes(config: Mapping[str, Any]) -> list[Notice]:
    """A note if a config asks for rope over a part of each head.

    Trainers copy the key from the target's config, and the draft rotates every dimension, because transformers' Qwen3
    does not read the key. Source: NVIDIA/Model-Optimizer dflash.md; z-lab/dflash#170.
    """
    stated = [
        item.get("partial_rotary_factor") for item in (config, *(as_object(config.get(key)) for key in ROPE_KEYS))
    ]
    found = next((value for value in stated if value not in (None, 1)), None)
    if found is None:
        return []
    text = f"partial_rotary_factor {found} is ignored as the target's: the draft rotates every dimension of a head"
    return [Notice(text, id="partial-rope")]


def carried_keys(config: Mapping[str, Any], consumed: Iterable[str], prefix: str = "") -> Json:
    """The keys of an object that the reader does not consume, with the prefix of their container."""
    skipped = {*consumed, *(NEVER_CARRIED if prefix != NESTED else ())}
    return {prefix + key: value for key, value in config.items() if key not in skipped}


def plain_keys(carried: Mapping[str, Any]) -> Json:
    """The carried keys that belong to the decoder body."""
    prefixes = tuple(item.own_prefix for item in all_formats() if item.own_prefix)
    return {key: value for key, value in carried.items() if not key.startswith(prefixes)}


def prefixed_keys(carried: Mapping[str, Any], prefix: str) -> Json:
    """The carried keys of one container, without its prefix."""
    return {key.removeprefix(prefix): value for key, value in carried.items() if key.startswith(prefix)}


def require_object(value: Any, key: str, path: Path) -> Mapping[str, Any]:
    """The value of a key as a JSON object.

    Raises:
        InvalidConfig: it is not an object.
    """
    if not isinstance(value, dict):
        raise InvalidConfig(key, value, "an object", path=path)
    return value


def layer_list(value: Any, key: str, path: Path) -> tuple[int, ...]:
    """The value of a key as layer numbers.

    Raises:
        InvalidConfig: it is not a list of integers.
    """
    if not isinstance(value, list) or not all(is_int(item) for item in value):
        raise InvalidConfig(key, value, "a list of integers", path=path)
    return tuple(value)


def _write_rope(rope: RopeConfig) -> Json:
    theta = int(rope.theta) if float(rope.theta).is_integer() else rope.theta
    is_plain = rope.kind == "default" and not rope.params
    return {
        "rope_theta": theta,
        "rope_scaling": None if is_plain else {"rope_type": rope.kind, **rope.params},
        "rope_parameters": {"rope_theta": theta, "rope_type": rope.kind, **rope.params},
    }
