"""Transformers' config classes, as engines apply them to drafts: types, defaults, kinds of layers, rope.

Engines read drafts through these classes. A key of a wrong type stops them. An absent key takes a value that belongs to
another model. Source: transformers 5.19.0 and 5.23.0 models/qwen3, models/gpt_oss, configuration_utils.py and
modeling_rope_utils.py; run on the configs of tests/golden/engine_verdicts.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_cli.rules.themes.rope import NEEDED_BY_ROPE
from dflash_runtime.checkpoint.targets.hf_config import FULL, SLIDING
from dflash_runtime.json_values import is_number

NONE = type(None)


class EngineStops(Exception):
    """An engine stops at a key of the config. `ServingEngine.read_config` turns it into a verdict."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigClass:
    """A config class of transformers.

    fields      key -> its types and its default
    theta       the base of rope if no key states it
    rope        the rope parameters if no key states them
    """

    fields: Mapping[str, tuple[tuple[type, ...], Any]]
    theta: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config's keys as the class fills them in.

        Raises:
            EngineStops: the class refuses the config.
        """
        found = {**config, **{key: config.get(key, default) for key, (_, default) in self.fields.items()}}
        for key, (types, _) in self.fields.items():
            if type(found[key]) not in types:
                wanted = " or ".join(sorted(kind.__name__ for kind in types if kind is not NONE))
                raise EngineStops(key, f"found {found[key]!r}, transformers expects {wanted}")
        if found["num_key_value_heads"] is None:
            found["num_key_value_heads"] = found["num_attention_heads"]
        if "use_sliding_window" in self.fields and not found["use_sliding_window"]:
            found["sliding_window"] = None
        found["layer_types"] = self._layer_types(found)
        found["rope_parameters"] = self._rope(found)
        return found

    def _layer_types(self, found: Mapping[str, Any]) -> list[str]:
        stated, count = found["layer_types"], found["num_hidden_layers"]
        if stated is None:
            return self.usual_layer_types(found)
        kinds = [LEGACY_KINDS.get(item, item) if isinstance(item, str) else item for item in stated]
        unknown = next((item for item in kinds if item not in LAYER_KINDS), None)
        if len(kinds) != count:
            raise EngineStops("layer_types", f"found {len(kinds)} entries, expected num_hidden_layers, {count}")
        if any(item not in LAYER_KINDS for item in kinds):
            raise EngineStops("layer_types", f"found {unknown!r}, which transformers does not know")
        return kinds

    def usual_layer_types(self, found: Mapping[str, Any]) -> list[str]:
        """The kinds of layers of a config that states none."""
        layers = range(found["num_hidden_layers"])
        if "max_window_layers" not in self.fields:
            return [FULL if layer % 2 else SLIDING for layer in layers]
        has_window = found["sliding_window"] is not None
        return [SLIDING if has_window and layer >= found["max_window_layers"] else FULL for layer in layers]

    def _rope(self, found: Mapping[str, Any]) -> dict[str, Any]:
        stated = found.get("rope_parameters")
        params = found.get("rope_scaling") or (self.rope if stated is None else stated) or {}
        if not isinstance(params, Mapping):
            raise EngineStops("rope_scaling", f"found {params!r}, transformers expects an object")
        if any(key in found["layer_types"] for key in params):
            raise EngineStops("rope_parameters", "one rope for each kind of layer, which DFlash models do not read")
        partial = found.get("partial_rotary_factor")
        params = {
            "rope_theta": found.get("rope_theta", self.theta),
            "rope_type": params.get("type", "default"),
            **({} if partial is None else {"partial_rotary_factor": partial}),
            **params,
        }
        kind = params["rope_type"]
        if kind in STRETCHED:
            params.setdefault("original_max_position_embeddings", found["max_position_embeddings"])
        needed = NEEDED_BY_ROPE.get(kind, ()) if isinstance(kind, str) else ()
        missing = [key for key in needed if key not in params]
        if missing:
            raise EngineStops(f"rope_scaling.{missing[0]}", f"missing for rope type {kind}")
        if kind == "yarn" and not is_number(params["original_max_position_embeddings"]):
            raise EngineStops("rope_scaling.original_max_position_embeddings", "expected a number for rope type yarn")
        return {key: value for key, value in params.items() if key != "type"}


LEGACY_KINDS = {"attention": FULL}
LAYER_KINDS = (FULL, SLIDING, "linear_attention", "chunked_attention")
"""The kinds of layers of transformers that a draft's config may name."""
STRETCHED = ("llama3", "yarn", "longrope")
_COMMON: dict[str, tuple[tuple[type, ...], Any]] = {
    "num_attention_heads": ((int,), 32),
    "hidden_act": ((str,), "silu"),
    "attention_dropout": ((float, int), 0.0),
    "tie_word_embeddings": ((bool,), False),
    "layer_types": ((list, NONE), None),
    "rope_parameters": ((dict, NONE), None),
}
CLASSES: Mapping[str, ConfigClass] = {
    "qwen3": ConfigClass(
        fields={
            **_COMMON,
            "vocab_size": ((int,), 151936),
            "hidden_size": ((int,), 4096),
            "intermediate_size": ((int,), 22016),
            "num_hidden_layers": ((int,), 32),
            "num_key_value_heads": ((int, NONE), 32),
            "head_dim": ((int,), 128),
            "max_position_embeddings": ((int,), 32768),
            "rms_norm_eps": ((float,), 1e-6),
            "attention_bias": ((bool,), False),
            "use_sliding_window": ((bool,), False),
            "sliding_window": ((int, NONE), 4096),
            "max_window_layers": ((int,), 28),
        }
    ),
    "gpt_oss": ConfigClass(
        fields={
            **_COMMON,
            "vocab_size": ((int,), 201088),
            "hidden_size": ((int,), 2880),
            "intermediate_size": ((int,), 2880),
            "num_hidden_layers": ((int,), 36),
            "num_attention_heads": ((int,), 64),
            "num_key_value_heads": ((int,), 8),
            "head_dim": ((int,), 64),
            "max_position_embeddings": ((int,), 131072),
            "rms_norm_eps": ((float,), 1e-5),
            "attention_bias": ((bool,), True),
            "sliding_window": ((int, NONE), 128),
        },
        theta=150000.0,
        rope={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
}  # fmt: skip
"""model_type -> its config class. Other types are not modelled."""
