"""Drafts and targets that do not fit each other."""

import numpy as np

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import SPEC, VERIFIER, Case, add, nothing, outer, top, without

CASES = [
    Case(rule="P18", at="target config.json:num_attention_heads", names=("4", "3"), target=nothing, num_gpus=3),
    Case(rule="C11", key="num_target_layers", names=("5", "4"), config=top(num_target_layers=5), target=nothing),
    Case(
        rule="C11", key="num_target_layers", names=("missing",), severity="warning",
        config=without("num_target_layers"),
    ),
    Case(
        rule="C25", key="max_position_embeddings", names=("64", "128"), severity="warning",
        config=top(max_position_embeddings=64),
        target=nothing,
    ),
    Case(rule="P01", key="hidden_size", names=("16", "24"), target=top(hidden_size=24)),
    Case(
        rule="P01", key="target_hidden_size", names=("64",), dialect=SPEC, config=top(target_hidden_size=64),
        target=nothing,
    ),
    Case(rule="P02", key="vocab_size", names=("32", "40"), target=top(vocab_size=40)),
    Case(rule="P03", key="mask_token_id", names=("16",), target=top(vocab_size=16)),
    Case(rule="P03", key="mask_token_id", names=("31",), severity="warning", target=top(eos_token_id=31)),
    Case(
        rule="P05", key="rope_theta", names=("1000000.0", "10000.0"), severity="warning", target=top(rope_theta=10000),
    ),
    Case(
        rule="P06", key="dflash_config.target_layer_ids", names=("2",),
        target=top(num_hidden_layers=2, layer_types=["full_attention"] * 2),
    ),
    Case(
        rule="P08", key="speculators_config.verifier.name_or_path", names=("other/model",), severity="warning",
        dialect=SPEC, target=nothing,
        config=outer(verifier={"name_or_path": "other/model", **VERIFIER}),
    ),
    Case(
        rule="P04", key="mask_token_id", names=("31", "'<|mask|>'", "30"), severity="warning", target=nothing,
        target_files={
            "tokenizer_config.json": {"mask_token": "<|mask|>", "added_tokens_decoder": {"30": {"content": "<|mask|>"}}}
        },
    ),
    Case(
        rule="P09", at="tokenizer_config.json:added_tokens_decoder.2", names=("'<eos>'", "'<end>'"),
        severity="warning", target=nothing,
        files={"tokenizer_config.json": {"added_tokens_decoder": {"2": {"content": "<eos>"}}}},
        target_files={"tokenizer_config.json": {"added_tokens_decoder": {"2": {"content": "<end>"}}}},
    ),
    Case(
        rule="P10", key="dflash_config.input_embedding_scale", names=("missing", "gemma3"), severity="warning",
        target=top(model_type="gemma3"),
    ),
    Case(
        rule="P11", at="target model.safetensors:lm_head.weight", names=("U8",), severity="warning", target=nothing,
        target_tensors=add("lm_head.weight", 32, 8, dtype=np.uint8),
    ),
    Case(
        rule="P12", key="dflash_config.target_layer_ids", names=("16",), severity="info", target=nothing,
        target_name="Qwen/Qwen3-4B",
    ),
    Case(rule="P13", at="target config.json:num_loops", names=("2",), severity="warning", target=top(num_loops=2)),
    Case(
        rule="P13", at="target config.json:num_loops", names=("2",), severity="warning",
        target=top(llm_config={**support.target_config(), "num_loops": 2}),
    ),
    Case(
        rule="P14", at="target config.json:dtype", names=("float16",), severity="warning", target=top(dtype="float16"),
    ),
    Case(
        rule="P15", at="target model.safetensors:model.embed_tokens.weight", names=("[40, 16]", "vocab_size", "32"),
        target=nothing,
        target_tensors=add("model.embed_tokens.weight", 40, 16),
    ),
    Case(
        rule="P16", key="speculators_config.verifier.architectures", names=("LlamaForCausalLM", "Qwen3ForCausalLM"),
        severity="warning", dialect=SPEC, target=nothing,
        config=outer(verifier={"name_or_path": "acme/target", "architectures": ["LlamaForCausalLM"]}),
    ),
    Case(
        rule="P17", at="target config.json:model_type", names=("over our pages",), severity="info",
        target=top(num_experts=8),
    ),
    Case(
        rule="P17", at="target config.json:model_type", names=("refused", "modelopt"), severity="info",
        target=top(quantization_config={"quant_method": "modelopt"}),
    ),
    Case(
        rule="P17", at="target config.json:model_type", names=("model.layers.0.mlp.up_proj.weight_scale",),
        severity="info",
        target=nothing,
        target_tensors=add("model.layers.0.mlp.up_proj.weight_scale", 1),
    ),
    Case(
        rule="P07", at="target config.json:model_type", names=("'qwen2'",), engines="sglang",
        target=top(model_type="qwen2"),
    ),
    Case(
        rule="P07", at="target config.json:model_type", names=("'mystery'",), severity="warning", engines="sglang",
        target=top(model_type="mystery"),
    ),
]  # fmt: skip
