"""Drafts that one engine serves otherwise than they were trained."""

from dataclasses import replace

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import MIXED, SLIDING, SPEC, Case, add, both, nested, nothing, top, without

CASES = [
    Case(rule="S09", message="speculators dialect", dialect=SPEC, engines="sglang"),
    Case(rule="S10", message="12 of the target's 32 ids", dialect=SPEC, shape=support.REDUCED, engines="sglang"),

    Case(rule="S01", message="does not contain dflash", severity="info", engines="vllm", name="draft"),
    Case(rule="S01", message="contains eagle", severity="info", engines="vllm", name="eagle3-vs-dflash"),
    Case(rule="S02", message="which drafts 3, but 4 are asked for", engines="vllm", k=4),
    Case(rule="S02", message="which drafts 3, but 2 are asked for", severity="warning", engines="vllm", k=2),
    Case(rule="S03", message="both sliding and full", severity="warning", engines="vllm", shape=MIXED),
    Case(rule="S04", message="vLLM asserts", engines="vllm", tensors=add("layers.0.mask_hidden", 16)),
    Case(rule="S05", message="0.2", engines="vllm", config=nested(output_multiplier=0.2)),
    Case(
        rule="S07", message="vllm 0.24 serves 0 of 2 layers causally, the config states 2", engines="vllm@0.24",
        config=top(is_causal=True),
    ),
    Case(
        rule="S07", message="vllm 0.25 serves 0 of 2", engines="vllm@0.25", dialect=SPEC, shape=SLIDING,
        config=top(sliding_window_non_causal=False),
    ),
    Case(
        rule="S07", message="vllm 0.27 serves 0 of 2 layers causally, the config states 2", engines="vllm@0.27",
        config=top(is_causal=True),
    ),
    Case(rule="S08", message="4, but 2 drafted tokens make a block of 3", severity="warning", engines="sglang", k=2),
    Case(rule="S29", message="true", engines="sglang", config=nested(use_swa=True, swa_window_size=16)),
    Case(
        rule="S11", message="serves 0 of 2 layers causally, the config states 2", engines="sglang",
        config=both(without("is_causal"), nested(causal=True)),
    ),
    Case(
        rule="S12", message="last of 4 layers of a qwen3", engines="sglang", target=nothing,
        config=nested(target_layer_ids=[0, 3]),
    ),
    Case(rule="S13", message="missing at the top level", severity="warning", engines="transformers",
        config=both(without("block_size"), nested(block_size=4))),
    Case(rule="S14", message="speculators dialect", engines="transformers", dialect=SPEC),
    Case(rule="S14", message="speculators dialect", engines="llama.cpp", dialect=SPEC),
    Case(rule="S15", message="true", engines="llama.cpp", shape=replace(support.SMALL, bias=True)),
    Case(rule="S17", message="12 of the target's 32 ids", engines="transformers", dialect=SPEC, shape=support.REDUCED),
    Case(rule="S21", message="3", engines="sglang", config=nested(input_embedding_scale=3.0)),
    Case(rule="S31", message="true", engines="transformers", config=nested(attention_sink_bias=True)),
    Case(
        rule="S22", message="quantised KV cache", severity="warning", engines="vllm",
        target=top(quantization_config={"kv_cache_scheme": {"num_bits": 8}}),
    ),
    Case(
        rule="S22", message="quantised KV cache", severity="warning", engines="vllm",
        target=top(text_config={**support.target_config(), "quantization_config": {"kv_cache_quant_algo": "FP8"}}),
    ),
    Case(
        rule="S23", message="the target is packed", severity="warning", engines="sglang",
        target=top(quantization_config={"quant_method": "fp8"}),
    ),
    Case(
        rule="S30", message="3 of 4 layers keep a state (linear)", engines="transformers",
        target=top(layer_types=["linear_attention"] * 3 + ["full_attention"]),
    ),
    Case(
        rule="S24", message="serves 0 of 2 layers causally, the config states 2", engines="transformers",
        config=both(without("is_causal"), nested(causal=True)),
    ),
    Case(
        rule="S25", message="serves 0 of 2 layers causally, the config states none and is read as 1",
        severity="warning", engines="llama.cpp", shape=MIXED,
        config=without("is_causal"),
    ),
    Case(
        rule="S26", message="4 in dflash_config", severity="warning", engines="llama.cpp",
        config=both(without("block_size"), nested(block_size=4)),
    ),
    Case(rule="S27", message="3", engines="llama.cpp", config=nested(input_embedding_scale=3.0)),
    Case(rule="S28", message="vllm 0.24 serves as full ones", engines="vllm@0.24", shape=SLIDING),
    Case(rule="S28", message="both sliding and full layers, which vllm 0.25", engines="vllm@0.25", shape=MIXED),
]  # fmt: skip
