"""Configs of targets as they are published, small: the keys and their values' kinds are real, the sizes are not."""

from typing import Any

Json = dict[str, Any]

SIZES: Json = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
GATED_DELTA: Json = {
    "layer_types": HYBRID,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "attn_output_gate": True,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


def _without(*names: str) -> Json:
    return {key: value for key, value in SIZES.items() if key not in names}


TARGETS: dict[str, Json] = {
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 30,
        "vision_config": {"depth": 2, "hidden_size": 8},
        "text_config": {
            **SIZES,
            **GATED_DELTA,
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "rope_theta": 10000000,
                "rope_type": "default",
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 2],
                "mrope_interleaved": True,
            },
        },
    },
    "qwen3_next": {
        **SIZES,
        **GATED_DELTA,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "gpt_oss": {
        **SIZES,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "layer_types": ALTERNATING,
        "sliding_window": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        "eos_token_id": [1, 2],
    },
    "gemma3_text": {
        **SIZES,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "layer_types": ALTERNATING,
        "sliding_window": 64,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
    },
    "gemma3_text before transformers 5": {
        **SIZES,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "layer_types": ALTERNATING,
        "sliding_window": 64,
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {
            **SIZES,
            "model_type": "llama4_text",
            "attention_chunk_size": 64,
            "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
            "no_rope_layers": [1, 1, 1, 0],
            "num_local_experts": 4,
            "rope_theta": 500000.0,
        },
        "vision_config": {"hidden_size": 8},
    },
    "deepseek_v3": {
        **_without("head_dim"),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    },
    "mixtral": {
        **_without("head_dim"),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "qwen3_moe": {
        **SIZES,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
    },
    "granite": {
        **_without("head_dim"),
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "rope_theta": 10000000.0,
    },
    "lfm2": {
        **_without("rms_norm_eps", "intermediate_size", "head_dim"),
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_ff_dim": 32,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "rope_theta": 1000000.0,
    },
    "nemotron_h": {
        **_without("rms_norm_eps"),
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*",
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 16,
    },
    "llama": {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "cohere": {
        **_without("rms_norm_eps", "head_dim"),
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 10000.0,
    },
}
"""Name -> config. All have the sizes of the smallest test draft's target."""
