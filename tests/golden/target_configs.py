"""Write small configs of targets for tests/behaviour/test_targets.py. Keys and layers are real, widths are smaller.

Run it with transformers 5.23.0. Its config classes have the keys of the published configs:

    python tests/golden/target_configs.py tests/data/targets

BY_HAND has configs of families without a class in this release, and layouts that are older than their class. They are
written by hand from model cards and from the code of engines that read them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

Json = dict[str, Any]

WIDTHS: Json = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
"""Key -> its small value, for every config that states a number under the key."""

FP8: Json = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT4: Json = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
FP8_DYNAMIC: Json = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
}
FOUR_BITS: Json = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4: Json = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt"},
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"input_activations": FOUR_BITS, "weights": FOUR_BITS, "targets": ["Linear"]}},
}
MXFP4: Json = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}

ALTERNATING = ["sliding_attention", "full_attention"]
LFM2 = ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"] * 2
LAGUNA = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 10
MELLUM = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 7
NEMOTRON = ["linear_attention", "moe", "linear_attention", "moe", "full_attention", "moe"] * 4

GEMMA4: Json = {
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
    "sliding_window": 1024, "final_logit_softcapping": 30.0, "max_position_embeddings": 262144,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
"""Keys of gemma-4-31B and gemma-4-26B-A4B. E2B and E4B also have inputs of each layer."""

CLASSES: dict[str, tuple[str, Json, Json]] = {
    "alpamayo": ("qwen3_vl", {"num_hidden_layers": 36}, {}),
    "cohere2_moe": ("cohere2_moe", {}, {}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "deepseek_v32": ("deepseek_v32", {}, {}),
    "deepseek_v4": ("deepseek_v4", {}, {}),
    "gemma3": ("gemma3_text", {}, {}),
    "gemma4": ("gemma4", {**GEMMA4, "num_hidden_layers": 60}, {}),
    "gemma4_moe": (
        "gemma4",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        {},
    ),
    "gemma4_unified": ("gemma4_unified", {}, {}),
    "glm4_moe": ("glm4_moe", {}, {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}, {}),
    "glm5_next": ("glm5_next", {}, {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}, {}),
    "glm_moe_dsa_fp8": ("glm_moe_dsa", {}, FP8),
    "gpt_oss_20b": ("gpt_oss", {"num_hidden_layers": 24, "layer_types": ALTERNATING * 12}, MXFP4),
    "gpt_oss_120b": ("gpt_oss", {"num_hidden_layers": 36, "layer_types": ALTERNATING * 18}, MXFP4),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}, {}),
    "inkling": ("inkling_mm_model", {}, {}),
    "inkling_nvfp4": ("inkling_mm_model", {}, NVFP4),
    "inkling2": ("inkling2", {}, {}),
    "kimi_k25": ("kimi_k25", {}, INT4),
    "kimi_linear": ("kimi_linear", {}, {}),
    "laguna": ("laguna", {"layer_types": LAGUNA}, {}),
    "laguna_nvfp4": ("laguna", {"layer_types": LAGUNA}, NVFP4),
    "lfm2": ("lfm2", {"num_hidden_layers": 16, "layer_types": LFM2}, {}),
    "lfm2_moe": ("lfm2_moe", {"num_hidden_layers": 16, "layer_types": LFM2}, {}),
    "lfm3": ("lfm3", {}, {}),
    "llama": ("llama", {}, {}),
    "llama4": ("llama4", {}, {}),
    "longcat_flash": ("longcat_flash", {}, {}),
    "mellum": ("mellum", {"layer_types": MELLUM}, {}),
    "mimo_v2_flash": ("mimo_v2_flash", {}, {}),
    "minimax_m2": ("minimax_m2", {}, {}),
    "minimax_m2_fp8": ("minimax_m2", {}, FP8),
    "minimax_m3_vl": ("minimax_m3_vl", {}, {}),
    "mistral": ("mistral", {}, {}),
    "mistral3": ("mistral3", {}, {}),
    "mistral4": ("mistral4", {}, {}),
    "muse_glimmer": ("muse_glimmer", {}, {}),
    "muse_spark": ("muse_spark", {}, {}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": NEMOTRON}, {}),
    "nemotron_h_nvfp4": ("nemotron_h", {"layers_block_type": NEMOTRON}, NVFP4),
    "nemotron_h_omni": ("nemotron_h_omni", {"layers_block_type": NEMOTRON}, {}),
    "qwen2": ("qwen2", {"num_hidden_layers": 24}, {}),
    "qwen3": ("qwen3", {"num_hidden_layers": 36}, {}),
    "qwen3_fp8": ("qwen3", {"num_hidden_layers": 36}, FP8),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 48}, {}),
    "qwen3_moe_fp8": ("qwen3_moe", {"num_hidden_layers": 48}, FP8),
    "qwen3_next": ("qwen3_next", {}, {}),
    "qwen3_5": ("qwen3_5", {"num_hidden_layers": 64}, {}),
    "qwen3_5_moe": ("qwen3_5_moe", {}, {}),
    "qwen3_5_moe_fp8": ("qwen3_5_moe", {"num_hidden_layers": 60}, FP8),
    "qwen3_5_moe_fp8_dynamic": ("qwen3_5_moe", {"num_hidden_layers": 60}, FP8_DYNAMIC),
    "qwen4_exp": ("qwen4_exp", {}, {}),
}
"""File -> model_type of transformers, values that replace the class's defaults in the decoder, and the quantization.

Alpamayo does not have a class. It is built on Qwen3-VL and has its layout."""

AGREEING: dict[str, Json] = {
    "glm5_next": {"text_config": {"num_key_value_heads": WIDTHS["num_attention_heads"]}},
    "inkling2": {"vision_config": {"text_hidden_size": WIDTHS["hidden_size"]}},
    "muse_spark": {"audio_config": {"out_hidden_size": WIDTHS["hidden_size"]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
}
"""model_type -> values that must agree with a smaller size, or with a size of an encoder."""

SIZES: Json = {
    **{key: WIDTHS[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")},
    "num_hidden_layers": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
DELTA: Json = {
    "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
    "full_attn_layers": [4, 8, 12],
    "head_dim": 16,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
}
KIMI_LINEAR: Json = {
    **SIZES,
    "model_type": "kimi_linear",
    "linear_attn_config": DELTA,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "num_experts": 256,
    "num_experts_per_token": 8,
}

BY_HAND: dict[str, Json] = {
    "by_hand_deepseek_vl": {
        "model_type": "deepseek_vl_v2",
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "language_config": {**SIZES, "model_type": "deepseek_v2", "kv_lora_rank": 16, "n_routed_experts": 64},
        "vision_config": {"hidden_size": 8},
    },
    "by_hand_gemma3": {
        **SIZES,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "by_hand_internvl": {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "llm_config": {**SIZES, "model_type": "qwen3", "head_dim": 16},
        "vision_config": {"hidden_size": 8},
    },
    "by_hand_kimi_k3": {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": {
            **KIMI_LINEAR,
            "quantization_config": INT4,
            "attn_res_block_size": 12,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
        },
        "vision_config": {"hidden_size": 8},
    },
    "by_hand_kimi_linear": {**KIMI_LINEAR, "architectures": ["KimiLinearForCausalLM"]},
    "by_hand_llama4": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {
            **SIZES,
            "model_type": "llama4_text",
            "attention_chunk_size": 8192,
            "no_rope_layers": [1, 1, 1, 0] * 3,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
    },
    "by_hand_mimo_v2": {
        **SIZES,
        "model_type": "mimo_v2",
        "architectures": ["MiMoV2ForCausalLM"],
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],
        "sliding_window": 128,
        "swa_rope_theta": 10000,
        "swa_num_key_value_heads": 2,
        "add_swa_attention_sink_bias": True,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "quantization_config": FP8,
    },
    "by_hand_minimax_m2": {
        **SIZES,
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * 12,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "quantization_config": FP8,
    },
    "by_hand_nemotron_h": {
        **SIZES,
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "MEM*EMEM*EME",
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
    },
    "by_hand_qwen3_next": {
        **SIZES,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "head_dim": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


def by_class(model_type: str, changes: Json, packing: Json) -> Json:
    """Return the keys that a config class writes, with small values."""
    made = CONFIG_MAPPING[model_type]()
    config = json.loads(made.to_json_string())
    if changes:
        decoder = json.loads(type(made.get_text_config())(**changes).to_json_string())
        config = {**config, "text_config": decoder} if "text_config" in config else decoder
    names = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    named = next(mapping[model_type] for mapping in names if model_type in mapping)
    architecture = named if isinstance(named, str) else named[0]
    small: Json = shrunk({**config, "architectures": [architecture], "dtype": "bfloat16"})
    for part, agreeing in AGREEING.get(model_type, {}).items():
        small[part] |= agreeing
    return {**small, "quantization_config": packing} if packing else small


def shrunk(value: Any, key: str = "") -> Any:
    """Return the same keys with small widths, without encoders of images and sound."""
    if isinstance(value, dict):
        kept = {name: inner for name, inner in value.items() if not name.startswith("transformers")}
        is_encoder = any(word in key for word in ("vision_config", "audio_config"))
        return {"hidden_size": 8} if is_encoder else {name: shrunk(inner, name) for name, inner in kept.items()}
    return WIDTHS[key] if key in WIDTHS and isinstance(value, int) and value > 0 else value


def all_configs() -> dict[str, Json]:
    """Return every config by the name of its file."""
    return {name: by_class(*made) for name, made in CLASSES.items()} | BY_HAND


def main() -> None:
    """Write every config."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in all_configs().items():
        (folder / f"{name}.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
