"""Tools for the fields of all dialects: dotted keys, spellings, scales, and the usual tapped layers."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_runtime.checkpoint.targets.hf_config import FULL, SLIDING
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING
from dflash_runtime.json_values import as_object, is_int

Keys = Mapping[str, tuple[str, ...]]
"""Field -> the dotted keys that state it."""

REMOVED: Any = object()
"""In place of a value: remove the key."""

SELECTOR_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
"""A second list of the tapped layers that some configs have, each layer plus one. vLLM prefers it."""

ZLAB_SCALES: Mapping[str, float | None] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
"""Scale of z-lab's code, at the top level or in `dflash_config` -> the value that changes nothing."""

LOGIT_SCALE = "logit_scale"
"""A factor of the draft's logits among the decoder keys. Source: vLLM 0.33.0 qwen3_dflash.py DFlashQwen3ForCausalLM."""

SCALES: Mapping[str, float | None] = {**ZLAB_SCALES, LOGIT_SCALE: 1.0}
"""Scale -> the value that changes nothing."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a dialect spells the value of a field.

    read    a value of the config -> its canonical meaning
    write   the reverse

    Both return a value of a wrong type as it is: a rule reports it.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


AS_IT_IS = Spelling(read=lambda value: value, write=lambda value: value)


def shifted(offset: int) -> Spelling:
    """An integer, or a list of integers, that is `offset` higher in the config than in canonical form."""
    return Spelling(read=lambda value: _plus(value, -offset), write=lambda value: _plus(value, offset))


def scales_in_use(config: DraftConfig, scales: Iterable[str] = tuple(SCALES)) -> dict[str, Any]:
    """The scales of a draft that change something."""
    return {name: getattr(config, name) for name in scales if getattr(config, name) != SCALES[name]}


def guess_taps(num_target_layers: int, num_layers: int) -> list[int]:
    """The layers that readers tap if a config lists none. Source: z-lab/dflash build_target_layer_ids."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers)]


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, MISSING if it is absent."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return MISSING
        value = value[part]
    return value


def with_keys(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config with other values for some dotted keys; REMOVED removes a key.

    A key inside a value that is not an object is left as it is.
    """
    changed = copy.deepcopy(dict(config))
    for dotted, value in changes.items():
        *parents, key = dotted.split(".")
        container: Any = changed
        for parent in parents:
            container = container.setdefault(parent, {}) if isinstance(container, dict) else None
        if not isinstance(container, dict):
            continue
        if value is REMOVED:
            container.pop(key, None)
        else:
            container[key] = value
    return changed


def _plus(value: Any, offset: int) -> Any:
    if isinstance(value, list | tuple) and all(is_int(item) for item in value):
        return [item + offset for item in value]
    return value + offset if is_int(value) else value


def unknown_rope_keys(config: Mapping[str, Any], places: Iterable[str]) -> Iterator[str]:
    """The dotted keys inside the rope objects at these places that no rope type has. Conversions carry them."""
    for place in places:
        stated = as_object(look_up(config, place))
        kinds = [kind for kind in (FULL, SLIDING) if isinstance(stated.get(kind), dict)]
        for inner in (stated, *(stated[kind] for kind in kinds)):
            path = next((f"{place}.{kind}" for kind in kinds if stated[kind] is inner), place)
            yield from (f"{path}.{key}" for key in inner if key not in KNOWN_ROPE_KEYS and key not in kinds)


KNOWN_ROPE_KEYS = frozenset(
    {
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor",
        "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor",
        "low_freq_factor", "high_freq_factor", "partial_rotary_factor", "mrope_section", "mrope_interleaved",
        "rope_dim",
    }
)  # fmt: skip
"""Keys of `rope_scaling` and `rope_parameters`. Source: transformers 5.23.0 modeling_rope_utils.py; SGLang 0.5.23."""
