"""The values of a decoder's config as transformers reads it: by its own class, or by a record of its classes.

Needs neither torch nor transformers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from dflash_runtime.checkpoint.targets.hf_config import FULL, PER_LAYER
from dflash_runtime.checkpoint.targets.layer_kinds import LISTS
from dflash_runtime.json_values import as_object, is_int

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    DecoderConfig: TypeAlias = "PretrainedConfig | RecordedConfig"

WITHOUT_ONE_FREQUENCY = ("dynamic", "longrope")
"""Rope types with frequencies that depend on the longest text in a call."""

COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""Numbers that a decoder over our pages must state once for all layers."""

MEAN_OF_STREAMS = "hc_mult"
"""Key for a number of residual streams. A draft reads their mean. Source: the taps of DeepSeek-V4 and GLM-5.3-Flash in
vLLM and SGLang."""


class RecordedConfig:
    """A decoder's config as transformers would read it: stated keys, else the recorded defaults of its class.

    It has the attributes that decide how a target runs.
    """

    def __init__(self, model_type: str, stated: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.model_type = model_type
        self._stated = stated
        self._defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name in self._defaults.get("dropped", ()):
            return None
        for key in (name, self._defaults.get("names", {}).get(name)):
            if key in self._stated:
                return self._stated[key]
        is_count = name in COUNTS and name not in self._defaults.get("lacks", ())
        return 1 if is_count else self._defaults.get(name)

    @property
    def layer_types(self) -> list[str]:
        """The kinds of layers, stated or of the class."""
        stated = next((self._stated[key] for key in LISTS if isinstance(self._stated.get(key), list)), None)
        return list(self._defaults.get("layer_types", ()) if stated is None else stated)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The rope in the spelling of transformers 5, which prefers the older key if both are stated."""
        stated = as_object(self._stated.get("rope_scaling")) or as_object(self._stated.get("rope_parameters"))
        if not stated:
            return {"rope_type": next(iter(self._defaults.get("rope_kinds", ())), "default")}
        return {"rope_type": stated.get("type"), **stated}

    @property
    def is_heterogeneous(self) -> bool:
        """Whether layers may differ."""
        return bool(self._changes)

    @property
    def per_layer_config(self) -> "tuple[RecordedConfig, ...]":
        """The config of a usual layer, and of each layer that differs."""
        whole = {key: value for key, value in self._stated.items() if key != PER_LAYER}
        return tuple(RecordedConfig(self.model_type, {**whole, **item}, {}) for item in ({}, *self._changes))

    @property
    def _changes(self) -> tuple[Mapping[str, Any], ...]:
        """The keys of layers that differ. A class with a dropped key makes them from it."""
        if isinstance(self._stated.get(PER_LAYER), dict):
            return tuple(map(as_object, self._stated[PER_LAYER].values()))
        sizes = (self._stated.get(key) for key in self._defaults.get("dropped", ()))
        return tuple({"head_dim": size} for size in sizes if size is not None)

    @property
    def per_layer_attributes(self) -> set[str]:
        """Attributes that differ between layers."""
        layers = as_object(self._stated.get(PER_LAYER)).values()
        return {key for layer in layers for key in as_object(layer)} | {*self._defaults.get("per_layer_attributes", ())}


def count_of(text: "DecoderConfig", name: str, otherwise: int) -> int:
    """Return a positive number that is the same for all layers, or else `otherwise`."""
    value = value_of(text, name)
    return value if is_int(value) and value > 0 else otherwise


def value_of(text: "DecoderConfig", name: str) -> Any:
    """Return an attribute; None if it is absent, or if layers differ in it."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers raises this if layers differ
        return None


def ropes_of(text: "DecoderConfig") -> tuple[Mapping[str, Any], ...]:
    """Return the rope of each kind of layer, with full attention first."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = sorted((kind != FULL, kind) for kind, item in rope.items() if isinstance(item, dict))
    return tuple(rope[kind] for _, kind in nested) if nested else (rope,)


def rope_kinds(text: "DecoderConfig") -> set[str]:
    """Return the rope types of a decoder, if their frequencies depend on the longest text in a call."""
    return {rope["rope_type"] for rope in ropes_of(text) if rope.get("rope_type") in WITHOUT_ONE_FREQUENCY}


def head_sizes(text: "DecoderConfig") -> set[int]:
    """Return the sizes of heads in all layers."""
    if latent := latent_size(text):
        return {latent}
    layers: Any = text.per_layer_config if getattr(text, "is_heterogeneous", False) else (text,)
    usual = count_of(text, "hidden_size", 1) // count_of(text, "num_attention_heads", 1)
    return {count_of(layer, "head_dim", usual) for layer in layers}


def latent_size(text: "DecoderConfig") -> int | None:
    """Return the size of a head's keys after latent attention has made keys and values for every head.

    Rope rotates only the second part of a key. None for other attention.
    """
    if not count_of(text, "kv_lora_rank", 0):
        return None
    return count_of(text, "qk_nope_head_dim", 0) + count_of(text, "qk_rope_head_dim", 0)


def num_streams(text: "DecoderConfig") -> int:
    """Return the number of residual streams. A draft reads their mean."""
    return count_of(text, MEAN_OF_STREAMS, 1)
