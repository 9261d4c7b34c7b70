"""The settings of DFlash 2 and DSpark that SGLang reads beside the keys of DFlash.

Source: SGLang 0.5.23 speculative/dflash_utils.py, models/dflash.py, models/dspark.py and dspark_config.py; run on the
configs of tests/golden/family_verdicts.json.
"""

from collections.abc import Mapping
from typing import Any

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import whole
from dflash_cli.engines.family_reading import markov_parts
from dflash_cli.formats.dflash2 import FIELDS
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_runtime.checkpoint.layout import MARKOV
from dflash_runtime.json_values import as_object

HEADS = ("vanilla", "gated", "rnn")
PREFIXED = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")


def read_selector_of_sglang(nested: Mapping[str, Any]) -> dict[str, int]:
    """The four settings of DFlash 2. SGLang's model has convolutions if both of their sizes are stated.

    Raises:
        EngineStops: a key is not a number, or one of a pair is missing.
    """
    place = "dflash_config."
    found = {key: whole(f"{place}{key}", nested.get(key) or 0, least=0) for key in FIELDS}
    for first, second in (FIELDS[:2], FIELDS[2:]):
        if bool(found[first]) != bool(found[second]):
            missing = second if found[first] else first
            raise EngineStops(f"{place}{missing}", f"found {nested.get(missing)!r}, expected a positive integer")
    if not found["selector_rank"]:
        raise EngineStops(f"{place}selector_rank", "missing, and SGLang's DFlash 2 model needs a selector")
    return found


def read_markov(
    config: Mapping[str, Any], found: Mapping[str, Any], subject: Subject
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rank and the type of the Markov head, and the fields of a `DraftConfig` for `check_shapes`.

    The parser takes the first of several keys. The model takes the key at the top level, so both must be right.

    Raises:
        EngineStops: the key that is missing or wrong.
    """
    nested = {**as_object(config.get("dflash_config")), **as_object(config.get("dspark_config"))}
    parsed = _first(config, nested, "markov_rank", 0)
    if parsed is None or whole("markov_rank", parsed, least=0) == 0:
        raise EngineStops("markov_rank", f"found {parsed!r}, expected a positive integer")
    _check_type(config, nested)
    rank = whole("markov_rank", config.get("markov_rank", 0))
    if rank <= 0:
        raise EngineStops("markov_rank", f"found {rank} at the top level, expected a positive integer")
    head_type = str(config.get("markov_head_type", "vanilla")).lower()
    parts = markov_parts(rank, head_type, found, found["vocab_size"])
    known = _names_of_head(head_type)
    for name in subject.tensors or ():
        if name.startswith(f"{MARKOV}.") and name not in known:
            raise EngineStops(f"{WEIGHTS}:{name}", f"a {head_type} head has no such tensor")
    return {"markov_rank": rank, "markov_head_type": head_type}, parts


def _check_type(config: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Require a head type that SGLang knows. It may be missing if a key with the prefix of DSpark is stated."""
    stated = _first(config, nested, "markov_head_type", None)
    is_prefixed = any(config.get(key) is not None for key in PREFIXED)
    if stated is None and not is_prefixed:
        raise EngineStops("markov_head_type", "missing")
    if stated is not None and str(stated).lower() not in HEADS:
        raise EngineStops("markov_head_type", f"found {stated!r}, expected one of {', '.join(HEADS)}")


def _names_of_head(head_type: str) -> frozenset[str]:
    """The names of the tensors of a Markov head."""
    own = {"gated": ("gate_proj",), "rnn": ("joint_proj",)}.get(head_type, ())
    parts = ("markov_w1.weight", "markov_w2.weight", *(f"{name}.{part}" for name in own for part in ("weight", "bias")))
    return frozenset(f"{MARKOV}.{part}" for part in parts)


def _first(config: Mapping[str, Any], nested: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of the key with the prefix of DSpark, else of the nested key, else of the key at the top level."""
    prefixed = config.get(f"dspark_{key}")
    return prefixed if prefixed is not None else nested.get(key, config.get(key, default))


def read_block(
    config: Mapping[str, Any], block: int | None, mask: int | None, taps: list[int]
) -> tuple[int | None, int, list[int]]:
    """The block's size, the mask token and the tapped layers of DSpark. Keys with a prefix count before DFlash's.

    Raises:
        EngineStops: a key is wrong, or the mask token is missing.
    """
    size, listed = config.get("dspark_block_size"), config.get("dspark_target_layer_ids")
    nested = {**as_object(config.get("dflash_config")), **as_object(config.get("dspark_config"))}
    noise = config.get("dspark_noise_token_id")
    stated = noise if noise is not None else nested.get("mask_token_id", config.get("mask_token_id", mask))
    if stated is None:
        raise EngineStops("mask_token_id", "missing, and SGLang reads it under no other name")
    if listed is not None:
        if not isinstance(listed, list) or not listed:
            raise EngineStops("dspark_target_layer_ids", f"found {listed!r}, expected a list of integers")
        taps = [whole("dspark_target_layer_ids", item) for item in listed]
    size = block if size is None else whole("dspark_block_size", size)
    return size, whole("mask_token_id", stated, least=0), taps
