"""Values of config keys that may change what a decoder computes, and small models whose configs get them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_testing.hosted_models import EXPERTS, GEMMA4, LINEAR, MIXED, Json

ALONE: Json = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
SHARED: Json = {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}

MODELS: Mapping[str, Json] = {
    "qwen3": {},
    "qwen2": {},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "gpt_oss": {**MIXED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma4_text": {
        **GEMMA4, **ALONE, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
    "gemma4_unified_text": {**GEMMA4, **ALONE},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": SHARED,
    "qwen3_next": SHARED,
}  # fmt: skip
"""Model type of a native family -> the keys of its config beyond the usual ones."""

FULL, SLIDING = "full_attention", "sliding_attention"

VALUES: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("gelu", "silu", "relu"),
    "layer_types": ([FULL] * 4, [SLIDING] * 4, [*[FULL] * 3, SLIDING]),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True,),
    "sliding_window": (3,),
    "use_sliding_window": (True,),
    "max_window_layers": (1,),
    "partial_rotary_factor": (0.5,),
    "rope_theta": (50.0,),
    "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}),
    "swiglu_limit": (0.3,),
    "swiglu_alpha": (1.0,),
    "norm_topk_prob": (False,),
    "decoder_sparse_step": (2,),
    "mlp_only_layers": ([1],),
    "final_logit_softcapping": (None, 3.0),
    "attn_logit_softcapping": (1.0,),
    "query_pre_attn_scalar": (3,),
    "logit_scale": (0.5,),
    "embedding_multiplier": (2.0,),
    "attention_multiplier": (2.0,),
    "use_bidirectional_attention": (True, "all", "vision"),
    "attention_k_eq_v": (False, True),
    "attn_output_gate": (False,),
    "full_attention_interval": (2,),
    "per_layer_config": ({}, {"1": {"rms_norm_eps": 0.5}}, {"0": {"intermediate_size": 24}}),
}  # fmt: skip
"""Key -> values that it gets, whether or not the config states it."""

ROPES: Sequence[Json] = (
    {"rope_theta": 77.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0},
    {"partial_rotary_factor": 0.5},
    {"attention_factor": 3.0},
)  # fmt: skip
"""Changes of `rope_parameters`."""

SIZES = (
    "architectures", "model_type", "dtype", "transformers_version", "vocab_size", "num_hidden_layers", "hidden_size",
)  # fmt: skip
"""Keys that keep their values."""


def changed_configs(config: Json) -> Iterator[tuple[str, Json]]:
    """Every config in which one key has another value or is absent, with a name for the change."""
    for key in {**dict.fromkeys(VALUES), **config}:
        if key in SIZES:
            continue
        for value in (*VALUES.get(key, ()), *_others(key, config.get(key))):
            yield f"{key}={value}", {**config, key: value}
        if key in config:
            yield f"without {key}", {name: value for name, value in config.items() if name != key}


def _others(key: str, value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1 if isinstance(value, int) else 3 * value + 0.1
        yield max(1, value // 2) if isinstance(value, int) else value / 2
    elif key == "rope_parameters" and not any(isinstance(item, dict) for item in value.values()):
        yield from ({**value, **changes} for changes in ROPES)
