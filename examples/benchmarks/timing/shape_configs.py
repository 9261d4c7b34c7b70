"""The configs of a shape: as checkpoints have them, and as the runtime reads them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.families.qwen3 import Qwen3Target
from dflash_runtime.models.families.qwen3_5 import Qwen35Target
from dflash_runtime.models.families.qwen3_5_moe import Qwen35MoeTarget
from dflash_runtime.models.target import target_families
from dflash_runtime.target_config import ExpertsConfig, RecurrenceConfig, TargetConfig
from timing.shapes import Shape

MASK_FROM_END = 267
"""Distance of the mask token from the end of the vocabulary. Published drafts use 151669 of 151936."""

MODEL_TYPES: Mapping[type[DecoderTarget], str] = {
    Qwen3Target: "qwen3", Qwen35Target: "qwen3_5_text", Qwen35MoeTarget: "qwen3_5_moe_text",
}  # fmt: skip


def family_of(shape: Shape) -> type[DecoderTarget]:
    """The class of a target."""
    if shape.family is not None:
        return cast(type[DecoderTarget], target_families()[shape.family])
    if shape.recurrence is None:
        return Qwen3Target
    return Qwen35Target if shape.experts is None else Qwen35MoeTarget


def hf_config(shape: Shape) -> dict[str, Any]:
    """The target's config in the form of a checkpoint, for other engines.

    Raises:
        NotImplementedError: the target is a Qwen with experts.
    """
    if shape.family is not None:
        return FAMILY_CONFIGS[shape.family](shape)
    if shape.experts is not None:
        raise NotImplementedError("configs of targets with experts are not written")
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    config = _config(shape, heads, shape.layers) | {"tie_word_embeddings": shape.is_tied}
    own = shape.recurrence
    if own is None:
        return config
    rope = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.25}
    return config | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attn_output_gate": True,
        "full_attention_interval": own.attention_every, "linear_conv_kernel_dim": own.taps,
        "layer_types": [
            "linear_attention" if layer in shape.recurrent_layers else "full_attention" for layer in range(shape.layers)
        ],
        "linear_key_head_dim": own.head_size, "linear_value_head_dim": own.head_size,
        "linear_num_key_heads": own.key_heads, "linear_num_value_heads": own.value_heads,
        "mamba_ssm_dtype": "float32", "partial_rotary_factor": 0.25,
        "rope_parameters": rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    }  # fmt: skip


def hf_draft_config(shape: Shape) -> dict[str, Any]:
    """The draft's config in the native dialect."""
    return _config(shape, shape.heads_of_draft, shape.draft_layers) | {
        "architectures": ["DFlashDraftModel"], "block_size": shape.block, "tie_word_embeddings": shape.is_tied,
        "num_target_layers": shape.layers, "layer_types": ["full_attention"] * shape.draft_layers,
        "dflash_config": {"mask_token_id": shape.vocab - MASK_FROM_END, "target_layer_ids": list(shape.taps)},
    }  # fmt: skip


def _config(shape: Shape, heads: tuple[int, int, int], num_layers: int) -> dict[str, Any]:
    """The keys of a Qwen3 of this width, vocabulary, and heads: query heads, KV heads, head size."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": shape.hidden,
        "intermediate_size": shape.inner, "num_hidden_layers": num_layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": heads[2], "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": num_layers,
        "bos_token_id": shape.vocab - 2, "eos_token_id": shape.vocab - 1,
    }  # fmt: skip


def model_configs(shape: Shape) -> tuple[TargetConfig, DraftConfig]:
    """The configs of target and draft, as the runtime reads them."""
    common: dict[str, Any] = {
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "rms_norm_eps": 1e-6,
        "max_position_embeddings": shape.positions, "rope": RopeConfig(theta=1e6), "vocab_size": shape.vocab,
    }  # fmt: skip
    target = read_family_config(shape) if shape.family is not None else _qwen_config(shape, common)
    heads, kv_heads, head_dim = shape.heads_of_draft
    common |= {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    draft = DraftConfig(
        num_layers=shape.draft_layers, block_size=shape.block, target_layer_ids=shape.taps,
        num_target_layers=shape.layers, mask_token_id=shape.vocab - MASK_FROM_END, draft_vocab_size=shape.vocab,
        causal=(False,) * shape.draft_layers, windows=(None,) * shape.draft_layers, **common,
    )  # fmt: skip
    return target, draft


def _qwen_config(shape: Shape, common: dict[str, Any]) -> TargetConfig:
    return TargetConfig(
        model_type=MODEL_TYPES[family_of(shape)], num_layers=shape.layers, experts=_experts(shape),
        tie_word_embeddings=shape.is_tied, windows=(None,) * shape.layers, eos_token_ids=(),
        recurrence=_recurrence(shape), rotary_dim=None if shape.recurrence is None else shape.head_dim // 4, **common,
    )  # fmt: skip


def read_family_config(shape: Shape) -> TargetConfig:
    """The config of a target, read by its family."""
    read: Any = family_of(shape).read_config  # type: ignore[attr-defined]
    config: TargetConfig = read(hf_config(shape), Path("config.json"))
    return config


def _gpt_oss_config(shape: Shape) -> dict[str, Any]:
    own = shape.experts
    assert own is not None
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    return {
        **_config(shape, (shape.heads, shape.kv_heads, shape.head_dim), shape.layers),
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "intermediate_size": own.inner, "num_local_experts": own.count, "num_experts_per_tok": own.chosen,
        "use_sliding_window": None, "sliding_window": shape.window, "layer_types": _layer_types(shape),
        "rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "truncate": False, **yarn}, "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}, "tie_word_embeddings": False,
    }  # fmt: skip


def _layer_types(shape: Shape) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for *_, window in shape.attention_layers]


def _gemma4_config(shape: Shape) -> dict[str, Any]:
    own, full_heads = shape.experts, shape.full_heads or (shape.kv_heads, shape.head_dim)
    experts = {} if own is None else {
        "enable_moe_block": True, "num_experts": own.count, "top_k_experts": own.chosen,
        "moe_intermediate_size": own.inner, "intermediate_size": own.beside,
    }  # fmt: skip
    turned = {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
    config = _config(shape, (shape.heads, shape.kv_heads, shape.head_dim), shape.layers)
    return {
        **{key: item for key, item in config.items() if key not in ("rope_theta", "use_sliding_window")},
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "attention_k_eq_v": shape.has_equal_kv,
        "final_logit_softcapping": 30.0, "global_head_dim": full_heads[1], "num_global_key_value_heads": full_heads[0],
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "layer_types": _layer_types(shape), "sliding_window": shape.window, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": turned, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}
        },
        **experts,
    }  # fmt: skip


FAMILY_CONFIGS: Mapping[str, Callable[[Shape], dict[str, Any]]] = {
    "gpt_oss": _gpt_oss_config, "gemma4_text": _gemma4_config
}  # fmt: skip
"""Model type -> its config in the form of a checkpoint."""


def _experts(shape: Shape) -> ExpertsConfig | None:
    own = shape.experts
    if own is None:
        return None
    return ExpertsConfig(
        num_experts=own.count, num_chosen=own.chosen, intermediate_size=own.inner, shared_size=own.inner,
        has_normalised_scores=True, layers=tuple(range(shape.layers)),
    )  # fmt: skip


def _recurrence(shape: Shape) -> RecurrenceConfig | None:
    own = shape.recurrence
    if own is None:
        return None
    return RecurrenceConfig(
        layers=shape.recurrent_layers, num_key_heads=own.key_heads, num_value_heads=own.value_heads,
        key_size=own.head_size, value_size=own.head_size, num_taps=own.taps,
    )  # fmt: skip
