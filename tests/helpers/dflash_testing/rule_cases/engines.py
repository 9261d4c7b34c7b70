"""Drafts that one engine serves in another way than they were trained."""

from dataclasses import replace

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import MIXED, SLIDING, SPEC, Case, add, both, nested, nothing, top, without

SIX_HEADS = replace(support.SMALL, heads=6)
THREES = replace(support.SMALL, heads=6, kv_heads=3)
INNER = replace(support.SMALL, inner=26)

CASES = [
    Case(rule="S52", key="num_attention_heads", names=("4", "3"), engines="vllm", num_gpus=3),
    Case(rule="S52", key="num_key_value_heads", names=("2", "3"), engines="sglang", num_gpus=3, shape=SIX_HEADS),
    Case(rule="S52", key="intermediate_size", names=("26", "4"), engines="vllm,sglang", num_gpus=4, shape=INNER),
    Case(rule="S52", key="vocab_size", names=("32", "64", "3"), engines="vllm", num_gpus=3, shape=THREES),
    Case(
        rule="S52", at="target config.json:num_attention_heads", names=("6", "4"), engines="vllm,sglang", num_gpus=4,
        target=top(num_attention_heads=6),
    ),
    Case(
        rule="S53", key="num_key_value_heads", names=("2", "4"), severity="info", engines="vllm,sglang", num_gpus=4,
    ),
    Case(
        rule="S32", key="num_target_layers", names=("transformers",), engines="transformers",
        config=without("num_target_layers"),
    ),
    Case(rule="S32", key="auto_map", names=("vllm 0.33",), engines="vllm", config=top(auto_map=None)),
    Case(
        rule="S33", key="rope_theta", names=("mrope", "default"), engines="vllm",
        config=top(rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}),
    ),
    Case(
        rule="S33", key="dflash_config.attention_sink_bias", names=("True", "False"), engines="vllm",
        config=top(add_swa_attention_sink_bias=True),
    ),
    Case(
        rule="S42", at="model.safetensors:fc.weight_scale", names=("vllm 0.33",), engines="vllm",
        config=top(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}),
    ),
    Case(
        rule="S43", key="quantization_config.quant_method", names=("fp8", "accelerate"), engines="transformers",
        config=top(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}),
    ),
    Case(rule="S27", key="logit_scale", names=("0.05",), engines="llama.cpp", config=top(logit_scale=0.05)),
    Case(rule="S09", key="speculators_config", names=("speculators", "native"), dialect=SPEC, engines="sglang"),
    Case(rule="S10", key="draft_vocab_size", names=("12", "32"), dialect=SPEC, shape=support.REDUCED, engines="sglang"),
    Case(rule="S01", at="config.json", names=("dflash",), severity="info", engines="vllm", name="draft"),
    Case(rule="S01", at="config.json", names=("eagle",), severity="info", engines="vllm", name="eagle3-vs-dflash"),
    Case(rule="S02", key="block_size", names=("3", "4"), engines="vllm", k=4),
    Case(rule="S02", key="block_size", names=("3", "2"), severity="warning", engines="vllm", k=2),
    Case(rule="S03", key="layer_types", severity="warning", engines="vllm", shape=MIXED),
    Case(
        rule="S04", at="model.safetensors:layers.0.mask_hidden", engines="vllm",
        tensors=add("layers.0.mask_hidden", 16),
    ),
    Case(
        rule="S05", key="dflash_config.output_multiplier", names=("0.2",), engines="vllm",
        config=nested(output_multiplier=0.2),
    ),
    Case(
        rule="S07", key="is_causal", names=("vllm 0.24", "0", "2"), engines="vllm@0.24",
        config=top(is_causal=True),
    ),
    Case(
        rule="S07", key="sliding_window_non_causal", names=("vllm 0.25", "0", "2"), engines="vllm@0.25", dialect=SPEC,
        shape=SLIDING,
        config=top(sliding_window_non_causal=False),
    ),
    Case(
        rule="S07", key="is_causal", names=("vllm 0.27", "0", "2"), engines="vllm@0.27",
        config=top(is_causal=True),
    ),
    Case(rule="S08", key="block_size", names=("4", "2", "3"), severity="warning", engines="sglang", k=2),
    Case(
        rule="S29", key="dflash_config.use_swa", names=("true",), engines="sglang",
        config=nested(use_swa=True, swa_window_size=16),
    ),
    Case(
        rule="S11", key="is_causal", names=("0", "2"), engines="sglang",
        config=both(without("is_causal"), nested(causal=True)),
    ),
    Case(
        rule="S12", key="dflash_config.target_layer_ids", names=("4", "qwen3"), engines="sglang", target=nothing,
        config=nested(target_layer_ids=[0, 3]),
    ),
    Case(rule="S13", key="block_size", names=("missing",), severity="warning", engines="transformers",
        config=both(without("block_size"), nested(block_size=4))),
    Case(rule="S14", key="speculators_config", names=("speculators", "native"), engines="transformers", dialect=SPEC),
    Case(rule="S14", key="speculators_config", names=("speculators", "native"), engines="llama.cpp", dialect=SPEC),
    Case(
        rule="S15", key="attention_bias", names=("true",), engines="llama.cpp",
        shape=replace(support.SMALL, bias=True),
    ),
    Case(
        rule="S17", key="draft_vocab_size", names=("12", "32"), engines="transformers", dialect=SPEC,
        shape=support.REDUCED,
    ),
    Case(
        rule="S21", key="dflash_config.input_embedding_scale", names=("3",), engines="sglang",
        config=nested(input_embedding_scale=3.0),
    ),
    Case(
        rule="S31", key="dflash_config.attention_sink_bias", names=("true",), engines="transformers",
        config=nested(attention_sink_bias=True),
    ),
    Case(
        rule="S22", at="target config.json:quantization_config", severity="warning", engines="vllm",
        target=top(quantization_config={"kv_cache_scheme": {"num_bits": 8}}),
    ),
    Case(
        rule="S22", at="target config.json:quantization_config", severity="warning", engines="vllm",
        target=top(text_config={**support.target_config(), "quantization_config": {"kv_cache_quant_algo": "FP8"}}),
    ),
    Case(
        rule="S23", at="target config.json:quantization_config", severity="warning", engines="sglang",
        target=top(quantization_config={"quant_method": "fp8"}),
    ),
    Case(
        rule="S30", at="target config.json:layer_types", names=("3", "4", "linear"), engines="transformers",
        target=top(layer_types=["linear_attention"] * 3 + ["full_attention"]),
    ),
    Case(
        rule="S24", key="is_causal", names=("0", "2"), engines="transformers",
        config=both(without("is_causal"), nested(causal=True)),
    ),
    Case(
        rule="S25", key="layer_types", names=("0", "2", "1"),
        severity="warning", engines="llama.cpp", shape=MIXED,
        config=without("is_causal"),
    ),
    Case(
        rule="S26", key="block_size", names=("4", "dflash_config"), severity="warning", engines="llama.cpp",
        config=both(without("block_size"), nested(block_size=4)),
    ),
    Case(
        rule="S27", key="dflash_config.input_embedding_scale", names=("3",), engines="llama.cpp",
        config=nested(input_embedding_scale=3.0),
    ),
    Case(
        rule="S46", key="is_causal", names=("0", "2"), engines="tensorrt-llm", config=top(is_causal=True),
    ),
    Case(
        rule="S47", key="dflash_config.input_embedding_scale", names=("3",), engines="tensorrt-llm",
        config=nested(input_embedding_scale=3.0),
    ),
    Case(
        rule="S48", key="dflash_config.attention_sink_bias", names=("true",), engines="tensorrt-llm",
        config=nested(attention_sink_bias=True),
    ),
    Case(
        rule="S49", key="target_layer_ids", names=("dflash_config",), severity="warning",
        engines="tensorrt-llm",
        config=both(lambda config: config["dflash_config"].pop("target_layer_ids"), top(target_layer_ids=[0, 2])),
    ),
    Case(
        rule="S50", key="quantization_config", names=("packed",), severity="warning", engines="tensorrt-llm",
        config=top(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}),
    ),
    Case(
        rule="S50", key="model_type", names=("llama", "qwen3"), severity="warning", engines="tensorrt-llm",
        config=top(model_type="llama"),
    ),
    Case(rule="S28", key="layer_types", names=("0.24",), engines="vllm@0.24", shape=SLIDING),
    Case(rule="S28", key="layer_types", names=("0.25",), engines="vllm@0.25", shape=MIXED),
]  # fmt: skip
