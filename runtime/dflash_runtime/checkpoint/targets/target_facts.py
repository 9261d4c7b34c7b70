"""Read the facts of a target's config other than its layers: decoder, sizes, experts, quantization. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.targets.layer_kinds import SLIDING, count_listed_layers, read_layer_kinds
from dflash_runtime.checkpoint.targets.recorded_types import own_key
from dflash_runtime.errors import MISSING, InvalidConfig
from dflash_runtime.json_values import as_object, is_int

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of multimodal configs that hold the decoder's config, or another wrapper's config."""

MAX_LAYERS = 10_000
"""The most layers of a target. A larger number is a mistake, and lists with one entry per layer would fill memory."""

HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
DEPTH = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
POSITIONS = ("max_position_embeddings", "model_max_length", "n_positions", "max_seq_len")
WINDOW = ("sliding_window", "sliding_window_size")
PACKING = ("quantization_config", "compression_config")
"""Keys of a config that state how the weights are quantised."""

PACKING_DETAIL = ("quant_algo", "format", "fmt")
"""Keys that refine `quant_method`."""


MLX = "MLX"
MLX_KEYS = ("quantization", "quantization_config")
"""Keys in which MLX states how it packed weights. Unlike other exporters, it names no method."""


def decoder_config(config: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], str | None]:
    """Return the decoder's own config, and the dotted key that holds it, or None if it is not nested.

    Raises:
        InvalidConfig: a key in NESTED holds something other than an object.
    """
    key = next((key for key in NESTED if config.get(key) is not None), None)
    if key is None:
        return config, None
    if not isinstance(config[key], dict):
        raise InvalidConfig(key, config[key], "an object", path=path)
    inner, deeper = decoder_config(config[key], path)
    return inner, key if deeper is None else f"{key}.{deeper}"


def read_depth(text: Mapping[str, Any], path: Path) -> int:
    """Return the number of layers. Some configs state it only by a list of layers."""
    stated, listed = _first(text, _keys(text, DEPTH)), count_listed_layers(text)
    depth = _count("num_hidden_layers", listed if stated is MISSING and listed is not None else stated, path)
    if not 0 < depth <= MAX_LAYERS:
        raise InvalidConfig("num_hidden_layers", depth, f"1 to {MAX_LAYERS} layers", path=path)
    return depth


def read_hidden_size(text: Mapping[str, Any], path: Path) -> int:
    """Return the width of the hidden states, which the config must state."""
    return _count("hidden_size", _first(text, _keys(text, HIDDEN_SIZE)), path)


def read_traits(outer: Mapping[str, Any], text: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of `TargetFacts` that a config may leave out. They are None or empty then.

    Raises:
        InvalidConfig: the list of layers has another length than the number of layers.
    """
    kinds = read_layer_kinds(text, read_depth(text, path), path)
    window = _positive(text, WINDOW)
    return {
        "num_heads": _positive(text, _keys(text, HEADS)),
        "num_kv_heads": _positive(text, ("num_key_value_heads",)),
        "head_dim": _positive(text, ("head_dim",)),
        "layer_kinds": kinds,
        "windows": tuple(window if SLIDING in kind else None for kind in kinds),
        "chunk_size": _positive(text, ("attention_chunk_size",)),
        "max_position_embeddings": _positive(text, _keys(text, POSITIONS)),
        "num_experts": _positive(text, EXPERTS),
        "num_experts_per_token": _positive(text, EXPERTS_PER_TOKEN),
        "quantization": _packing(outer) or _packing(text),
    }


def mlx_bits(config: Mapping[str, Any]) -> int | None:
    """Return the bits of a number packed by MLX, or None if a config does not state MLX's form."""
    for key in MLX_KEYS:
        stated = as_object(config.get(key))
        if is_int(stated.get("bits")) and is_int(stated.get("group_size")) and "quant_method" not in stated:
            return int(stated["bits"])
    return None


def _packing(config: Mapping[str, Any]) -> str | None:
    """Return how a config says its weights are quantised: `fp8`, or `compressed-tensors (pack-quantized)`."""
    if (bits := mlx_bits(config)) is not None:
        return f"{MLX} ({bits} bits)"
    for key in PACKING:
        stated = as_object(config.get(key))
        if stated:
            method = str(stated.get("quant_method") or key)
            detail = next((str(stated[name]) for name in PACKING_DETAIL if isinstance(stated.get(name), str)), method)
            return method if detail == method else f"{method} ({detail})"
    return None


def _keys(text: Mapping[str, Any], common: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys for a number: the common spellings, and the one of the decoder's type in transformers."""
    own = own_key(text, common[0])
    return common if own is None else (*common, own)


def _first(text: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((text[key] for key in keys if text.get(key) is not None), MISSING)


def _positive(text: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """Return the value of the first key that holds a positive integer."""
    return next((text[key] for key in keys if is_int(text.get(key)) and text[key] > 0), None)


def _count(key: str, value: Any, path: Path) -> int:
    if not is_int(value):
        raise InvalidConfig(key, value, "an integer", path=path)
    return value
