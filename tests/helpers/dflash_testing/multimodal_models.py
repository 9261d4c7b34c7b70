"""Small random multimodal models of transformers' own classes, saved, with text parts that run as targets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dflash_testing.hosted_models import BODY, EXPERTS, GEMMA4, LATENT, MIXED, OWN_CACHE, SERVED, Json, skip_unknown

MROPE: Json = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}}

WRAPPERS: Mapping[str, Json] = {
    "gemma3": {**MIXED, "query_pre_attn_scalar": 24},
    "qwen3_vl": MROPE,
    "mistral3": {"model_type": "mistral"},
    "gemma4": {**GEMMA4, **EXPERTS, "enable_moe_block": True, "top_k_experts": 2},
    "gemma4_unified": GEMMA4,
    "glm4v": MROPE,
    "glm5_next": {
        **LATENT,
        "head_dim": 0,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "index_topk": 8,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_kpool": 4,
    },
    "idefics3": {"model_type": "llama"},
    "inkling2": OWN_CACHE["inkling2_text"],
    "inkling_mm_model": OWN_CACHE["inkling_text"],
    "internvl": {"model_type": "qwen2"},
    "kimi_k25": SERVED["deepseek_v3"],
    "llama4": {**OWN_CACHE["llama4_text"], "model_type": "llama4_text"},
    "llava": {"model_type": "llama"},
    "minimax_m3_vl": {},
    "muse_glimmer": MIXED,
    "muse_spark": {
        **MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_hidden_size": 16,
    },
    "nemotron_h_omni": OWN_CACHE["nemotron_h"],
    "qwen2_5_vl": MROPE,
    "qwen2_vl": MROPE,
    "qwen3_5": OWN_CACHE["qwen3_5_text"],
    "qwen3_5_moe": OWN_CACHE["qwen3_5_moe_text"],
    "qwen3_vl_moe": {**MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "smolvlm": {"model_type": "llama"},
}
"""Multimodal model type -> the keys of its decoder's config beyond `BODY`. By default tests run the first two."""

WITH_OWN_CACHE = frozenset(
    {"glm5_next", "inkling2", "inkling_mm_model", "llama4", "nemotron_h_omni", "qwen3_5", "qwen3_5_moe"}
)
"""Multimodal model types with decoders that keep transformers' own cache."""

VISION: Json = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "depth": 2,
    "num_heads": 2, "out_hidden_size": 32, "image_size": 28, "patch_size": 14, "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16, "text_hidden_size": 32, "mm_embed_dim": 16, "num_mm_positions": 4,
    "video_temporal_patch_size": 2, "position_embedding_size": 16,
}  # fmt: skip

AROUND: Mapping[str, Json] = {
    "inkling_mm_model": {"audio_config": {"text_hidden_size": 32, "mel_vocab_size": 4, "n_mel_bins": 4}},
    "muse_glimmer": {"projector_hidden_size": 16, "out_hidden_size": 16},
    "muse_spark": {
        "projector_hidden_size": 16, "out_hidden_size": 16, "audio_config": {
            "out_hidden_size": 32, "hidden_sizes": [8] * 4, "depths": [1] * 4, "patch_sizes": [2] * 4,
        },
    },
    "nemotron_h_omni": {"projector_hidden_size": 16, "vision_hidden_size": 16},
}  # fmt: skip
"""Multimodal model type -> the keys of its config outside the decoder's and the vision part's configs."""


def make_wrapper(path: Path, kind: str, **changes: Any) -> Any:
    """Return a random multimodal model of transformers, saved in a directory as safetensors."""
    from transformers import AutoConfig, AutoModelForImageTextToText, logging

    skip_unknown(kind)
    logging.disable_progress_bar()
    text = {**BODY, "pad_token_id": 0, **WRAPPERS[kind], **changes}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION, **AROUND.get(kind, {}))
    config.initializer_range = config.get_text_config(decoder=True).initializer_range = BODY["initializer_range"]
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(path)
    return model
