"""Print the table transformers_types.json of the runtime: what transformers' config classes state by default.

python scripts/transformers_types.py > runtime/dflash_runtime/checkpoint/targets/transformers_types.json

Commands that read only headers must not import transformers. They say from this file how a target runs.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / name) for name in (".", "runtime", "kernels")]

from dflash_runtime.checkpoint.targets.decoder_values import COUNTS, rope_kinds
from dflash_runtime.checkpoint.targets.hf_config import SIZES_ELSEWHERE, read_target_facts
from dflash_runtime.checkpoint.targets.hosted_refusals import DECIDING_KEYS, SIZES_OF_LAYERS
from dflash_runtime.errors import InvalidConfig, UnsupportedError


def value_of(text: Any, key: str) -> Any:
    """An attribute; None if it is absent or differs between layers."""
    try:
        return getattr(text, key, None)
    except RuntimeError:
        return None


def traits(text: Any) -> dict[str, Any]:
    """The attributes of a decoder's config by which a target is refused."""
    stated = {key: value_of(text, key) for key in DECIDING_KEYS}
    found = {key: value for key, value in stated.items() if value not in (None, False, 0) and not callable(value)}
    kinds = getattr(text, "layer_types", None)
    differing = getattr(text, "per_layer_attributes", None)
    return {
        **{key: value if isinstance(value, bool | int | float | str) else True for key, value in found.items()},
        **({"names": names} if (names := own_names(text)) else {}),
        **({"lacks": lacks} if (lacks := [key for key in COUNTS if not isinstance(value_of(text, key), int)]) else {}),
        **({"layer_types": sorted(set(kinds))} if kinds else {}),
        **({"rope_kinds": kinds} if (kinds := sorted(rope_kinds(text))) else {}),
        **({"per_layer_attributes": sorted(differing)} if differing else {}),
        **({"dropped": dropped} if differing and (dropped := dropped_sizes(type(text))) else {}),
    }


def dropped_sizes(kind: Any) -> list[str]:
    """The keys for sizes of some layers that a config class replaces by sizes of each layer."""
    return [key for key in SIZES_OF_LAYERS if value_of(kind(**{key: 24}), key) is None]


def own_names(text: Any) -> dict[str, str]:
    """The keys under which a type's config states the attributes that decide, if these are not their names."""
    names: dict[str, str] = getattr(text, "attribute_map", {})
    return {name: key for name, key in sorted(names.items()) if name in {*COUNTS, *DECIDING_KEYS} and name != key}


def states_sizes_elsewhere(config: Any) -> bool:
    """Whether `dflash` finds no sizes of a decoder in a config class's own values."""
    try:
        read_target_facts(json.loads(config.to_json_string(use_diff=False)), Path("config.json"))
    except InvalidConfig:
        return True
    except UnsupportedError as error:
        return error.id == SIZES_ELSEWHERE
    return False


def record() -> dict[str, Any]:
    """The whole table: model type -> the type of its decoder, and type of a decoder -> its traits.

    `sizes_elsewhere` lists the model types with other keys for the sizes of a decoder.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    logging.disable(logging.WARNING)
    runnable = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    decoders: dict[str, str] = {}
    texts: dict[str, Any] = {}
    elsewhere: list[str] = []
    for kind in sorted(runnable & set(CONFIG_MAPPING)):
        try:
            config = CONFIG_MAPPING[kind]()
            text = config.get_text_config(decoder=True)
        except Exception:  # a class without defaults
            decoders[kind] = kind
            continue
        elsewhere += [kind] if states_sizes_elsewhere(config) else []
        decoders[kind] = text.model_type
        if text.model_type not in texts or kind == text.model_type:
            texts[text.model_type] = traits(text)
    return {
        "transformers": __version__, "known": sorted(set(CONFIG_MAPPING)), "sizes_elsewhere": elsewhere,
        "decoders": decoders, "texts": texts,
    }  # fmt: skip


def render() -> str:
    """The file: one line per type."""
    found = record()
    parts = [f'"{name}": {json.dumps(found[name])}' for name in ("transformers", "known", "sizes_elsewhere")]
    for name in ("decoders", "texts"):
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(found[name].items()))
        parts.append(f'"{name}": {{\n{rows}\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(render())
