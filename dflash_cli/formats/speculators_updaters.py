"""Updaters by `speculators_model_type`: they turn a speculators config into the config that an engine sees.

Source: vllm-project/vllm transformers_utils/configs/speculators/algos.py. Names of functions and arguments are kept.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from dflash_runtime.checkpoint.targets.hf_config import FULL, SLIDING
from dflash_runtime.errors import MISSING, InvalidConfig, UnknownFormat, UnsupportedError
from dflash_runtime.json_values import is_int
from dflash_runtime.registry import Registry

Updater = Callable[[Mapping[str, Any], MutableMapping[str, Any]], None]

NON_CAUSAL_FLAG = "sliding_window_non_causal"
"""The key that states how sliding layers attend in a block."""

SPECULATORS: Registry[Updater] = Registry("speculators_model_type")


def register_speculator(name: str) -> Callable[[Updater], Updater]:
    """A decorator that registers the updater of one `speculators_model_type`."""
    return SPECULATORS.register(name)


def find_updater(name: object) -> Updater:
    """The updater of a type.

    Raises:
        UnknownFormat: this tool does not read the type.
    """
    if not isinstance(name, str) or name not in SPECULATORS:
        raise UnknownFormat(
            f"speculators_model_type {name!r} is not DFlash (known: {', '.join(SPECULATORS)})",
            id="other-speculators-type",
            field="speculators_model_type",
            found=name,
            hint="this tool handles DFlash drafts only",
        )
    return SPECULATORS[name]


@register_speculator("dflash")
def update_dflash(config_dict: Mapping[str, Any], pre_trained_config: MutableMapping[str, Any]) -> None:
    """Turn the decoder config of a speculators draft into the config that an engine sees, in place.

    config_dict           the whole speculators config
    pre_trained_config    its `transformer_layer_config`. Gains `architectures`, `draft_vocab_size`,
                          `target_hidden_size` if stated, `eagle_aux_hidden_state_layer_ids` and `dflash_config`.

    speculators counts layers from 1, so aux ids [2, 4, 5] are the outputs of layers [1, 3, 4].

    Raises:
        InvalidConfig: the aux ids or the mask id are missing or of a wrong type.
        UnsupportedError: an aux id is 0, the output of the embedding.
    """
    aux_ids = _aux_ids(config_dict)
    pre_trained_config["architectures"] = ["DFlashDraftModel"]
    pre_trained_config["draft_vocab_size"] = config_dict.get("draft_vocab_size")
    if config_dict.get("target_hidden_size") is not None:
        pre_trained_config["target_hidden_size"] = config_dict["target_hidden_size"]
    pre_trained_config["eagle_aux_hidden_state_layer_ids"] = aux_ids
    pre_trained_config["dflash_config"] = {
        "mask_token_id": _mask_token_id(config_dict),
        "target_layer_ids": [aux_id - 1 for aux_id in aux_ids],
        "sample_from_anchor": config_dict.get("sample_from_anchor", False),
        **_common_causality(config_dict, pre_trained_config),
    }


def layer_causality(config_dict: Mapping[str, Any], layer_types: Sequence[str]) -> tuple[bool, ...]:
    """Causality of each layer: a sliding layer is causal if the flag is false, a full layer never is.

    Source: vllm-project/speculators 0.9.0 models/dflash/attention.py. Releases before 0.6.0 have no such key, and
    every layer is non-causal.
    """
    is_causal = config_dict.get(NON_CAUSAL_FLAG) is False
    return tuple(is_causal and kind == SLIDING for kind in layer_types)


def _common_causality(config_dict: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, bool]:
    """`causal` if all layers agree; otherwise empty, because one value would be wrong for some layers."""
    layer_types = body.get("layer_types")
    values = set(layer_causality(config_dict, layer_types if isinstance(layer_types, list) and layer_types else [FULL]))
    return {"causal": values.pop()} if len(values) == 1 else {}


def _aux_ids(config_dict: Mapping[str, Any]) -> list[int]:
    key = "aux_hidden_state_layer_ids"
    value = config_dict.get(key, MISSING)
    if not isinstance(value, list) or not all(is_int(item) for item in value):
        raise InvalidConfig(key, value, "a list of integers")
    if any(item < 0 for item in value):
        raise InvalidConfig(key, value, "layers numbered from 1")
    if 0 in value:
        text = f"{key} {value}: 0 taps the embedding's output, but only outputs of layers, numbered from 1, are served"
        raise UnsupportedError(text, id="embedding-tapped", field=key, found=value)
    return list(value)


def _mask_token_id(config_dict: Mapping[str, Any]) -> int:
    value = config_dict.get("mask_token_id", MISSING)
    if not is_int(value):
        raise InvalidConfig("mask_token_id", value, "an integer")
    return value
