"""Keys of a draft's GGUF metadata, and single fields read from them: sizes, windows, taps, rope, carried keys.

Sources: ggml-org/llama.cpp src/models/dflash.cpp at 01b78a15 (the loader), conversion/qwen.py of August 2026 as read
at PrismML-Eng/llama.cpp 85a9ae8c (the converter), gguf 0.19.0 constants.py (names of keys).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_cli.formats.dialect import Json, cannot_state
from dflash_cli.formats.fields import look_up
from dflash_runtime.checkpoint.stored.gguf import shortest, to_float32
from dflash_runtime.checkpoint.targets.hf_config import FULL, SLIDING, read_layer_types
from dflash_runtime.checkpoint.targets.required_fields import require_int
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.errors import MISSING, InvalidConfig, LossyConversion
from dflash_runtime.json_values import as_object, is_int

ARCHITECTURE_KEY = "general.architecture"

OWN = "dflash_cli."
CARRIED = f"{OWN}carried"
"""The keys without a canonical field, as one JSON text in the file."""

WINDOW, PATTERN = "dflash.attention.sliding_window", "dflash.attention.sliding_window_pattern"
SCALING = "dflash.rope.scaling"
TAPS, MASK, CAUSAL = "dflash.target_layers", "tokenizer.ggml.mask_token_id", "dflash.attention.causal"
TOKENS = "tokenizer.ggml.tokens.count"
FILE_TYPE = "general.file_type"
ROTATED, VALUES = "dflash.rope.dimension_count", "dflash.attention.value_length"

SIZES = {
    "num_hidden_layers": "dflash.block_count",
    "hidden_size": "dflash.embedding_length",
    "intermediate_size": "dflash.feed_forward_length",
    "num_attention_heads": "dflash.attention.head_count",
    "num_key_value_heads": "dflash.attention.head_count_kv",
    "head_dim": "dflash.attention.key_length",
    "max_position_embeddings": "dflash.context_length",
    "vocab_size": "dflash.vocab_size",
}
DECODER_NAMES = {
    **SIZES,
    "rms_norm_eps": "dflash.attention.layer_norm_rms_epsilon",
    "rope_theta": "dflash.rope.freq_base",
    "rope_scaling": SCALING,
    "rope_parameters": SCALING,
    "layer_types": PATTERN,
    "sliding_window": WINDOW,
    "use_sliding_window": WINDOW,
    "model_type": f"{OWN}model_type",
    "dtype": f"{OWN}dtype",
}
"""Hugging Face's name of a decoder key -> the key in GGUF."""

ROPE_NAMES = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Parameter of a rope in Hugging Face's configs -> its last part under `dflash.rope.scaling`."""

ROPE_KINDS: Mapping[str, tuple[str, ...]] = {"linear": ("factor",), "yarn": tuple(ROPE_NAMES)}
"""Kind of rope that llama.cpp computes as Hugging Face does -> the parameters that mean the same in both."""

FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
"""Element type -> value of general.file_type."""

READ = frozenset(
    {
        *SIZES.values(), VALUES, "dflash.attention.layer_norm_rms_epsilon",
        "dflash.rope.freq_base", ROTATED, WINDOW, PATTERN, TAPS, CAUSAL, "dflash.block_size",
        f"{SCALING}.type", f"{SCALING}.finetuned", *(f"{SCALING}.{name}" for name in ROPE_NAMES.values()),
    }
)  # fmt: skip
"""Keys under `dflash` that this dialect reads, or that repeat another key."""

UNSERVED = {
    "dflash.hyper_connection_count": "hyper-connections of a DeepSeek V4 draft",
    "dflash.rope.dimension_sections": "rope in sections",
    "dflash.rope.scaling.attn_factor": "a factor of the rotated values",
    "dflash.logit_scale": "a factor of the logits",
    "dflash.final_logit_softcapping": "a cap of the logits",
}
"""Key under `dflash` -> the computation that it asks for. DFlash has none of them."""

FACTORS = ("dflash.rope.scaling.attn_factor", "dflash.logit_scale")
"""Keys of UNSERVED that ask for nothing if they are 1. The others ask for nothing if they are 0."""

PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
"""Sizes that llama.cpp reads as a number or as a list with a number for each layer."""


def decoder_keys(config: Mapping[str, Any]) -> Json:
    """The decoder keys under Hugging Face's names, as llama.cpp reads the metadata."""
    count = look_up(config, "dflash.block_count")
    found = {name: _same_in_all_layers(key, look_up(config, key), count) for name, key in SIZES.items()}
    if found["vocab_size"] is MISSING:
        found["vocab_size"] = look_up(config, TOKENS)
    found["rms_norm_eps"] = look_up(config, DECODER_NAMES["rms_norm_eps"])
    found["rope_theta"] = look_up(config, DECODER_NAMES["rope_theta"])
    found["dtype"] = _dtype(config)
    body = {name: value for name, value in found.items() if value is not MISSING}
    own = {name: look_up(config, f"{OWN}{name}") for name in ("model_type", "hidden_act", "attention_bias")}
    body |= {"model_type": "qwen3"} | {name: value for name, value in own.items() if value is not MISSING}
    rope = _rope_scaling(config)
    return {**body, **_windows(config), **({} if rope is None else {"rope_scaling": rope})}


def unserved_keys(config: Mapping[str, Any]) -> dict[str, str]:
    """The keys that ask for a computation that DFlash does not have, each with its value and the computation."""
    found = {key: look_up(config, key) for key in UNSERVED}
    asked = {
        key: f"{value!r}: {UNSERVED[key]}"
        for key, value in found.items()
        if value not in (MISSING, 1 if key in FACTORS else 0)
    }
    width, rotated = look_up(config, SIZES["head_dim"]), look_up(config, ROTATED)
    if MISSING not in (rotated, width) and rotated != width:
        asked[ROTATED] = f"{rotated!r}: rope on a part of the {width} dimensions of a head"
    kind = look_up(config, f"{SCALING}.type")
    if kind not in (MISSING, "none", *ROPE_KINDS):
        asked[f"{SCALING}.type"] = f"{kind!r}: a rope that dflash does not read from GGUF"
    return asked


def _same_in_all_layers(key: str, stated: Any, num_layers: Any) -> Any:
    """The size that a list gives every layer; another value stays as it is."""
    is_uniform = isinstance(stated, list) and len(stated) == num_layers and len(set(map(repr, stated))) == 1
    return stated[0] if is_uniform and key.removeprefix("dflash.") in PER_LAYER else stated


def _dtype(config: Mapping[str, Any]) -> Any:
    """The element type that the file states for its matrices; MISSING for a quantised type."""
    stated = look_up(config, f"{OWN}dtype")
    number = look_up(config, FILE_TYPE)
    by_number = {value: name for name, value in FILE_TYPES.items()}
    return by_number.get(number, MISSING) if stated is MISSING and is_int(number) else stated


def _windows(config: Mapping[str, Any]) -> Json:
    """The decoder keys of the windows. Without a window every layer has full attention."""
    window, pattern, count = look_up(config, WINDOW), look_up(config, PATTERN), look_up(config, "dflash.block_count")
    if window in (MISSING, 0) or not isinstance(pattern, list):
        return {"layer_types": [FULL] * min(count, 10_000)} if is_int(count) and count > 0 else {}
    kinds = [SLIDING if item is True or item == 1 else FULL for item in pattern]
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}


def check_windows(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a window without the list of its layers, and such a list without a window.

    Raises:
        InvalidConfig: the key that is missing or wrong.
    """
    window, pattern = look_up(config, WINDOW), look_up(config, PATTERN)
    has_window = window not in (MISSING, 0)
    if has_window and not isinstance(pattern, list):
        raise InvalidConfig(PATTERN, pattern, "true or false for each layer, because a window is stated", path=path)
    if not has_window and isinstance(pattern, list) and any(item is True or item == 1 for item in pattern):
        raise InvalidConfig(WINDOW, window, "the window of the layers that slide", path=path)


def read_windows(body: Mapping[str, Any], num_layers: int, path: Path) -> tuple[int | None, ...]:
    kinds = read_layer_types(body, num_layers, path)
    window = require_int(body, "sliding_window", path) if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_integer(config: Mapping[str, Any], key: str, path: Path) -> int:
    return require_int({key: look_up(config, key)}, key, path)


def read_taps(config: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """The tapped layers as outputs numbered from 0."""
    found = look_up(config, TAPS)
    if not isinstance(found, list) or not found or not all(is_int(item) for item in found):
        raise InvalidConfig(TAPS, found, "a list of layers", path=path)
    if min(found) < 1:
        expected = "layers of 1 or more: llama.cpp taps the input of a layer, the output of the one before it"
        raise InvalidConfig(TAPS, found, expected, path=path)
    return tuple(item - 1 for item in found)


def _rope_scaling(config: Mapping[str, Any]) -> Json | None:
    """The rope_scaling object that says the same, None for a plain rope."""
    stated = as_object(look_up(config, SCALING))
    kind = stated.get("type")
    if not isinstance(kind, str) or kind == "none":
        return None
    return {"rope_type": kind} | {name: stated[key] for name, key in ROPE_NAMES.items() if key in stated}


def write_rope(rope: RopeConfig, dialect: str) -> Json:
    """The keys under `dflash.rope.scaling`.

    Raises:
        LossyConversion: llama.cpp has no such rope, or computes a parameter in another way.
    """
    if rope.kind == "default" and not rope.params:
        return {}
    known = ROPE_KINDS.get(rope.kind)
    strange = None if known is None else next((name for name in rope.params if name not in known), None)
    if known is None or strange is not None:
        raise cannot_state("rope_scaling", {"rope_type": rope.kind, **rope.params}, dialect)
    for name, value in rope.params.items():
        check_float32(name, value)
    length = "original_max_position_embeddings"
    return {"type": rope.kind} | {
        ROPE_NAMES[name]: value if name == length else float(value) for name, value in rope.params.items()
    }


def check_float32(field: str, value: float) -> None:
    """Refuse a number that GGUF would round. A decimal fraction such as 1e-6 reads back as it is.

    Raises:
        LossyConversion: the number has more digits than 32 bits hold.
    """
    stored = to_float32(float(value))
    if stored is None or shortest(stored) != value:
        text = f"{field} {value}: GGUF holds it in 32 bits, as {stored}"
        raise LossyConversion(text, id="number-rounded", field=field, found=value)


def read_carried(config: Mapping[str, Any]) -> Json:
    """The keys that a conversion to GGUF carried along, under their names before it."""
    stored = as_object(look_up(config, CARRIED))
    nested = as_object(stored.get("dflash_config"))
    plain = {key: value for key, value in stored.items() if key != "dflash_config"}
    return {**plain, **{f"dflash_config.{key}": value for key, value in nested.items()}}


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """The dotted keys under `dflash` that this dialect does not read."""
    found: list[str] = []
    waiting = [("dflash", as_object(config.get("dflash")))]
    while waiting:
        prefix, stated = waiting.pop()
        for name, value in stated.items():
            key = f"{prefix}.{name}"
            if isinstance(value, dict) and set(value) != {"count"}:
                waiting.append((key, value))
            elif key not in READ and key not in UNSERVED:
                found.append(key)
    return sorted([*found, *(key for key in config if key.startswith("dflash."))])
