"""Faults in what the config says of the checkpoint, the block, the taps and the mask."""

from dataclasses import replace

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import SPEC, VERIFIER, Case, method, nested, nothing, outer, text, top, without

CASES = [
    Case(rule="C01", message="DFlash 2", config=nested(conv_kernel_size=2)),
    Case(rule="C01", message="not a DFlash draft", config=without("architectures", "dflash_config")),
    Case(rule="C01", message="found 'medusa'", dialect=SPEC, config=top(speculators_model_type="medusa")),
    Case(rule="C03", message="block_size 4", config=nested(block_size=8)),
    Case(rule="C03", message="missing", config=without("block_size")),
    Case(rule="C03", message="found True", config=top(block_size=True)),
    Case(
        rule="C03", message="at most the draft's", config=top(block_size=10**12),
    ),
    Case(rule="C47", message="assume 128 and the weights have 8", config=without("head_dim")),
    Case(rule="C03", message="expected an integer of at least 2", dialect=SPEC, config=top(block_size=1)),
    Case(
        rule="C04", message="4, expected 3 for a block of 4", dialect=SPEC, config=method(speculative_tokens=4),
        engines="vllm",
    ),
    Case(
        rule="C04", message="4, expected 3", severity="warning", dialect=SPEC, config=method(speculative_tokens=4),
    ),
    Case(rule="C05", message="engines would guess [1, 1]", config=without("target_layer_ids", inside="dflash_config")),
    Case(rule="C05", message="found [0, '2']", config=nested(target_layer_ids=[0, "2"])),
    Case(rule="C05", message="missing", dialect=SPEC, config=top(aux_hidden_state_layer_ids=None)),
    Case(rule="C06", message="layer 4 is outside the target's layers 0..3", config=nested(target_layer_ids=[0, 4])),
    Case(rule="C06", message="0 is outside", dialect=SPEC, config=top(aux_hidden_state_layer_ids=[0, 2])),
    Case(rule="C07", message="not in ascending order", engines="vllm", config=nested(target_layer_ids=[2, 0])),
    Case(rule="C07", message="repeats a layer", engines="sglang", config=nested(target_layer_ids=[2, 2])),
    Case(rule="C08", message="[0, 2], expected [1, 3]", config=top(eagle_aux_hidden_state_layer_ids=[0, 2])),
    Case(
        rule="C09", message="usual native list", severity="warning", dialect=SPEC,
        shape=replace(support.SMALL, taps=(0, 32), target_layers=36), target=nothing,
    ),
    Case(rule="C10", message="last of 4", severity="warning", config=nested(target_layer_ids=[0, 3])),
    Case(rule="C12", message="null", config=nested(mask_token_id=None)),
    Case(rule="C12", message="missing", config=without("mask_token_id", inside="dflash_config")),
    Case(rule="C12", message="found True", dialect=SPEC, config=top(mask_token_id=True)),
    Case(rule="C12", message="outside the vocabulary of 32", config=nested(mask_token_id=32)),
    Case(rule="C13", message="different values", config=top(mask_token_id=30)),
    Case(rule="C14", message="also eos_token_id", severity="warning", config=top(eos_token_id=[2, 31])),
    Case(rule="C28", message="true", severity="info", config=top(tie_word_embeddings=True)),
    Case(rule="C37", message="found 64, but hidden_size is 16", severity="warning", config=top(target_hidden_size=64)),
    Case(rule="C37", message="found 64, but", engines="sglang", config=top(target_hidden_size=64)),
    Case(rule="C29", message="0.2", severity="warning", config=nested(output_multiplier=0.2)),
    Case(rule="C30", message="'qwen3'", dialect=SPEC, config=top(model_type="qwen3"), engines="vllm"),
    Case(rule="C30", message="'qwen3'", severity="warning", dialect=SPEC, config=top(model_type="qwen3")),
    Case(rule="C31", message="missing", dialect=SPEC, config=without("aux_hidden_state_layer_ids")),
    Case(rule="C31", message="no speculative_tokens", dialect=SPEC, config=outer(proposal_methods=[])),
    Case(rule="C31", message="no name_or_path", dialect=SPEC, config=outer(verifier={})),
    Case(rule="C32", message="missing", config=without("hidden_size")),
    Case(rule="C32", message="missing", severity="warning", config=without("head_dim")),
    Case(rule="C32", message="decoder config", dialect=SPEC, config=top(transformer_layer_config=None)),
    Case(rule="C33", message="is none of", severity="warning", dialect=SPEC, config=outer(default_proposal_method="x")),
    Case(
        rule="C33", message="2 entries", severity="warning", dialect=SPEC,
        config=lambda config: config["speculators_config"]["proposal_methods"].append({"proposal_type": "other"}),
    ),
    Case(
        rule="C34", message="not a hub repository", severity="warning", dialect=SPEC,
        config=outer(verifier={"name_or_path": "/data/models/target", **VERIFIER}),
    ),
    Case(
        rule="C34", message="not a hub repository", dialect=SPEC, engines="vllm",
        config=outer(verifier={"name_or_path": "", **VERIFIER}),
    ),
    Case(rule="C35", message="also predicts at the anchor", dialect=SPEC, config=top(sample_from_anchor=True)),
    Case(rule="C35", message="also predicts at the anchor", config=nested(sample_from_anchor=True)),
    Case(
        rule="C36", message="Automodel", severity="warning", config=top(architectures=["Qwen3DFlashDraftModel"])
    ),

    Case(rule="C00", message="attention_bias: found 'yes'", config=top(attention_bias="yes")),
    Case(rule="C48", message="true: attention sinks", config=top(add_swa_attention_sink_bias=True)),
    Case(rule="C48", message="4: rope over a part of each head", config=top(rope_dim=4)),
    Case(rule="C02", message="'hydra', which is not a DFlash projector", config=nested(projector_type="hydra")),
    Case(
        rule="C36", message="Qwen3ForCausalLM; expected DFlashDraftModel", engines="vllm",
        config=top(architectures=["Qwen3ForCausalLM"]),
    ),
    Case(rule="C36", message="no architecture", engines="sglang", config=without("architectures")),
    Case(rule="C37", message="found 64, but", engines="llama.cpp", config=top(target_hidden_size=64)),
    Case(rule="C43", message="found 0", config=top(rms_norm_eps=0)),
    Case(rule="C43", message="the usual value is 1e-6", severity="warning", config=top(rms_norm_eps=0.5)),
    Case(rule="C44", message="only SGLang reads", engines="vllm", config=top(use_gemma_norm=True)),
    Case(
        rule="C45", message="one more than the usual list for 36 layers", severity="warning",
        shape=replace(support.SMALL, taps=(2, 18, 34), target_layers=36, layers=3, windows=(None,) * 3),
    ),
    Case(rule="S18", message="duplicate key 'a'", spoil=text("config.json", '{"a": 1, "a": 2}')),
    Case(rule="S18", message="NaN is not JSON", spoil=text("config.json", '{"a": NaN}')),
    Case(rule="S19", message="not found", spoil=lambda path: (path / "config.json").unlink()),
    Case(rule="S19", message="no *.safetensors", spoil=lambda path: (path / "model.safetensors").unlink()),
]  # fmt: skip
