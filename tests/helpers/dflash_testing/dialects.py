"""Small configs as each exporter of the native dialect writes them.

The keys and habits come from published configs and from the exporters' sources, and the sizes from `support`.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_cli.formats.detection import detect_from
from dflash_cli.formats.dialect import Format, ParsedConfig, all_formats
from dflash_runtime.draft_config import DraftConfig, Verifier
from dflash_testing import checkpoints as support

MIXED = support.Shape(windows=(16, None))
NESTED: dict[str, Any] = {"mask_token_id": 31, "target_layer_ids": [0, 2]}
UNSTATED = {"is_causal": support.REMOVED}


def named_dialect(name: str) -> Format:
    """The dialect of that name."""
    return next(item for item in all_formats() if item.name == name)


def read_parsed(config: dict[str, Any]) -> ParsedConfig:
    """The canonical config of a draft, read by its dialect."""
    path = Path("config.json")
    return detect_from(config, frozenset(), path).format.read_config(config, path)


def zlab(**changes: Any) -> dict[str, Any]:
    """April 2026: code beside the weights, block size at the top level, both rope keys, no causality."""
    auto_map = {"AutoModel": "dflash.DFlashDraftModel"}
    return support.native_config(**{"auto_map": auto_map, "max_window_layers": 2, **UNSTATED, **changes})


def zlab_010(**changes: Any) -> dict[str, Any]:
    """Release 0.1.0: block size nested, rope in transformers 5's form only."""
    nested = {**NESTED, "block_size": 4}
    rope = {"rope_theta": support.REMOVED, "rope_scaling": support.REMOVED}
    modern = {"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}}
    config = support.native_config(MIXED, **{**UNSTATED, **rope, **modern, "block_size": support.REMOVED, **changes})
    return {**config, "dflash_config": nested}


def specforge(**changes: Any) -> dict[str, Any]:
    """Both rope spellings, no code, no causality; the newer ones name their attention."""
    rope = {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
    config = support.native_config(MIXED, **{**UNSTATED, **rope, **changes})
    return {**config, "dflash_config": {**NESTED, "attention_mode": "gqa"}}


def model_optimizer(**changes: Any) -> dict[str, Any]:
    """All layers full, the window inside dflash_config, torch_dtype."""
    nested = {**NESTED, "use_swa": True, "swa_window_size": 16, "causal": False}
    removed = {"use_sliding_window": support.REMOVED, "dtype": support.REMOVED, **UNSTATED}
    config = support.native_config(**{**removed, "torch_dtype": "bfloat16", "sliding_window": 16, **changes})
    return {**config, "dflash_config": nested}


def automodel(**nested: Any) -> dict[str, Any]:
    """Its own architecture, block size in both places."""
    config = support.native_config(architectures=["Qwen3DFlashDraftModel"])
    return {**config, "dflash_config": {**NESTED, "block_size": 4, **nested}}


def mlx(**changes: Any) -> dict[str, Any]:
    """Everything at the top level."""
    return support.native_config(
        **{"dflash_config": support.REMOVED, "mask_token_id": 31, "target_layer_ids": [0, 2], **changes}
    )


def with_verifier(config: DraftConfig) -> DraftConfig:
    """The draft with a target's name, which the speculators dialect needs."""
    return replace(config, verifier=Verifier(name_or_path="acme/target", architectures=("Qwen3ForCausalLM",)))


WIDE = support.Shape(windows=(16, 16))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, Callable[[], tuple[dict[str, Any], support.Shape]]] = {
    "full": lambda: (support.native_config(), support.SMALL),
    "full causal": lambda: (support.native_config(is_causal=True), support.SMALL),
    "sliding": lambda: (support.native_config(WIDE), support.SMALL),
    "sliding causal": lambda: (support.native_config(WIDE, is_causal=True), support.SMALL),
    "mixed": lambda: (support.native_config(MIXED, is_causal=support.REMOVED), support.SMALL),
    "use_swa": lambda: (model_optimizer(), support.SMALL),
    "specforge": lambda: (specforge(), support.SMALL),
    "flat": lambda: (mlx(), support.SMALL),
    "yarn": lambda: (support.native_config(rope_scaling=YARN), support.SMALL),
    "biased": lambda: (support.native_config(support.Shape(bias=True)), support.Shape(bias=True)),
    "speculators": lambda: (support.speculators_config(num_target_layers=4), support.SMALL),
    "reduced": lambda: (support.speculators_config(support.REDUCED, num_target_layers=4), support.REDUCED),
}
"""Name of a case -> the config to convert, and the shape of its tensors."""


def make_case(path: Path, name: str) -> Path:
    """The source of a case on disk."""
    config, shape = CASES[name]()
    extra = support.reduced_arrays(shape, support.target_arrays(shape)) if shape is support.REDUCED else {}
    return support.write_checkpoint(path, config, {**support.body_arrays(shape), **extra})


def config_digest(path: Path) -> str:
    """Return a digest of a config, which shows whether the config has changed since an engine read it."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def one_line_each(document: dict[str, Any]) -> str:
    """JSON with a line for each entry of its lists, so that a changed reading is a changed line."""
    parts = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
