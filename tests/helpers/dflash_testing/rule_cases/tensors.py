"""Faults in the weights' files and headers."""

import numpy as np

from dflash_testing.rule_cases.base import Case, add, cut, fuse, nothing, rename, sharded, top, without

CASES = [
    Case(
        rule="N01", message="layers.1.self_attn.k_norm.weight; DFlash normalises queries and keys",
        tensors=without("layers.1.self_attn.k_norm.weight"),
    ),
    Case(rule="N02", message="unexpected: left over", tensors=add("optimizer.state", 2)),
    Case(rule="N02", message="attention sinks, which", tensors=add("layers.0.self_attn.attention_sink_bias", 4)),
    Case(rule="N02", message="experts, which", tensors=add("layers.0.mlp.experts.0.up_proj.weight", 24, 16)),
    Case(rule="N02", message="a copy", severity="warning", tensors=add("lm_head.weight", 32, 16)),
    Case(rule="N03", message="start with 'model.'", severity="warning", tensors=rename("", "model.")),
    Case(rule="N03", message="start with 'model.'", engines="vllm", tensors=rename("", "model.")),
    Case(rule="N03", message="start with 'dflash_module.'", engines="sglang", tensors=rename("", "dflash_module.")),
    Case(rule="N23", message="another name", engines="transformers", tensors=rename("fc.", "encoder.fc.")),
    Case(rule="N04", message="[16, 48], expected [16, 32] = 2 tapped layers x 16", tensors=add("fc.weight", 16, 48)),
    Case(rule="N04", message="[9], expected [8]", tensors=add("layers.0.self_attn.q_norm.weight", 9)),
    Case(rule="N06", message="found the layers [0, 1, 2]", tensors=add("layers.2.input_layernorm.weight", 16)),
    Case(rule="N07", message="attention_bias is not true", tensors=add("layers.0.self_attn.q_proj.bias", 32)),
    Case(rule="N01", message="o_proj.bias", config=top(attention_bias=True)),
    Case(rule="N09", message="mixed", severity="warning", tensors=add("norm.weight", 16, dtype=np.float64)),
    Case(
        rule="N09", message="float16",
        tensors=lambda arrays: arrays.update({name: item.astype(np.float16) for name, item in arrays.items()}),
    ),
    Case(rule="N10", message="bfloat16, but the weights are F32", severity="warning", config=top(dtype="bfloat16")),
    Case(rule="N11", message="packed weights (U8)", tensors=add("layers.0.mlp.up_proj.weight", 24, 16, dtype=np.uint8)),
    Case(
        rule="N11", message="quantised", severity="warning", config=top(quantization_config={"quant_method": "fp4"}),
    ),

    Case(rule="N05", message="expected 2 tapped layers x the target's 24 = 48", target=top(hidden_size=24)),
    Case(
        rule="N08", message="fused projections: 4", engines="transformers", tensors=fuse,
    ),
    Case(rule="N12", message="names model-00002-of-00002.safetensors", spoil=sharded(nothing, drop=True)),
    Case(
        rule="N12", message="expected a file beside the index",
        spoil=sharded(lambda index: index["weight_map"].update({"norm.weight": "../elsewhere.safetensors"})),
    ),
    Case(
        rule="N12", message="missing tensors: ghost",
        spoil=sharded(lambda index: index["weight_map"].update({"ghost": "model-00001-of-00002.safetensors"})),
    ),
    Case(rule="N15", message="in a pickle file", severity="warning", files={"mask_embedding.pt": ""}),
    Case(rule="N15", message="no engine looks for", engines="vllm", files={"mask_embedding.safetensors": ""}),
    Case(rule="N16", message="truncated", spoil=cut("model.safetensors", 4000)),
    Case(rule="N16", message="not a safetensors file", spoil=cut("model.safetensors", 3)),
    Case(
        rule="N20", message="found 7, but the tensors take", severity="info",
        spoil=sharded(lambda index: index.update(metadata={"total_size": 7})),
    ),
    Case(
        rule="N21", message="not one of the files", severity="warning",
        spoil=lambda path: (path / "old.safetensors").write_bytes((path / "model.safetensors").read_bytes()),
    ),
    Case(rule="N22", message="has no elements", tensors=add("norm.weight", 0)),
    Case(rule="S16", message="a GGUF file", severity="info", files={"draft.gguf": ""}),
    Case(rule="S20", message="left over from training", severity="info", files={"optimizer.pt": ""}),
]  # fmt: skip
