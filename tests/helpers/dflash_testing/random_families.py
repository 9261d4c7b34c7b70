"""Random configs of native families without recurrent layers: odd sizes, windows, ropes, experts, tied heads."""

import random
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]
Chance = random.Random

WINDOWS = (2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 64, 200)
"""Windows around the widths of blocks and pages. transformers' cache does not slide with a window of 1."""


def draw_gpt_oss(chance: Chance) -> tuple[str, Json]:
    """A gpt-oss config. With a width of `PACKED_WIDTHS` its experts may be packed."""
    drawn = {
        **_draw_sizes(chance), **_draw_windows(chance), **_draw_experts(chance, "num_local_experts"),
        "rope_parameters": _draw_rope(chance, "default", "yarn", "linear", "llama3"),
        "attention_bias": chance.random() < 0.7, "swiglu_limit": chance.choice((7.0, 0.4)),
    }  # fmt: skip
    if chance.random() < 0.4:
        drawn |= {key: chance.choice(PACKED_WIDTHS) for key in ("hidden_size", "intermediate_size")}
    return "gpt_oss", drawn


PACKED_WIDTHS = (32, 64, 96)


def is_packed(model_type: str, body: Json) -> bool:
    """Whether a model's experts are packed."""
    return model_type == "gpt_oss" and {body["hidden_size"], body["intermediate_size"]} <= {*PACKED_WIDTHS}


def draw_gemma4(chance: Chance) -> tuple[str, Json]:
    """A Gemma 4 config, some with inputs of each layer, which transformers' code runs."""
    drawn = {
        **_draw_sizes(chance), **_draw_windows(chance), "final_logit_softcapping": chance.choice((None, 2.0, 30.0)),
        "global_head_dim": chance.choice((2, 4, 8, 16, 24)), "attention_k_eq_v": chance.random() < 0.5,
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": chance.choice((0, 0, 0, 6)),
        "hidden_activation": chance.choice(("gelu_pytorch_tanh", "silu")),
        "rope_parameters": {
            "full_attention": _draw_rope(chance, "proportional", "default", "linear", "yarn"),
            "sliding_attention": _draw_rope(chance, "default", "linear", "llama3"),
        },
    }  # fmt: skip
    fitting = [count for count in (1, 2, 3) if drawn["num_attention_heads"] % count == 0]
    drawn["num_global_key_value_heads"] = chance.choice((None, *fitting))
    drawn["vocab_size_per_layer_input"] = drawn["vocab_size"]
    drawn["layer_types"][-1] = "full_attention"
    if chance.random() < 0.3:
        return "gemma4_unified_text", drawn
    if chance.random() < 0.5:
        drawn |= _draw_experts(chance, "num_experts", "top_k_experts")
        is_native = not drawn["hidden_size_per_layer_input"]  # transformers' experts require aligned widths
        drawn |= {"enable_moe_block": True, "moe_intermediate_size": chance.choice((8, 9 if is_native else 12, 16))}
    return "gemma4_text", drawn


def draw_dense(chance: Chance) -> tuple[str, Json]:
    """A config of Qwen3, Qwen2, Llama or Mistral, or of Qwen3 with experts."""
    kind = chance.choice(("qwen3", "qwen2", "llama", "mistral", "qwen3_moe"))
    drawn = {
        **_draw_sizes(chance), "rope_parameters": _draw_rope(chance, "default", "linear", "yarn", "llama3"),
        "num_hidden_layers": chance.randint(2, 5), "hidden_act": chance.choice(("silu", "gelu_pytorch_tanh")),
        "attention_bias": chance.random() < 0.4,
    }  # fmt: skip
    if kind in ("llama", "qwen2", "mistral"):  # transformers requires that heads divide the width
        drawn |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": chance.choice((1, 2, 4))}
    if kind == "llama":
        drawn["mlp_bias"] = chance.random() < 0.4
    if kind in ("qwen2", "mistral"):
        del drawn["attention_bias"]
    if kind == "qwen2" or (kind == "qwen3" and chance.random() < 0.7):
        drawn |= {**_draw_windows(chance), "use_sliding_window": True, "max_window_layers": 0}
    if kind == "mistral":
        drawn["sliding_window"] = chance.choice((None, *WINDOWS))
    if kind == "qwen3_moe":
        drawn |= {
            **_draw_experts(chance, "num_experts"), "moe_intermediate_size": chance.choice((8, 9, 16)),
            "norm_topk_prob": chance.random() < 0.5, "decoder_sparse_step": chance.choice((1, 2)),
            "mlp_only_layers": chance.choice(([], [0])), "use_sliding_window": chance.random() < 0.4,
            "sliding_window": chance.choice(WINDOWS),
        }  # fmt: skip
    return kind, drawn


FAMILIES: Mapping[str, Callable[[Chance], tuple[str, Json]]] = {
    "dense": draw_dense, "gemma4": draw_gemma4, "gpt_oss": draw_gpt_oss,
}  # fmt: skip


def _draw_sizes(chance: Chance) -> Json:
    num_kv_heads = chance.choice((1, 2, 3, 4))
    return {
        "hidden_size": chance.choice((16, 24, 32, 40)),
        "intermediate_size": chance.choice((7, 16, 33, 40)),
        "vocab_size": chance.choice((61, 97, 130)),
        "tie_word_embeddings": chance.random() < 0.4,
        "head_dim": chance.choice((2, 4, 6, 8, 10, 16, 32)),
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_kv_heads * chance.choice((1, 2, 3, 5)),
    }


def _draw_windows(chance: Chance) -> Json:
    kinds = chance.choice((["sliding_attention"], ["full_attention"], ["sliding_attention", "full_attention"]))
    layers = [chance.choice(kinds) for _ in range(chance.randint(2, 5))]
    return {"layer_types": layers, "num_hidden_layers": len(layers), "sliding_window": chance.choice(WINDOWS)}


def _draw_experts(chance: Chance, count_key: str, chosen_key: str = "num_experts_per_tok") -> Json:
    count = chance.choice((1, 2, 3, 5, 8))
    return {count_key: count, chosen_key: chance.choice((1, count, chance.randint(1, count)))}


def _draw_rope(chance: Chance, *kinds: str) -> Json:
    drawn: Json = {"rope_type": chance.choice(kinds), "rope_theta": chance.choice((100.0, 10_000.0, 1e6))}
    kind = drawn["rope_type"]
    if kind != "default":
        drawn["factor"] = chance.choice((1.5, 2.0, 4.0, 8.0))
    if kind in ("yarn", "llama3"):
        drawn["original_max_position_embeddings"] = chance.choice((16, 32, 64, 96))
    if kind == "llama3":
        drawn |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "proportional":
        drawn["partial_rotary_factor"] = chance.choice((0.25, 0.3, 0.5, 1.0))
    if kind == "yarn":
        optional = {"beta_fast": 4.0, "truncate": False, "attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 0.8}
        drawn |= {key: value for key, value in optional.items() if chance.random() < 0.4}
    return drawn
