"""Faults in the config keys of the checkpoint, the block, the taps and the mask."""

from dataclasses import replace

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import SPEC, VERIFIER, Case, method, nested, nothing, outer, text, top, without

CASES = [
    Case(rule="C01", key="architectures", names=("Domino", "gru_hidden_dim"), config=nested(gru_hidden_dim=2)),
    Case(rule="C01", key="architectures", names=("None",), config=without("architectures", "dflash_config")),
    Case(
        rule="C01", key="speculators_model_type", names=("'medusa'",), dialect=SPEC,
        config=top(speculators_model_type="medusa"),
    ),
    Case(rule="C03", key="block_size", names=("8", "4"), config=nested(block_size=8)),
    Case(rule="C03", key="block_size", names=("missing",), config=without("block_size")),
    Case(rule="C03", key="block_size", names=("True",), config=top(block_size=True)),
    Case(
        rule="C03", key="block_size", names=("128",), config=top(block_size=10**12),
    ),
    Case(rule="C47", key="head_dim", names=("128", "8"), config=without("head_dim")),
    Case(rule="C03", key="block_size", names=("2",), dialect=SPEC, config=top(block_size=1)),
    Case(
        rule="C04", key="speculators_config.proposal_methods[0].speculative_tokens", names=("4", "3"), dialect=SPEC,
        config=method(speculative_tokens=4),
        engines="vllm",
    ),
    Case(
        rule="C04", key="speculators_config.proposal_methods[0].speculative_tokens", names=("4", "3"),
        severity="warning", dialect=SPEC, config=method(speculative_tokens=4),
    ),
    Case(
        rule="C05", key="target_layer_ids", names=("[1, 1]",),
        config=without("target_layer_ids", inside="dflash_config"),
    ),
    Case(
        rule="C05", key="dflash_config.target_layer_ids", names=("[0, '2']",),
        config=nested(target_layer_ids=[0, "2"]),
    ),
    Case(
        rule="C05", key="aux_hidden_state_layer_ids", names=("missing",), dialect=SPEC,
        config=top(aux_hidden_state_layer_ids=None),
    ),
    Case(
        rule="C06", key="dflash_config.target_layer_ids[1]", names=("4", "0..3"),
        config=nested(target_layer_ids=[0, 4]),
    ),
    Case(
        rule="C06", key="aux_hidden_state_layer_ids[0]", names=("0",), dialect=SPEC,
        config=top(aux_hidden_state_layer_ids=[0, 2]),
    ),
    Case(
        rule="C07", key="dflash_config.target_layer_ids", names=("[2, 0]",), engines="vllm",
        config=nested(target_layer_ids=[2, 0]),
    ),
    Case(
        rule="C07", key="dflash_config.target_layer_ids", names=("[2, 2]",), engines="sglang",
        config=nested(target_layer_ids=[2, 2]),
    ),
    Case(
        rule="C08", key="eagle_aux_hidden_state_layer_ids", names=("[0, 2]", "[1, 3]"),
        config=top(eagle_aux_hidden_state_layer_ids=[0, 2]),
    ),
    Case(
        rule="C09", key="aux_hidden_state_layer_ids", names=("[1, 33]", "[2, 34]"), severity="warning", dialect=SPEC,
        shape=replace(support.SMALL, taps=(0, 32), target_layers=36), target=nothing,
    ),
    Case(
        rule="C10", key="dflash_config.target_layer_ids", names=("4",), severity="warning",
        config=nested(target_layer_ids=[0, 3]),
    ),
    Case(rule="C12", key="dflash_config.mask_token_id", names=("null",), config=nested(mask_token_id=None)),
    Case(rule="C12", key="mask_token_id", names=("missing",), config=without("mask_token_id", inside="dflash_config")),
    Case(rule="C12", key="mask_token_id", names=("True",), dialect=SPEC, config=top(mask_token_id=True)),
    Case(rule="C12", key="dflash_config.mask_token_id", names=("32", "vocabulary"), config=nested(mask_token_id=32)),
    Case(rule="C13", key="dflash_config.mask_token_id", names=("31", "30"), config=top(mask_token_id=30)),
    Case(
        rule="C14", key="mask_token_id", names=("eos_token_id",), severity="warning", config=top(eos_token_id=[2, 31]),
    ),
    Case(rule="C28", key="tie_word_embeddings", names=("true",), severity="info", config=top(tie_word_embeddings=True)),
    Case(
        rule="C37", key="target_hidden_size", names=("64", "hidden_size", "16"), severity="warning",
        config=top(target_hidden_size=64),
    ),
    Case(rule="C37", key="target_hidden_size", names=("64",), engines="sglang", config=top(target_hidden_size=64)),
    Case(
        rule="C29", key="dflash_config.output_multiplier", names=("0.2",), severity="warning",
        config=nested(output_multiplier=0.2),
    ),
    Case(
        rule="C30", key="model_type", names=("'qwen3'",), dialect=SPEC, config=top(model_type="qwen3"), engines="vllm",
    ),
    Case(
        rule="C30", key="model_type", names=("'qwen3'",), severity="warning", dialect=SPEC,
        config=top(model_type="qwen3"),
    ),
    Case(
        rule="C31", key="aux_hidden_state_layer_ids", names=("missing",), dialect=SPEC,
        config=without("aux_hidden_state_layer_ids"),
    ),
    Case(
        rule="C31", key="speculators_config.proposal_methods", names=("speculative_tokens",), dialect=SPEC,
        config=outer(proposal_methods=[]),
    ),
    Case(
        rule="C31", key="speculators_config.verifier", names=("name_or_path",), dialect=SPEC,
        config=outer(verifier={}),
    ),
    Case(rule="C32", key="hidden_size", names=("missing",), config=without("hidden_size")),
    Case(rule="C32", key="head_dim", names=("missing",), severity="warning", config=without("head_dim")),
    Case(
        rule="C32", key="transformer_layer_config", names=("missing",), dialect=SPEC,
        config=top(transformer_layer_config=None),
    ),
    Case(
        rule="C33", key="speculators_config.default_proposal_method", names=("'x'",), severity="warning", dialect=SPEC,
        config=outer(default_proposal_method="x"),
    ),
    Case(
        rule="C33", key="speculators_config.proposal_methods", names=("2",), severity="warning", dialect=SPEC,
        config=lambda config: config["speculators_config"]["proposal_methods"].append({"proposal_type": "other"}),
    ),
    Case(
        rule="C34", key="speculators_config.verifier.name_or_path", names=("/data/models/target",), severity="warning",
        dialect=SPEC,
        config=outer(verifier={"name_or_path": "/data/models/target", **VERIFIER}),
    ),
    Case(
        rule="C34", key="speculators_config.verifier.name_or_path", names=("''",), dialect=SPEC, engines="vllm",
        config=outer(verifier={"name_or_path": "", **VERIFIER}),
    ),
    Case(rule="C35", key="sample_from_anchor", names=("true",), dialect=SPEC, config=top(sample_from_anchor=True)),
    Case(rule="C35", key="dflash_config.sample_from_anchor", names=("true",), config=nested(sample_from_anchor=True)),
    Case(
        rule="C36", key="architectures", names=("Qwen3DFlashDraftModel",), severity="warning",
        config=top(architectures=["Qwen3DFlashDraftModel"]),
    ),
    Case(rule="C00", at="config.json", names=("attention_bias", "'yes'"), config=top(attention_bias="yes")),
    Case(rule="C48", key="add_swa_attention_sink_bias", names=("true",), config=top(add_swa_attention_sink_bias=True)),
    Case(rule="C48", key="rope_dim", names=("4",), config=top(rope_dim=4)),
    Case(rule="C02", key="dflash_config.projector_type", names=("'hydra'",), config=nested(projector_type="hydra")),
    Case(
        rule="C36", key="architectures", names=("Qwen3ForCausalLM", "DFlashDraftModel"), engines="vllm",
        config=top(architectures=["Qwen3ForCausalLM"]),
    ),
    Case(
        rule="C36", key="architectures", names=("DFlashDraftModel",), engines="sglang",
        config=without("architectures"),
    ),
    Case(rule="C37", key="target_hidden_size", names=("64",), engines="llama.cpp", config=top(target_hidden_size=64)),
    Case(rule="C43", key="rms_norm_eps", names=("0",), config=top(rms_norm_eps=0)),
    Case(rule="C43", key="rms_norm_eps", names=("0.5", "1e-6"), severity="warning", config=top(rms_norm_eps=0.5)),
    Case(rule="C44", key="use_gemma_norm", names=("true",), engines="vllm", config=top(use_gemma_norm=True)),
    Case(
        rule="C45", key="dflash_config.target_layer_ids", names=("[2, 18, 34]", "[1, 17, 33]", "36"),
        severity="warning",
        shape=replace(support.SMALL, taps=(2, 18, 34), target_layers=36, layers=3, windows=(None,) * 3),
    ),
    Case(
        rule="C49", key="dflash_config.thresh_head_direct_len", names=("thresh_head_direct_len",), severity="info",
        config=nested(thresh_head_direct_len=False),
    ),
    Case(
        rule="C49", key="dflash_config.is_causal", names=("is_causal",), severity="info",
        config=nested(is_causal=True),
    ),
    Case(
        rule="C24", key="rope_scaling.factor", names=("linear",),
        config=top(rope_scaling={"rope_type": "linear"}),
    ),
    Case(rule="S18", at="config.json", names=("'a'",), spoil=text("config.json", '{"a": 1, "a": 2}')),
    Case(rule="S18", at="config.json", names=("large",), spoil=text("config.json", '{"a": ' + "9" * 30 + "}")),
    Case(rule="S19", at="config.json", names=("not found",), spoil=lambda path: (path / "config.json").unlink()),
    Case(
        rule="S19", at="model.safetensors", names=("*.safetensors",),
        spoil=lambda path: (path / "model.safetensors").unlink(),
    ),
]  # fmt: skip
