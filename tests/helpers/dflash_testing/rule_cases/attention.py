"""Faults in layers, windows, causality and rope."""

from dflash_testing.rule_cases.base import MIXED, SLIDING, SPEC, YARN, Case, body, both, nested, top, without

CASES = [
    Case(rule="C15", key="layer_types", names=("3", "2"), config=top(layer_types=["full_attention"] * 3)),
    Case(
        rule="C15", key="layer_types", names=("'linear_attention'",),
        config=top(layer_types=["full_attention", "linear_attention"]),
    ),
    Case(
        rule="C16", key="use_sliding_window", names=("false", "true"), shape=SLIDING,
        config=top(use_sliding_window=False),
    ),
    Case(
        rule="C16", key="use_sliding_window", names=("missing", "true"), shape=SLIDING,
        config=without("use_sliding_window"),
    ),
    Case(rule="C16", key="sliding_window", names=("None",), shape=SLIDING, config=top(sliding_window=None)),
    Case(
        rule="C17", key="dflash_config.use_swa", names=("true",), severity="warning",
        config=nested(use_swa=True, swa_window_size=16, causal=False),
    ),
    Case(rule="C18", key="is_causal", names=("false", "dflash_config.causal", "true"), config=nested(causal=True)),
    Case(
        rule="C18", key="transformer_layer_config.is_causal", names=("true", "sliding_window_non_causal"),
        dialect=SPEC, config=body(is_causal=True),
    ),
    Case(
        rule="C19", key="is_causal", names=("missing",), severity="warning", shape=SLIDING,
        config=without("is_causal"),
    ),
    Case(
        rule="C19", key="sliding_window_non_causal", names=("missing",), severity="warning", shape=SLIDING,
        dialect=SPEC,
        config=without("sliding_window_non_causal"),
    ),
    Case(
        rule="C20", key="sliding_window_non_causal", names=("2",), dialect=SPEC, engines="vllm",
        config=top(sliding_window_non_causal=False),
    ),
    Case(
        rule="C20", key="sliding_window_non_causal", names=("false",), severity="warning", dialect=SPEC,
        config=top(sliding_window_non_causal=False),
    ),
    Case(
        rule="C21", key="sliding_window_non_causal", names=("false",), dialect=SPEC, shape=MIXED, engines="vllm@0.33",
        config=top(sliding_window_non_causal=False),
    ),
    Case(
        rule="C21", key="sliding_window_non_causal", names=("false",), severity="warning", dialect=SPEC, shape=MIXED,
        engines="sglang",
        config=top(sliding_window_non_causal=False),
    ),
    Case(rule="C22", key="rope_theta", names=("missing",), config=without("rope_theta")),
    Case(rule="C22", key="rope_theta", names=("'big'",), config=top(rope_theta="big")),
    Case(
        rule="C23", key="rope_theta", names=("rope_theta 1000000.0", "rope_parameters.rope_theta 10000.0"),
        config=top(rope_parameters={"rope_theta": 10000.0}),
    ),
    Case(
        rule="C23", key="rope_type", names=("rope_scaling.type linear",),
        config=top(rope_scaling={**YARN, "type": "linear"}),
    ),
    Case(
        rule="C23", key="factor", names=("rope_parameters.factor 16.0", "rope_scaling.factor 4.0"),
        config=top(
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            rope_parameters={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
        ),
    ),
    Case(
        rule="C24", key="rope_scaling.original_max_position_embeddings", names=("missing", "yarn"),
        config=top(rope_scaling=YARN),
    ),
    Case(
        rule="C26", key="partial_rotary_factor", names=("0.25",), severity="warning",
        config=top(partial_rotary_factor=0.25),
    ),
    Case(rule="C27", key="hidden_act", names=("'gelu'",), engines="vllm", config=top(hidden_act="gelu")),
    Case(rule="C38", key="num_attention_heads", names=("3",), config=top(num_key_value_heads=3)),
    Case(
        rule="C39", key="layer_types", names=("gpt_oss",), severity="warning",
        config=lambda config: (config.pop("layer_types"), config.update(model_type="gpt_oss")),
    ),
    Case(
        rule="C20", key="sliding_window_non_causal", names=("false",), dialect=SPEC, engines="vllm@0.26",
        config=top(sliding_window_non_causal=False),
    ),
    Case(
        rule="C40", key="rope_scaling.rope_type", names=("'spiral'",),
        config=top(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
    ),
    Case(rule="C41", key="is_neox_style", names=("false",), severity="warning", config=top(is_neox_style=False)),
    Case(rule="C41", key="is_neox_style", names=("false",), engines="transformers", config=top(is_neox_style=False)),
    Case(
        rule="C42", key="layer_types", names=("missing", "use_sliding_window"), severity="warning",
        config=both(without("layer_types"), top(use_sliding_window=True, sliding_window=16)),
    ),
    Case(
        rule="C46", key="rope_scaling.original_max_position_embeddings",
        names=("4096", "max_position_embeddings", "128"), severity="warning",
        config=top(rope_scaling={**YARN, "original_max_position_embeddings": 4096}),
    ),
    Case(
        rule="S06", key="rope_parameters", names=("2",),
        config=both(
            without("rope_theta"),
            top(rope_parameters={"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}),
        ),
    ),
]  # fmt: skip
