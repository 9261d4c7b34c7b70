"""Drafts of DFlash 2 and DSpark with one fault."""

import numpy as np

from dflash_testing.rule_cases.base import SLIDING, Case, add, both, edit, nested, top, without

D2, DS, DS_SPEC = "dflash2", "dspark", "dspark-speculators"

CASES = [
    Case(rule="C19", key="is_causal", severity="warning", dialect=D2, shape=SLIDING, config=without("is_causal")),
    Case(rule="C02", key="dflash_config.projector_type", dialect=DS, config=nested(projector_type="hydra")),
    Case(
        rule="C50", key="sample_from_anchor", names=("vllm 0.33 assumes anchor-first", "sglang"), severity="warning",
        dialect=DS, config=without("sample_from_anchor"), engines="vllm,sglang",
    ),
    Case(
        rule="C50", key="sample_from_anchor", names=("vllm 0.33 assumes fill-in",), severity="warning",
        dialect=DS_SPEC, config=without("sample_from_anchor"), engines="vllm,llama.cpp",
    ),
    Case(
        rule="C04", key="speculators_config.proposal_methods[0].speculative_tokens", names=("4", "3"),
        dialect=DS_SPEC, config=top(sample_from_anchor=False), engines="vllm",
    ),
    Case(
        rule="N01", at="model.safetensors", dialect=D2,
        tensors=lambda arrays: arrays.pop("layers.0.mlp_conv.base_kernel"),
    ),
    Case(rule="N02", at="model.safetensors:layers.0.mlp.up_proj.bias", tensors=add("layers.0.mlp.up_proj.bias", 24)),
    Case(
        rule="N02", at="model.safetensors:markov_head.gate_proj.bias", dialect=DS,
        tensors=add("markov_head.gate_proj.bias", 3),
    ),
    Case(
        rule="N04", at="model.safetensors:candidate_selector.predecessor_codebook", names=("32", "2", "3"), dialect=D2,
        tensors=edit("candidate_selector.predecessor_codebook", lambda array: np.ascontiguousarray(array[:, :2])),
    ),
    Case(rule="S34", key="architectures", names=("DFlash2DraftModel", "vllm 0.27"), dialect=D2, engines="vllm@0.27"),
    Case(
        rule="S34", key="architectures", names=("DFlashDraftModel", "vllm 0.33"), dialect=D2, engines="vllm",
        config=top(architectures=["DFlashDraftModel"]),
    ),
    Case(rule="S34", key="speculators_model_type", names=("dflash2", "vllm 0.28"), dialect="dflash2-speculators",
         engines="vllm@0.28"),
    Case(rule="S34", key="architectures", names=("Qwen3DSparkModel", "transformers 5.23"), dialect=DS,
         engines="transformers"),
    Case(
        rule="S34", key="architectures", names=("DSparkDraftModel", "vllm 0.28"), dialect=DS, engines="vllm@0.28",
        config=top(architectures=["DSparkDraftModel"]),
    ),
    Case(
        rule="S35", key="dflash_config.sample_from_anchor", names=("vllm 0.33 serves anchor-first", "fill-in"),
        dialect=DS, engines="vllm", config=both(without("sample_from_anchor"), nested(sample_from_anchor=False)),
    ),
    Case(
        rule="S35", key="sample_from_anchor", names=("vllm 0.26 serves anchor-first", "fill-in"), dialect=DS,
        engines="vllm@0.26", config=top(sample_from_anchor=False),
    ),
    Case(
        rule="S35", key="sample_from_anchor", names=("vllm 0.26 serves fill-in", "anchor-first"), dialect=DS_SPEC,
        engines="vllm@0.26",
    ),
    Case(
        rule="S35", key="dflash_config.sample_from_anchor", names=("sglang 0.5.23",), dialect=DS, engines="sglang",
        config=both(without("sample_from_anchor"), nested(sample_from_anchor=False)),
    ),
    Case(
        rule="S07", key="sliding_window_non_causal", names=("vllm 0.33", "2", "0"), dialect=DS_SPEC, shape=SLIDING,
        engines="vllm",
    ),
    Case(
        rule="S36", key="markov_head_type", names=("'gated'",), dialect=DS, engines="vllm",
        config=top(markov_head_type="gated"),
    ),
    Case(
        rule="S37", key="markov_rank", dialect=DS, engines="vllm",
        config=both(without("markov_rank"), nested(markov_rank=3)),
    ),
    Case(
        rule="S38", key="confidence_head_with_markov", dialect=DS, engines="vllm",
        config=both(without("confidence_head_with_markov"), nested(confidence_head_with_markov=True)),
    ),
    Case(
        rule="S39", key="markov_rank", names=("0",), dialect=DS, engines="sglang",
        config=top(markov_rank=0, confidence_head_with_markov=False),
    ),
    Case(
        rule="S39", key="markov_head_type", names=("missing",), dialect=DS, engines="sglang",
        config=without("markov_head_type"),
    ),
    Case(
        rule="S40", key="markov_head_type", names=("rnn",), dialect=DS, engines="sglang",
        config=top(markov_head_type="rnn", sample_from_anchor=False),
    ),
    Case(
        rule="S41", key="dspark_draft_topk", names=("5",), dialect=DS, engines="sglang",
        config=top(dspark_draft_topk=5),
    ),
    Case(
        rule="S21", key="dflash_config.output_multiplier", names=("0.2",), dialect=DS, engines="sglang",
        config=nested(output_multiplier=0.2),
    ),
    Case(rule="S05", key="logit_scale", names=("3",), dialect=D2, engines="vllm", config=top(logit_scale=3.0)),
    Case(rule="S02", key="block_size", names=("4", "5"), dialect=DS, engines="vllm", k=5),
    Case(rule="S08", key="block_size", names=("4", "3"), severity="warning", dialect=DS, engines="sglang", k=3),
]  # fmt: skip
