"""The values that each release of vLLM reads from a speculators config.

vLLM makes a config without a class of transformers from `transformer_layer_config`, so an absent key has no default.
Source: the code of each release from 0.24.0 to 0.33.0, in transformers_utils/configs/speculators/base.py and algos.py;
run on the configs of tests/golden/engine_verdicts.json.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dflash_cli.engines.config_class import NONE, ConfigClass, EngineStops
from dflash_cli.engines.engine_reading import EngineReading, resolve_with
from dflash_cli.engines.serving_engine import Release
from dflash_cli.engines.vllm_reading import READS_IS_CAUSAL, READS_KINDS, read_mask, read_model
from dflash_cli.formats.dflash2 import FIELDS
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.formats.stated import MAX_LAYERS
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.targets.hf_config import FULL
from dflash_runtime.json_values import as_object, is_number

BODY = "transformer_layer_config"
NO_BASE = 1000000.0
"""The rope base of a decoder that states no rope key. Source: qwen3_dflash.py set_default_rope_theta."""


COPIES_AUX: Release = (0, 29)
"""The first release that reads use_aux_hidden_state of a DSpark file."""
COPIED = (
    "draft_vocab_size", "target_hidden_size", "mask_token_id", "markov_rank", "markov_head_type", "block_size",
    "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
"""The keys of a DSpark file that its decoder gets, unless they are null. Source: 0.33.0 algos.py update_dspark."""


class _Decoder(ConfigClass):
    """vLLM's config of a speculators decoder. None is a default of no key that the model needs."""

    def usual_layer_types(self, found: Mapping[str, Any]) -> list[str]:
        count = found["num_hidden_layers"]
        if count > MAX_LAYERS:
            raise EngineStops("num_hidden_layers", f"found {count}")
        return [FULL] * int(count)


DECODER = _Decoder(
    fields={
        **{
            key: ((int,), None)
            for key in (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "max_position_embeddings",
            )
        },
        "rms_norm_eps": ((float, int), None),
        "hidden_act": ((str,), None),
        "attention_bias": ((bool,), False),
        "head_dim": ((int, NONE), None),
        "sliding_window": ((int, NONE), None),
        "layer_types": ((list, NONE), None),
        "rope_parameters": ((dict, NONE), None),
    }
)  # fmt: skip


def read_speculators(subject: Subject, release: Release) -> EngineReading | None:
    """The values of vLLM's config and model.

    Raises:
        EngineStops: the key at which the release stops.
    """
    config, family = subject.config, subject.format.family
    if config.get("model_type", "speculators") != "speculators":
        raise EngineStops("model_type", f"found {config['model_type']!r}, so vLLM does not see a speculators config")
    if config.get("speculators_config") is None:
        raise EngineStops("speculators_config", "missing, so vLLM does not see a speculators config")
    if config.get("speculators_model_type") != family:
        raise EngineStops(
            "speculators_model_type", f"found {config.get('speculators_model_type')!r}, expected {family!r}"
        )
    body = config.get(BODY)
    if not isinstance(body, dict):
        raise EngineStops(BODY, f"found {body!r}, expected an object")
    aux, seen = _captured(config), UPDATED[family](config, body, release)
    nested = as_object(seen.get("dflash_config"))
    mask = read_mask(seen, nested, release)
    try:
        found = _resolve(seen)
    except EngineStops as stops:
        raise EngineStops(f"{BODY}.{stops.key}", stops.why) from stops
    stated = body.get("is_causal") if release >= READS_IS_CAUSAL else None
    return read_model(subject, release, seen, found, {**nested, "is_causal": stated}, aux, mask)


def _dflash(config: Mapping[str, Any], body: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """The config that vLLM makes of a DFlash or DFlash 2 file, but for the captured layers."""
    if "mask_token_id" not in config:
        raise EngineStops("mask_token_id", "missing")
    nested = {"mask_token_id": config["mask_token_id"], "sample_from_anchor": config.get("sample_from_anchor", False)}
    if release >= READS_KINDS:
        nested["causal"] = not config.get(NON_CAUSAL_FLAG, True)
    width = config.get("target_hidden_size")
    return {
        **body,
        **({} if width is None else {"target_hidden_size": width}),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "dflash_config": nested,
    }


def _dflash2(config: Mapping[str, Any], body: Mapping[str, Any], release: Release) -> dict[str, Any]:
    seen = _dflash(config, body, release)
    own = {key: config[key] for key in FIELDS if config.get(key) is not None}
    return {**seen, "dflash_config": {**seen["dflash_config"], **own}}


def _dspark(config: Mapping[str, Any], body: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """The config that vLLM makes of a DSpark file: all keys at the top level."""
    if config.get("use_aux_hidden_state") is False and release >= COPIES_AUX:
        raise EngineStops("use_aux_hidden_state", "false, and then the model has no fc.weight")
    given = {key: config[key] for key in COPIED if config.get(key) is not None}
    return {**body, **given}


UPDATED: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], Release], dict[str, Any]]] = {
    "dflash": _dflash, "dflash2": _dflash2, "dspark": _dspark,
}  # fmt: skip
"""Family -> the function that makes the config. The layout is left out: see `VllmEngine.served_layout`."""


def _captured(config: Mapping[str, Any]) -> list[int]:
    """The layers that vLLM captures, counted from 1, in the order of the file."""
    key = "aux_hidden_state_layer_ids"
    stated = config.get(key)
    if not isinstance(stated, list) or not stated or not all(is_number(item) and item == int(item) for item in stated):
        raise EngineStops(key, f"found {stated!r}, expected a list of integers")
    aux = [int(item) for item in stated]
    if min(aux) < 0 or len(set(aux)) < len(aux):
        raise EngineStops(key, f"{stated}: vLLM captures fewer layers than fc.weight reads")
    return aux


def _resolve(body: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's keys as vLLM fills them in."""
    states_rope = any(key in body for key in ("rope_theta", "rope_scaling", "rope_parameters"))
    found = resolve_with(DECODER, body if states_rope else {**body, "rope_theta": NO_BASE})
    if not found["head_dim"]:
        found["head_dim"] = found["hidden_size"] // max(1, found["num_attention_heads"])
    return found
