"""Faults in layers, windows, causality and rope."""

from dflash_testing.rule_cases.base import MIXED, SLIDING, SPEC, YARN, Case, body, both, nested, top, without

CASES = [
    Case(rule="C15", message="3 entries for 2 layers", config=top(layer_types=["full_attention"] * 3)),
    Case(rule="C15", message="'linear_attention'", config=top(layer_types=["full_attention", "linear_attention"])),
    Case(rule="C16", message="false, expected true", shape=SLIDING, config=top(use_sliding_window=False)),
    Case(rule="C16", message="missing, expected true", shape=SLIDING, config=without("use_sliding_window")),
    Case(rule="C16", message="found None", shape=SLIDING, config=top(sliding_window=None)),
    Case(
        rule="C17", message="true", severity="warning",
        config=nested(use_swa=True, swa_window_size=16, causal=False),
    ),
    Case(rule="C18", message="false, but dflash_config.causal is true", config=nested(causal=True)),
    Case(rule="C18", message="contradicts", dialect=SPEC, config=body(is_causal=True)),
    Case(rule="C19", message="missing", severity="warning", shape=SLIDING, config=without("is_causal")),
    Case(
        rule="C19", message="missing", severity="warning", shape=SLIDING, dialect=SPEC,
        config=without("sliding_window_non_causal"),
    ),
    Case(
        rule="C20", message="all 2 layers are full attention", dialect=SPEC, engines="vllm",
        config=top(sliding_window_non_causal=False),
    ),
    Case(
        rule="C20", message="false", severity="warning", dialect=SPEC, config=top(sliding_window_non_causal=False)
    ),
    Case(
        rule="C21", message="both sliding and full", dialect=SPEC, shape=MIXED, engines="vllm@0.33",
        config=top(sliding_window_non_causal=False),
    ),
    Case(
        rule="C21", message="both", severity="warning", dialect=SPEC, shape=MIXED, engines="sglang",
        config=top(sliding_window_non_causal=False),
    ),
    Case(rule="C22", message="missing", config=without("rope_theta")),
    Case(rule="C22", message="found 'big'", config=top(rope_theta="big")),
    Case(rule="C23", message="different values", config=top(rope_parameters={"rope_theta": 10000.0})),
    Case(rule="C23", message="rope_scaling.type linear", config=top(rope_scaling={**YARN, "type": "linear"})),
    Case(
        rule="C23", message="rope_parameters.factor 16.0, rope_scaling.factor 4.0",
        config=top(
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            rope_parameters={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
        ),
    ),
    Case(rule="C24", message="missing for rope type yarn", config=top(rope_scaling=YARN)),
    Case(rule="C26", message="0.25", severity="warning", config=top(partial_rotary_factor=0.25)),
    Case(rule="C27", message="found 'gelu'", engines="vllm", config=top(hidden_act="gelu")),
    Case(rule="C38", message="not a multiple of 3", config=top(num_key_value_heads=3)),
    Case(
        rule="C39", message="gpt_oss", severity="warning",
        config=lambda config: (config.pop("layer_types"), config.update(model_type="gpt_oss")),
    ),

    Case(
        rule="C20", message="false", dialect=SPEC, engines="vllm@0.26",
        config=top(sliding_window_non_causal=False),
    ),
    Case(rule="C40", message="found 'spiral'", config=top(rope_scaling={"rope_type": "spiral", "factor": 2.0})),
    Case(rule="C41", message="interleaved", severity="warning", config=top(is_neox_style=False)),
    Case(rule="C41", message="interleaved", engines="transformers", config=top(is_neox_style=False)),
    Case(
        rule="C42", message="missing, although use_sliding_window", severity="warning",
        config=both(without("layer_types"), top(use_sliding_window=True, sliding_window=16)),
    ),
    Case(
        rule="C46", message="found 4096, expected at most max_position_embeddings 128", severity="warning",
        config=top(rope_scaling={**YARN, "original_max_position_embeddings": 4096}),
    ),
    Case(
        rule="S06", message="2 layer types with different values",
        config=both(
            without("rope_theta"),
            top(rope_parameters={"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}),
        ),
    ),
]  # fmt: skip
