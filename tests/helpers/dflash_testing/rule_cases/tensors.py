"""Faults in the weights' files and headers."""

import numpy as np

from dflash_testing.rule_cases.base import Case, add, cut, fuse, nothing, rename, sharded, top, without

CASES = [
    Case(
        rule="N01", at="model.safetensors", names=("layers.1.self_attn.k_norm.weight",),
        tensors=without("layers.1.self_attn.k_norm.weight"),
    ),
    Case(rule="N02", at="model.safetensors:optimizer.state", names=("unexpected",), tensors=add("optimizer.state", 2)),
    Case(
        rule="N02", at="model.safetensors:layers.0.self_attn.attention_sink_bias", names=("unexpected",),
        tensors=add("layers.0.self_attn.attention_sink_bias", 4),
    ),
    Case(
        rule="N02", at="model.safetensors:layers.0.mlp.experts.0.up_proj.weight", names=("unexpected",),
        tensors=add("layers.0.mlp.experts.0.up_proj.weight", 24, 16),
    ),
    Case(rule="N02", at="model.safetensors:lm_head.weight", severity="warning", tensors=add("lm_head.weight", 32, 16)),
    Case(rule="N03", at="model.safetensors", names=("'model.'",), severity="warning", tensors=rename("", "model.")),
    Case(rule="N03", at="model.safetensors", names=("'model.'",), engines="vllm", tensors=rename("", "model.")),
    Case(
        rule="N03", at="model.safetensors", names=("'dflash_module.'",), engines="sglang",
        tensors=rename("", "dflash_module."),
    ),
    Case(
        rule="N23", at="model.safetensors:encoder.fc.weight", names=("1",), engines="transformers",
        tensors=rename("fc.", "encoder.fc."),
    ),
    Case(
        rule="N04", at="model.safetensors:fc.weight", names=("[16, 48]", "[16, 32]", "2", "16"),
        tensors=add("fc.weight", 16, 48),
    ),
    Case(
        rule="N04", at="model.safetensors:layers.0.self_attn.q_norm.weight", names=("[9]", "[8]"),
        tensors=add("layers.0.self_attn.q_norm.weight", 9),
    ),
    Case(rule="N06", at="model.safetensors", names=("[0, 1, 2]",), tensors=add("layers.2.input_layernorm.weight", 16)),
    Case(
        rule="N07", at="model.safetensors:layers.0.self_attn.q_proj.bias", names=("attention_bias", "true"),
        tensors=add("layers.0.self_attn.q_proj.bias", 32),
    ),
    Case(rule="N01", at="model.safetensors", names=("o_proj.bias",), config=top(attention_bias=True)),
    Case(
        rule="N09", at="model.safetensors", names=("24 F32", "1 F64"), severity="warning",
        tensors=add("norm.weight", 16, dtype=np.float64),
    ),
    Case(
        rule="N09", at="model.safetensors", names=("float16",),
        tensors=lambda arrays: arrays.update({name: item.astype(np.float16) for name, item in arrays.items()}),
    ),
    Case(rule="N10", key="dtype", names=("bfloat16", "F32"), severity="warning", config=top(dtype="bfloat16")),
    Case(
        rule="N11", at="model.safetensors", names=("U8",),
        tensors=add("layers.0.mlp.up_proj.weight", 24, 16, dtype=np.uint8),
    ),
    Case(
        rule="N11", key="quantization_config", severity="warning",
        config=top(quantization_config={"quant_method": "fp4"}),
    ),
    Case(rule="N05", at="model.safetensors:fc.weight", names=("24", "48"), target=top(hidden_size=24)),
    Case(
        rule="N08", at="model.safetensors:layers.0.mlp.gate_up_proj.weight", names=("4",), engines="transformers",
        tensors=fuse,
    ),
    Case(
        rule="N12", at="model.safetensors.index.json", names=("model-00002-of-00002.safetensors",),
        spoil=sharded(nothing, drop=True),
    ),
    Case(
        rule="N12", at="model.safetensors.index.json", names=("'../elsewhere.safetensors'",),
        spoil=sharded(lambda index: index["weight_map"].update({"norm.weight": "../elsewhere.safetensors"})),
    ),
    Case(
        rule="N12", at="model.safetensors.index.json", names=("missing", "ghost"),
        spoil=sharded(lambda index: index["weight_map"].update({"ghost": "model-00001-of-00002.safetensors"})),
    ),
    Case(rule="N15", at="mask_embedding.pt", severity="warning", files={"mask_embedding.pt": ""}),
    Case(rule="N15", at="mask_embedding.safetensors", engines="vllm", files={"mask_embedding.safetensors": ""}),
    Case(rule="N16", at="model.safetensors", names=("4000",), spoil=cut("model.safetensors", 4000)),
    Case(rule="N16", at="model.safetensors", names=("3", "8"), spoil=cut("model.safetensors", 3)),
    Case(
        rule="N20", at="model.safetensors.index.json:metadata.total_size", names=("7",), severity="info",
        spoil=sharded(lambda index: index.update(metadata={"total_size": 7})),
    ),
    Case(
        rule="N21", at="old.safetensors", severity="warning",
        spoil=lambda path: (path / "old.safetensors").write_bytes((path / "model.safetensors").read_bytes()),
    ),
    Case(rule="N22", at="model.safetensors:norm.weight", names=("[0]",), tensors=add("norm.weight", 0)),
    Case(rule="S16", at="draft.gguf", severity="info", files={"draft.gguf": ""}),
    Case(rule="S51", at="adapter_config.json", severity="warning", files={"adapter_config.json": "{}"}),
    Case(
        rule="S51", at="target adapter_model.safetensors", severity="warning", target=nothing,
        target_files={"adapter_model.safetensors": ""},
    ),
    Case(rule="S20", at="optimizer.pt", severity="info", files={"optimizer.pt": ""}),
]  # fmt: skip
