"""What SGLang reads of a DSpark config beside the keys of DFlash. Source: SGLang 0.5.23 dspark_config.py, dspark.py."""

from collections.abc import Mapping
from typing import Any

from dflash_cli.engines.config_class import EngineStops
from dflash_runtime.json_values import is_int

PREFIXED = {
    "block_size": "dspark_block_size",
    "mask_token_id": "dspark_noise_token_id",
    "target_layer_ids": "dspark_target_layer_ids",
}


def prefixed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of DSpark with a prefix, which SGLang prefers, under their plain names."""
    found = {plain: config.get(key) for plain, key in PREFIXED.items()}
    return {key: value for key, value in found.items() if value is not None}


def check_markov(config: Mapping[str, Any], nested: Mapping[str, Any], mask: object, found: Mapping[str, Any]) -> None:
    """Require what SGLang builds a DSpark draft from.

    Raises:
        EngineStops: the key that is missing or wrong.
    """
    rank = config.get("markov_rank", 0)
    if not is_int(rank) or rank <= 0:
        raise EngineStops("markov_rank", f"found {rank!r} at the top level, expected a positive integer")
    is_prefixed = any(config.get(key) for key in PREFIXED.values())
    if not is_prefixed and nested.get("markov_head_type", config.get("markov_head_type")) is None:
        raise EngineStops("markov_head_type", "missing")
    if mask is None:
        raise EngineStops("mask_token_id", "missing, and SGLang reads it under no other name")
    if found.get("draft_vocab_size") not in (None, found["vocab_size"]):
        raise EngineStops("draft_vocab_size", "the Markov head of a reduced vocabulary does not fit")
