"""Small random models of any model type of transformers, as far as its config class can be made small."""

from pathlib import Path
from typing import Any

import torch

from dflash_testing.hosted_models import BODY, OWN_CACHE, SERVED, Json
from dflash_testing.multimodal_models import AROUND, VISION, WRAPPERS

SIZES: Json = {
    **BODY,
    **{"bos_token_id": 0, "pad_token_id": 0},
    **{"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_k": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "shared_expert_intermediate_size": 16},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 5},
    **{"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8},
    **{"state_size": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "d_model": 32, "ffn_dim": 48},
    **{"decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 2},
    **{"encoder_attention_heads": 4, "encoder_ffn_dim": 48, "word_embed_proj_dim": 32, "rotary_dim": 8},
    **{"n_layers": 4, "n_heads": 4},
}
"""Sizes of a decoder, used where its config class has the key."""

AUDIO: Json = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "text_hidden_size": 32,
}

LATENT_HEADS: Json = {"num_key_value_heads": 4}
"""Latent attention has as many heads of keys as of queries."""

MROPE_HOLDERS = ("glm4v", "glm_ocr", "paddleocr", "qwen2_5_omni")
"""Beginnings of model types that need sections of rope, though their default config states none."""

MAX_PARAMETERS = 30_000_000


def any_config(kind: str, **changes: Any) -> Any:
    """Return a small config of a model type with changed keys of its decoder. Some config classes refuse it."""
    from transformers import CONFIG_MAPPING, AutoConfig

    usual = CONFIG_MAPPING[kind]()
    text = usual.get_text_config(decoder=True)
    usable = {} if kind in WRAPPERS else {**SERVED.get(text.model_type, {}), **OWN_CACHE.get(text.model_type, {})}
    own = {**_small(text), **usable, **WRAPPERS.get(kind, {}), **changes}
    if text is usual:
        return AutoConfig.for_model(kind, **own)
    stated: Json = usual.to_dict()
    parts = {name: part for name, part in stated.items() if name.endswith("_config") and isinstance(part, dict)}
    holder = next((name for name in parts if getattr(usual, name, None) is text), "text_config")
    around = {name: _small_part(name, part) for name, part in parts.items() if name != holder}
    return AutoConfig.for_model(
        kind, **{**around, **AROUND.get(kind, {})}, **{holder: {"model_type": text.model_type, **own}}
    )


def make_any(path: Path, kind: str, **changes: Any) -> Any:
    """Return a small random model of a model type, saved in a directory as safetensors.

    Raises:
        ValueError: the model is not small, or a config or model class refuses the small sizes in its own way.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, logging

    logging.disable_progress_bar()
    config = any_config(kind, **changes)
    auto: Any = (
        AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    )
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{kind} has {count} parameters")
    torch.manual_seed(5)
    model = auto.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(path)
    return model


def _small(text: Any) -> Json:
    """Return small values for the keys that a decoder's config class has."""
    stated: Json = text.to_dict()
    known = {*stated, *getattr(text, "attribute_map", {})}
    small = {key: value for key, value in SIZES.items() if key in known}
    small = {key: value for key, value in small.items() if key in BODY or stated.get(key, value) is not None}
    small["initializer_range"] = BODY["initializer_range"]
    if stated.get("kv_lora_rank"):
        small |= LATENT_HEADS
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(stated.get(key), list):
            kinds = list(dict.fromkeys(stated[key]))
            small[key] = [kinds[layer % len(kinds)] for layer in range(BODY["num_hidden_layers"])]
    if "mrope_section" in str(stated) or text.model_type.startswith(MROPE_HOLDERS):
        small["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    return small


def _small_part(name: str, part: Json) -> Json:
    """Return small values for a part for images or audio."""
    sizes = AUDIO if "audio" in name or "speech" in name else {**SIZES, **VISION}
    kind = {"model_type": part["model_type"]} if part.get("model_type") else {}
    return kind | {key: value for key, value in sizes.items() if key in part and part[key] is not None}
