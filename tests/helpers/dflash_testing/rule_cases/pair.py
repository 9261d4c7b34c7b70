"""Drafts and targets that do not fit."""

import numpy as np

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import SPEC, VERIFIER, Case, add, nothing, outer, top, without

CASES = [
    Case(rule="C11", message="5, the target has 4 layers", config=top(num_target_layers=5), target=nothing),
    Case(rule="C11", message="missing", severity="warning", config=without("num_target_layers")),
    Case(
        rule="C25", message="64, the target's is 128", severity="warning", config=top(max_position_embeddings=64),
        target=nothing,
    ),
    Case(rule="P01", message="16, the target's is 24", target=top(hidden_size=24)),
    Case(rule="P01", message="64, the target's", dialect=SPEC, config=top(target_hidden_size=64), target=nothing),
    Case(rule="P02", message="32, the target's is 40", target=top(vocab_size=40)),
    Case(rule="P03", message="outside the target's 16 embeddings", target=top(vocab_size=16)),
    Case(rule="P03", message="stop token", severity="warning", target=top(eos_token_id=31)),
    Case(rule="P05", message="1000000.0, the target's is 10000.0", severity="warning", target=top(rope_theta=10000)),
    Case(
        rule="P06", message="names layer 2", target=top(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    ),
    Case(
        rule="P08", message="names other/model", severity="warning", dialect=SPEC, target=nothing,
        config=outer(verifier={"name_or_path": "other/model", **VERIFIER}),
    ),

    Case(
        rule="P04", message="31, the tokenizer's mask token '<|mask|>' is 30", severity="warning", target=nothing,
        target_files={
            "tokenizer_config.json": {"mask_token": "<|mask|>", "added_tokens_decoder": {"30": {"content": "<|mask|>"}}}
        },
    ),
    Case(
        rule="P09", message="'<eos>', the target's is '<end>'", severity="warning", target=nothing,
        files={"tokenizer_config.json": {"added_tokens_decoder": {"2": {"content": "<eos>"}}}},
        target_files={"tokenizer_config.json": {"added_tokens_decoder": {"2": {"content": "<end>"}}}},
    ),
    Case(rule="P10", message="this is a gemma3 target", severity="warning", target=top(model_type="gemma3")),
    Case(
        rule="P11", message="packed weights (U8)", severity="warning", target=nothing,
        target_tensors=add("lm_head.weight", 32, 8, dtype=np.uint8),
    ),
    Case(
        rule="P12", message="published: block 16", severity="info", target=nothing, target_name="Qwen/Qwen3-4B",
    ),
    Case(rule="P13", message="2: the target runs its layers", severity="warning", target=top(num_loops=2)),
    Case(
        rule="P13", message="2: the target runs its layers", severity="warning",
        target=top(llm_config={**support.target_config(), "num_loops": 2}),
    ),
    Case(rule="P14", message="float16", severity="warning", target=top(dtype="float16")),
    Case(
        rule="P15", message="[40, 16], the target's vocab_size is 32", target=nothing,
        target_tensors=add("model.embed_tokens.weight", 40, 16),
    ),
    Case(
        rule="P16", message="LlamaForCausalLM, the target is Qwen3", severity="warning", dialect=SPEC, target=nothing,
        config=outer(verifier={"name_or_path": "acme/target", "architectures": ["LlamaForCausalLM"]}),
    ),
    Case(
        rule="P17", message="not known to dflash: experts (num_experts)", severity="info",
        target=top(num_experts=8),
    ),
    Case(
        rule="P17", message="packed weights (quantization_config)", severity="warning",
        target=top(quantization_config={"quant_method": "fp8"}),
    ),
    Case(
        rule="P17", message="packed weights (the tensor", severity="warning", target=nothing,
        target_tensors=add("model.layers.0.mlp.up_proj.weight_scale", 1),
    ),
    Case(rule="P07", message="'qwen2' is not among", engines="sglang", target=top(model_type="qwen2")),
    Case(
        rule="P07", message="'mystery' is not among", severity="warning", engines="sglang",
        target=top(model_type="mystery"),
    ),
]  # fmt: skip
