"""Settings by which a draft computes something that DFlash does not: refused by name wherever they stand.

A reader that passed over one would load every tensor and propose from another model. What tensors show, such as experts
or missing norms, is left to them: trainers copy the target's keys for it into configs of plain drafts. Sources:
vLLM 0.33.0 model_executor/models/qwen3_dflash.py; SGLang 0.5.23 models/dflash.py.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dflash_runtime.errors import InvalidConfig, UnsupportedError
from dflash_runtime.json_values import as_object

OWN_WEIGHTS = "the draft has its own weights where a DFlash draft uses those of the target"
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
"""Key -> the values that ask for nothing, and what any other asks for."""

SINK_KEY = "attention_sink_bias"
"""Served inside a native `dflash_config`: each layer has a tensor for it. Elsewhere no dialect says where that is."""

PLAIN_PROJECTORS = (None, *UNSERVED["projector_type"][0])
"""Values of projector_type that name DFlash's own projection."""

MODE_KEYS = ("attention_mode", "attention_modes")


def without_sinks(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A native `dflash_config` but for the key that asks for attention sinks."""
    return {key: value for key, value in nested.items() if key != SINK_KEY}


def refuse_unserved(found: Mapping[str, str]) -> None:
    """Refuse a draft by what `find_unserved` found in its config, all of it in one line.

    Raises:
        UnsupportedError: each key with what it asks for.
    """
    if found:
        raise UnsupportedError(
            unserved_in_words(found), hint="dflash handles drafts without it; leaving it out would change the model"
        )


def unserved_in_words(found: Mapping[str, str]) -> str:
    """Each key with its value and what that asks for."""
    return "; ".join(f"{key} {text}" for key, text in found.items())


@contextmanager
def naming_unserved(found: Mapping[str, str]) -> Iterator[None]:
    """Where a config that asks for what is not served cannot be read either, that is the better message.

    Raises:
        UnsupportedError: see `refuse_unserved`.
    """
    try:
        yield
    except InvalidConfig:
        refuse_unserved(found)
        raise


def find_unserved(*objects: Mapping[str, Any]) -> dict[str, str]:
    """Key -> its value and what that asks for, for everything in the objects that is not served."""
    head_dim = next((item["head_dim"] for item in objects if item.get("head_dim") is not None), None)
    return {key: text for item in objects for key, text in _unserved(item, head_dim)}


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
        if "mla" in (mode if isinstance(mode, list) else [mode]):
            yield key, f"{mode!r}: latent attention, for which no engine has a DFlash model"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
