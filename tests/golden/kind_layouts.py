"""Record the config and the tensors that speculators saves for drafts of other kinds, in small sizes.

python tests/golden/kind_layouts.py > tests/golden/kind_layouts.jsonl, with speculators 0.9.0 installed.
"""

import importlib
import json
import sys
from typing import Any

BODY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32, "max_position_embeddings": 128,
}  # fmt: skip
EAGLE = {"draft_vocab_size": 12, "eagle_aux_hidden_state_layer_ids": [1, 2]}
CASES: tuple[tuple[str, str, str, int, dict[str, Any]], ...] = (
    ("eagle3", "Eagle3", "LlamaConfig", 1, EAGLE),
    ("eagle3", "Eagle3", "LlamaConfig", 2, EAGLE),
    ("eagle3", "Eagle3", "Qwen3Config", 2, EAGLE),
    ("eagle3", "Eagle3", "LlamaConfig", 1, {**EAGLE, "norm_before_fc": True}),
    ("eagle3", "Eagle3", "LlamaConfig", 1, {**EAGLE, "fc_norm": True}),
    ("peagle", "PEagle", "LlamaConfig", 1, {**EAGLE, "mask_token_id": 31}),
    ("peagle", "PEagle", "Qwen3Config", 2, {**EAGLE, "mask_token_id": 31}),
    (
        "xpress", "XPress", "Qwen3Config", 2,
        {"draft_vocab_size": 32, "mask_token_id": 31, "block_size": 4, "aux_hidden_state_layer_ids": [1, 3],
         "xpress_rank": 6},
    ),
)  # fmt: skip
"""Kind, start of the classes' names, config class of the decoder, number of layers, other settings."""


def record(kind: str, start: str, decoder: str, num_layers: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The config of a draft, and the shape of each tensor that speculators saves."""
    body = getattr(importlib.import_module("transformers"), decoder)(**{**BODY, "num_hidden_layers": num_layers})
    body._attn_implementation = "eager"
    module = importlib.import_module(f"speculators.models.{kind}.config")
    config = getattr(module, f"{start}SpeculatorConfig")(transformer_layer_config=body, **settings)
    core = importlib.import_module(f"speculators.models.{kind}.core")
    model = getattr(core, f"{start}DraftModel")(config)
    left_out = set(model._keys_to_ignore_on_save or ())
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in left_out}
    return {"kind": kind, "config": json.loads(json.dumps(config.model_dump(), default=str)), "shapes": shapes}


if __name__ == "__main__":
    for case in CASES:
        sys.stdout.write(json.dumps(record(*case), sort_keys=True) + "\n")
