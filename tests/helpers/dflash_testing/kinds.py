"""A small random draft of every other kind: its config by hand, its tensors from the table of its kind."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_cli.formats.dialect import all_formats
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.kind_reading import KindReading
from dflash_testing.checkpoints import (
    REMOVED,
    SMALL,
    Arrays,
    Json,
    body_config,
    native_config,
    speculators_config,
    write_checkpoint,
)

HIDDEN = SMALL.hidden
LLAMA: Json = {**body_config(SMALL), "model_type": "llama", "layer_types": None}


def nested(architecture: str = "DFlashDraftModel", top: Json | None = None, **keys: Any) -> Json:
    config = native_config(architectures=[architecture], **(top or {}))
    config["dflash_config"] |= keys
    return config


def speculator(kind: str, architecture: str, **changes: Any) -> Json:
    return speculators_config(speculators_model_type=kind, architectures=[architecture], **changes)


def eagle_of_speculators(kind: str, architecture: str, **changes: Any) -> Json:
    left_out = ("aux_hidden_state_layer_ids", "block_size", "sliding_window_non_causal", "sample_from_anchor")
    body = {**LLAMA, "num_hidden_layers": 1}
    given = {
        "transformer_layer_config": body,
        "draft_vocab_size": 12,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "embed_requires_grad": False,
    }
    return speculator(kind, architecture, **dict.fromkeys(left_out, REMOVED), **{**given, **changes})


@dataclass(frozen=True)
class KindCase:
    """A sound config of a kind, and the engines that serve it: name -> oldest and newest release, or none."""

    kind: str
    config: Json
    served: dict[str, str] = field(default_factory=dict)
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def reading(self) -> KindReading:
        return KindReading(kind_of(self.kind), self.config)

    def arrays(self) -> Arrays:
        """Random tensors with the shapes of the table."""
        random = np.random.default_rng(5)
        shapes = {**self.reading.expected, **self.extra}
        assert all(size is not None for shape in shapes.values() for size in shape), shapes
        found: Arrays = {
            name: random.standard_normal([size or 0 for size in shape]).astype(np.float32)
            for name, shape in shapes.items()
        }
        return {name: array.astype(np.int64) if name == "d2t" else array for name, array in found.items()}

    def write(self, path: Path, config: Json | None = None, arrays: Arrays | None = None) -> Path:
        return write_checkpoint(path, config or self.config, self.arrays() if arrays is None else arrays)


def kind_of(name: str) -> Kind:
    return next(item for item in all_formats() if item.name == name and isinstance(item, Kind))


QWEN3_5: Json = {**body_config(SMALL), "model_type": "qwen3_5_text", "num_hidden_layers": 1}
LILICORR: Json = {
    "lilicorr_hidden_size": 8, "lilicorr_candidate_topk": 4, "lilicorr_num_heads": 2, "lilicorr_mlp_ratio": 2.5,
    "lilicorr_factor_dim": 6, "lilicorr_vector_eps": 1e-6, "lilicorr_logit_scale": 4.0, "lilicorr_num_layers": 2,
}  # fmt: skip
XPRESS: Json = {
    "xpress_rank": 6, "xpress_mlp_hidden": 12, "xpress_block_size": 4, "xpress_topc": 8, "xpress_num_passes": 3,
}  # fmt: skip
DOMINO: Json = {
    "projector_type": "domino", "gru_hidden_dim": 6, "emb_dim": 5, "pure_draft_prefix_len": 1, "shift_label": True,
}  # fmt: skip
ADAFLASH: Json = {"thresh_head_direct_len": True, "use_thresh_head_two_model": True, "thresh_head_bottleneck_dim": 6}
SLIDING: Json = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}
MUSE: Json = {
    "model_type": "muse_glimmer_assistant", "mask_token_id": SMALL.mask, "target_layer_ids": list(SMALL.taps),
    "dflash_config": REMOVED, "is_causal": REMOVED, **SLIDING,
}  # fmt: skip
SELECTOR: Json = {
    "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 4,
    "final_logit_softcapping": 20.0, "block_size": 4,
}  # fmt: skip
EAGLE3: Json = {
    **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 12,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2], "use_aux_hidden_state": True},
}  # fmt: skip

CASES = {
    "xpress": KindCase("xpress", nested("Qwen3XPressModel", XPRESS), {"vllm": "0.33"}),
    "xpress in speculators": KindCase(
        "xpress",
        speculator("xpress", "XPressSpeculator", draft_vocab_size=32, xpress_rank=6, xpress_mlp_ratio=2,
                   num_jacobi_passes=3),
    ),
    "lilicorr": KindCase("lilicorr", nested("LiLiCorrDraftModel", **LILICORR), {"vllm": "0.31", "sglang": "0.5.23"}),
    "lilicorr with convolutions": KindCase(
        "lilicorr",
        nested("LiLiCorrDraftModel", **{**LILICORR, "lilicorr_hidden_size": 0}, conv_kernel_size=2, conv_group_size=4),
        {"vllm": "0.31", "sglang": "0.5.23"},
    ),
    "domino": KindCase("domino", nested(**DOMINO), {"sglang": "0.5.23"}),
    "domino by its name": KindCase("domino", nested("DominoDraftModel", **DOMINO)),
    "domino, causal_v5": KindCase("domino", nested(**{**DOMINO, "projector_type": "causal_v5"})),
    "jetspec": KindCase(
        "jetspec",
        speculator("jetspec", "JetSpecSpeculator", kd_temperature=1.0, mask_token_id=REMOVED,
                   sliding_window_non_causal=REMOVED, sample_from_anchor=REMOVED),
    ),
    "adaflash": KindCase("adaflash", nested(**ADAFLASH), {"sglang": "0.5.23", "transformers": "5.23"}),
    "laguna": KindCase(
        "laguna",
        nested("DFlashLagunaForCausalLM", {"gating": "per-head", "draft_vocab_size": 32}),
        {"vllm": "0.25", "sglang": "0.5.23"},
    ),
    "laguna by element": KindCase(
        "laguna",
        nested("DFlashLagunaForCausalLM", {"gating": "per-element", "draft_vocab_size": 32}),
        {"vllm": "0.25", "sglang": "0.5.23"},
    ),
    "muse": KindCase(
        "muse",
        native_config(architectures=["MuseGlimmerAssistantModel"], **MUSE),
        {"vllm": "0.28", "sglang": "0.5.23", "llama.cpp": ""},
    ),
    "hunyuan": KindCase(
        "hunyuan", nested("HunYuanDenseV1ForCausalLM", {"model_type": "hunyuan_v1_dense", "use_qk_norm": True})
    ),
    "beam": KindCase(
        "beam", nested("DFlash2BeamDraftModel", SLIDING, **SELECTOR), {"vllm": "0.33", "sglang": "0.5.23"}
    ),
    "eagle 3": KindCase("eagle3", EAGLE3, {"vllm": "0.24", "sglang": "0.5.23", "llama.cpp": ""}),
    "eagle 3 of two layers": KindCase(
        "eagle3", {**EAGLE3, "num_hidden_layers": 2, "attention_bias": True}, {"vllm": "0.24", "sglang": "0.5.23"}
    ),
    "eagle 3 in speculators": KindCase(
        "eagle3", eagle_of_speculators("eagle3", "Eagle3Speculator"), {"vllm": "0.24", "llama.cpp": ""}
    ),
    "p-eagle": KindCase(
        "peagle", {**EAGLE3, "architectures": ["PeagleLlamaForCausalLM"], "pard_token": 31}, {"vllm": "0.24"}
    ),
    "p-eagle in speculators": KindCase("peagle", eagle_of_speculators("peagle", "PEagleSpeculator"), {"vllm": "0.24"}),
    "eagle": KindCase("eagle", {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": False},
                      {"vllm": "0.24"}),
    "eagle of sglang": KindCase(
        "eagle", {**LLAMA, "architectures": ["LlamaForCausalLMEagle"], "bias": True}, {"sglang": "0.5.23"}
    ),
    "mtp": KindCase(
        "mtp", {**body_config(SMALL), "architectures": ["Qwen3_5MTP"], "model_type": "qwen3_5_text",
                "mtp_num_hidden_layers": 1}, {"vllm": "0.24"},
        {"mtp.layers.0.mlp.gate_proj.weight": (8, HIDDEN)},
    ),
    "mtp of sglang": KindCase(
        "mtp", {**body_config(SMALL), "architectures": ["Qwen3_5ForCausalLMMTP"], "model_type": "qwen3_5_text",
                "mtp_num_hidden_layers": 1}, {"sglang": "0.5.23"},
    ),
    "mtp in speculators": KindCase(
        "mtp",
        {key: value for key, value in eagle_of_speculators("mtp", "MTPDraftModel", num_nextn_predict_layers=1,
                                                           transformer_layer_config=QWEN3_5).items()
         if key in ("architectures", "speculators_model_type", "speculators_config", "transformer_layer_config",
                    "num_nextn_predict_layers", "speculators_version")},
    ),
}  # fmt: skip
"""Name -> a sound draft."""
