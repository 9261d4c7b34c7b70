"""Read the kind of each layer of a target, in every spelling of published configs. Needs no torch.

An unknown kind keeps the name in the config, so a draft for such a target can still be checked and served.
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
"""Name of a kind of layer in configs -> our name."""

PATTERN = {"*": FULL, "M": MAMBA, "-": FEED_FORWARD, "E": FEED_FORWARD}
"""Letter of hybrid_override_pattern -> our name."""

STATE_KINDS = (LINEAR, CONVOLUTION, MAMBA)
"""Layers with a recurrent state instead of keys and values. Rejected tokens must be removed from the state."""

LISTS = ("layer_types", "layers_block_type")
"""Keys that name the kind of each layer."""

WINDOWED_FAMILIES = ("mistral", "ministral", "mixtral", "phi3", "starcoder2")
"""Families in which a stated window applies to every layer."""


def count_listed_layers(text: Mapping[str, Any]) -> int | None:
    """Return how many layers a config lists one by one, or None without a list."""
    for key in (*LISTS, "hybrid_override_pattern"):
        if isinstance(text.get(key), list | str) and text[key]:
            return len(text[key])
    return None


def read_layer_kinds(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...]:
    """Return the kind of each layer, by our name if it is known, or () if the config does not state kinds.

    Raises:
        InvalidConfig: the list of kinds has another length than the layers, or holds something other than strings.
    """
    full = LATENT if is_int(text.get("kv_lora_rank")) else FULL
    for read in READERS:
        kinds = read(text, num_layers, path)
        if kinds is not None:
            return tuple(full if kind == FULL else kind for kind in kinds)
    return (full,) * num_layers if _is_plain(text) else ()


def _listed(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """Read `layer_types`. The list may continue with extra layers that only predict further tokens."""
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
    """Read `hybrid_override_pattern` of Nemotron-H."""
    pattern = text.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern:
        return None
    if len(pattern) != num_layers:
        raise InvalidConfig("hybrid_override_pattern", pattern, f"{num_layers} letters", path=path)
    return tuple(PATTERN.get(letter, str(letter)) for letter in pattern)


def _every(key: str, kind: str) -> Reader:
    """Return a reader of a key that states n: every n-th layer has full attention, and the others are of one kind."""

    def read(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
        interval = text.get(key)
        if not is_int(interval) or interval < 1:
            return None
        return tuple(kind if (layer + 1) % interval else FULL for layer in range(num_layers))

    return read


def _flagged(key: str, where_set: str, elsewhere: str) -> Reader:
    """Return a reader of a list with 0 or 1 for each layer."""

    def read(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
        flags = text.get(key)
        if not isinstance(flags, list) or not flags:
            return None
        if len(flags) != num_layers:
            raise InvalidConfig(key, f"{len(flags)} values", f"a list of {num_layers} values", path=path)
        return tuple(where_set if flag else elsewhere for flag in flags)

    return read


def _short_convolutions(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """Read `full_attn_idxs` of LFM2."""
    full = text.get("full_attn_idxs")
    if not isinstance(full, list):
        return None
    return tuple(FULL if layer in full else CONVOLUTION for layer in range(num_layers))


def _delta_attention(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """Read `linear_attn_config` of Kimi-Linear, which counts layers from 1."""
    full = as_object(text.get("linear_attn_config")).get("full_attn_layers")
    if not isinstance(full, list):
        return None
    return tuple(FULL if layer + 1 in full else LINEAR for layer in range(num_layers))


def _chunked(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """Read the layers of Llama 4, which attend in chunks if they have rope."""
    if not is_int(text.get("attention_chunk_size")):
        return None
    flagged = _flagged("no_rope_layers", CHUNKED, FULL)(text, num_layers, path)
    return flagged or _every("no_rope_layer_interval", CHUNKED)(text, num_layers, path)


def _windowed(text: Mapping[str, Any], num_layers: int, path: Path) -> tuple[str, ...] | None:
    """Read one window for every layer, or `use_sliding_window: false`, which switches it off."""
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
"""The readers of every spelling. The first reader that finds its key decides."""

HINTS = (
    "sliding_window", "sliding_window_size", "attention_chunk_size", "linear_num_value_heads", "linear_num_heads",
    "linear_attn_config", "conv_L_cache", "mamba_d_state", "ssm_state_size", "compress_ratios", "attn_layer_period",
)  # fmt: skip
"""Keys that show that some layers do not have full attention, without saying which layers."""


def _is_plain(text: Mapping[str, Any]) -> bool:
    """Whether every layer has full attention, as far as the config tells."""
    return is_int(text.get("num_attention_heads", text.get("n_head"))) and not any(text.get(key) for key in HINTS)
