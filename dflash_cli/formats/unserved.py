"""Settings that ask for a computation that DFlash does not have. Such a draft is refused by the name of the setting.

A reader that ignores such a setting loads every tensor and proposes from another model. Faults that the tensors show,
such as experts or missing norms, are left to the tensors: trainers copy those keys from the target into configs of
plain drafts. Sources: vLLM 0.33.0 model_executor/models/qwen3_dflash.py; SGLang 0.5.23 models/dflash.py.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dflash_runtime.errors import InvalidConfig, UnsupportedError
from dflash_runtime.json_values import as_object

OWN_WEIGHTS = "the draft has its own embedding or head; a DFlash draft uses the target's"
SINKS = "attention sinks, a learned term in each head's softmax"

UNSERVED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "has_embed_tokens": ((False,), OWN_WEIGHTS),
    "has_lm_head": ((False,), OWN_WEIGHTS),
    "has_own_lm_head": ((False,), OWN_WEIGHTS),
    "sample_from_anchor": (
        (False,),
        "the draft also predicts at the last committed token, as DSpark does; DFlash predicts at masked positions only",
    ),
    "attention_sink_bias": ((False,), SINKS),
    "add_swa_attention_sink_bias": ((False,), SINKS),
    "attention_value_scale": ((1,), "attention values are scaled"),
    "projector_type": (("", "dflash", "default"), "a head that is not DFlash's own"),
}
"""Key -> the values that ask for nothing, and the computation that any other value asks for."""

SINK_KEY = "attention_sink_bias"
"""Served inside a native `dflash_config`, where each layer has a tensor for it. No dialect defines it elsewhere."""

PLAIN_PROJECTORS = (None, *UNSERVED["projector_type"][0])
"""Values of projector_type that name DFlash's own projection."""

MODE_KEYS = ("attention_mode", "attention_modes")


def without_sinks(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A native `dflash_config` without the key that asks for attention sinks."""
    return {key: value for key, value in nested.items() if key != SINK_KEY}


def refuse_unserved(found: Mapping[str, str]) -> None:
    """Refuse a draft if `find_unserved` found a setting in its config.

    Raises:
        UnsupportedError: each key with the computation that it asks for.
    """
    if found:
        raise UnsupportedError(
            unserved_in_words(found),
            id="unserved-setting",
            field=next(iter(found)),
            hint="dflash handles drafts without it; leaving it out would change the model",
        )


def unserved_in_words(found: Mapping[str, str]) -> str:
    """Each key with its value and the computation that it asks for, on one line."""
    return "; ".join(f"{key} {text}" for key, text in found.items())


@contextmanager
def naming_unserved(found: Mapping[str, str]) -> Iterator[None]:
    """Read a config. If that fails and the config has an unserved setting, the error names the setting.

    Raises:
        UnsupportedError: see `refuse_unserved`.
    """
    try:
        yield
    except InvalidConfig:
        refuse_unserved(found)
        raise


def find_unserved(*objects: Mapping[str, Any]) -> dict[str, str]:
    """Key -> its value and the computation that it asks for, for every unserved setting in the objects."""
    head_dim = next((item["head_dim"] for item in objects if item.get("head_dim") is not None), None)
    return {key: text for item in objects for key, text in _unserved(item, head_dim)}


def asks_for_latent_attention(config: Mapping[str, Any]) -> bool:
    """Whether a draft of any kind states latent attention, for which no engine has a model of a draft."""
    objects = (config, as_object(config.get("dflash_config")), as_object(config.get("transformer_layer_config")))
    return any("mla" in _modes(item.get(key)) for item in objects for key in MODE_KEYS)


def _modes(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _unserved(item: Mapping[str, Any], head_dim: object) -> Iterator[tuple[str, str]]:
    for key, (neutral, meaning) in UNSERVED.items():
        value = item.get(key)
        if value is not None and value not in neutral:
            yield key, f"{_shown(value)}: {meaning}"
    for inner in (item, as_object(item.get("rope_scaling")), as_object(item.get("rope_parameters"))):
        if inner.get("rope_dim") not in (None, head_dim):
            yield "rope_dim", f"{_shown(inner['rope_dim'])}: rope over a part of each head"
    for key in MODE_KEYS:
        mode = item.get(key)
        if "mla" in _modes(mode):
            yield key, f"{mode!r}: latent attention, for which no engine has a DFlash model"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
