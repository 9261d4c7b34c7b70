"""What a target's layers are, in every way that published configs say it. Needs no torch.

A kind that is not known keeps the name that the config gives it: a draft is checked and served all the same.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_runtime.errors import InvalidConfig
from dflash_runtime.json_values import as_object, is_int

Reader = Callable[[Mapping[str, Any], int, Path], tuple[str, ...] | None]

FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"
LATENT = "latent"
LINEAR, CONVOLUTION, MAMBA = "linear", "convolution", "mamba"
FEED_FORWARD = "feed-forward"

KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": LINEAR,
    "conv": CONVOLUTION,
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "moe": FEED_FORWARD,
    "mlp": FEED_FORWARD,
}
"""What configs call a kind of layer -> our word."""

PATTERN = {"*": FULL, "M": MAMBA, "-": FEED_FORWARD, "E": FEED_FORWARD}
"""Letters of hybrid_override_pattern -> our word."""

STATE_KINDS = (LINEAR, CONVOLUTION, MAMBA)
"""Layers that keep a state instead of keys and values: rejected tokens must be taken out of it again."""

LISTS = ("layer_types", "layers_block_type")
"""Keys that name the kind of each layer."""

WINDOWED_FAMILIES = ("mistral", "ministral", "mixtral", "phi3", "starcoder2")
"""Families in which a window that is stated is that of every layer."""


def count_listed_layers(text: Mapping[str, Any]) -> int | None:
    """How many layers a config lists one by one; None if it lists none."""
    for key in (*LISTS, "hybrid_override_pattern"):
        if isinstance(text.get(key), list | str) and text[key]:
            return len(text[key])
    return None


def read_layer_kinds(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...]:
    """The kind of each layer, in our words where there is one; empty where the config does not say.

    Raises:
        InvalidConfig: kinds are listed, and are no words or not one for each layer.
    """
    full = LATENT if is_int(text.get("kv_lora_rank")) else FULL
    for read in READERS:
        kinds = read(text, num_layers, path)
        if kinds is not None:
            return tuple(full if kind == FULL else kind for kind in kinds)
    return (full,) * num_layers if _is_plain(text) else ()


def _listed(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """`layer_types`; layers that only predict further tokens may be listed after those of the model."""
    key = next((key for key in LISTS if text.get(key) is not None), None)
    if key is None:
        return None
    listed, extra = text[key], text.get("num_nextn_predict_layers")
    expected = f"a list of {num_layers} names"
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise InvalidConfig(key, listed, expected, path=path)
    if len(listed) not in (num_layers, num_layers + (extra if is_int(extra) else 0)):
        raise InvalidConfig(key, f"{len(listed)} names", expected, path=path)
    return tuple(KINDS.get(item, str(item)) for item in listed[:num_layers])


def _lettered(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """`hybrid_override_pattern` of Nemotron-H."""
    pattern = text.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern:
        return None
    if len(pattern) != num_layers:
        raise InvalidConfig("hybrid_override_pattern", pattern, f"{num_layers} letters", path=path)
    return tuple(PATTERN.get(letter, str(letter)) for letter in pattern)


def _every(key: str, kind: str) -> Reader:
    """Every n-th layer is full attention, and the others are of one kind."""

    def read(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
        interval = text.get(key)
        if not is_int(interval) or interval < 1:
            return None
        return tuple(kind if (layer + 1) % interval else FULL for layer in range(num_layers))

    return read


def _flagged(key: str, where_set: str, elsewhere: str) -> Reader:
    """A list of 0 and 1, one a layer."""

    def read(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
        flags = text.get(key)
        if not isinstance(flags, list) or not flags:
            return None
        if len(flags) != num_layers:
            raise InvalidConfig(key, f"{len(flags)} values", f"a list of {num_layers} values", path=path)
        return tuple(where_set if flag else elsewhere for flag in flags)

    return read


def _short_convolutions(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """`full_attn_idxs` of LFM2."""
    full = text.get("full_attn_idxs")
    if not isinstance(full, list):
        return None
    return tuple(FULL if layer in full else CONVOLUTION for layer in range(num_layers))


def _delta_attention(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """`linear_attn_config` of Kimi-Linear, which counts layers from 1."""
    full = as_object(text.get("linear_attn_config")).get("full_attn_layers")
    if not isinstance(full, list):
        return None
    return tuple(FULL if layer + 1 in full else LINEAR for layer in range(num_layers))


def _chunked(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """Llama 4 attends in chunks wherever it has rope."""
    if not is_int(text.get("attention_chunk_size")):
        return None
    flagged = _flagged("no_rope_layers", CHUNKED, FULL)(text, num_layers, path)
    return flagged or _every("no_rope_layer_interval", CHUNKED)(text, num_layers, path)


def _windowed(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """One window for every layer, or none although one is stated."""
    if text.get("use_sliding_window") is False:
        return (FULL,) * num_layers if is_int(text.get("num_attention_heads")) else None
    is_stated = is_int(text.get("sliding_window"))
    return (SLIDING,) * num_layers if is_stated and text.get("model_type") in WINDOWED_FAMILIES else None


READERS: tuple[Reader, ...] = (
    _listed,
    _lettered,
    _short_convolutions,
    _delta_attention,
    _every("full_attention_interval", LINEAR),
    _every("sliding_window_pattern", SLIDING),
    _every("_sliding_window_pattern", SLIDING),
    _flagged("hybrid_layer_pattern", SLIDING, FULL),
    _flagged("attn_type_list", FULL, LINEAR),
    _chunked,
    _windowed,
)
"""Every way in which configs say what their layers are; the first that finds something is believed."""

HINTS = (
    "sliding_window", "sliding_window_size", "attention_chunk_size", "linear_num_value_heads", "linear_num_heads",
    "linear_attn_config", "conv_L_cache", "mamba_d_state", "ssm_state_size", "compress_ratios", "attn_layer_period",
)  # fmt: skip
"""Keys of which one says that not all layers are full attention, without saying which are not."""


def _is_plain(text: Mapping[str, Any]) -> bool:
    """Whether nothing speaks against full attention in every layer."""
    return is_int(text.get("num_attention_heads", text.get("n_head"))) and not any(text.get(key) for key in HINTS)
