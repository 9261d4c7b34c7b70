"""The record of transformers' config classes. Needs neither torch nor transformers."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def recorded_types() -> Mapping[str, Any]:
    """Return the table of `scripts/transformers_types.py`."""
    found: dict[str, Any] = json.loads((Path(__file__).with_name("transformers_types.json")).read_text("utf-8"))
    return found


def own_key(text: Mapping[str, Any], attribute: str) -> str | None:
    """Return the key under which a decoder's type states an attribute, if it has a name of its own for it."""
    types, kind = recorded_types(), text.get("model_type")
    if not isinstance(kind, str):
        return None
    decoder = types["texts"].get(types["decoders"].get(kind, kind), {})
    key: str | None = decoder.get("names", {}).get(attribute)
    return key


def has_sizes_elsewhere(config: Mapping[str, Any]) -> bool:
    """Return whether configs of this type state the sizes of their decoder under keys that are not read here."""
    return config.get("model_type") in recorded_types()["sizes_elsewhere"]


def is_no_decoder(config: Mapping[str, Any]) -> bool:
    """Return whether transformers knows the type of a config, and has no causal language model of it."""
    kind, types = config.get("model_type"), recorded_types()
    return isinstance(kind, str) and kind in types["known"] and kind not in types["decoders"]
