"""Configs in which one key, or a few, are stated, absent, null, of a wrong type or contradictory.

The cases of tests/golden/engine_verdicts.py and tests/behaviour/test_engine_verdicts.py. A case is a base with changes:
dotted key -> value, in which ABSENT removes a key.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_testing import checkpoints as support

ABSENT: Any = "<absent>"
SHAPE = support.Shape(
    hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=32, vocab=64, draft_vocab=64, mask=63
)
TARGET = {
    **support.body_config(SHAPE), "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4,
    "layer_types": ["full_attention"] * 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWED = {"layer_types": [SLIDING] * 2, "sliding_window": 16, "use_sliding_window": True, "is_causal": ABSENT}
BASES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "bare": {"layer_types": ABSENT, "is_causal": ABSENT, "use_sliding_window": ABSENT, "sliding_window": ABSENT},
    "sliding": WINDOWED,
    "mixed": {**WINDOWED, "layer_types": [SLIDING, FULL]},
    "gpt_oss": {
        "model_type": "gpt_oss", "attention_bias": True, "layer_types": ABSENT,
        "sliding_window": ABSENT, "use_sliding_window": ABSENT, "is_causal": ABSENT, "rope_scaling": ABSENT,
    },
    "speculators": {},
}  # fmt: skip
WRITERS = {"speculators": support.speculators_config}
"""Base -> the function that writes its config, if not `native_config`."""

SIZES: tuple[Any, ...] = (ABSENT, None, True, "64", 64.0, 0, -64)
FLAGS: tuple[Any, ...] = (ABSENT, None, True, False, "true", 0, 1)
INTEGERS: tuple[Any, ...] = (ABSENT, None, True, "4", 4.0, 4.5, 0, -1, 1, 3, 6)
NUMBERS: tuple[Any, ...] = (None, 1, 0.5, 0, -1, "1", True)
TAPS: tuple[Any, ...] = (
    ABSENT, None, [], "0,2", 2, [0], [0, 0], [2, 0], ["0", "2"], [0.0, 2.0], [0, 2.5], [-1, 2], [0, 3], [0, 4], [0, 9],
    [None, 2], [0, 1, 2],
)  # fmt: skip
KINDS: tuple[Any, ...] = (
    ABSENT, None, [], FULL, [FULL], [FULL] * 3, [FULL, SLIDING], [SLIDING] * 2, ["linear_attention"] * 2, [None, FULL],
    ["attention", FULL], ["nonsense", FULL], 3,
)  # fmt: skip
WINDOWS: tuple[Any, ...] = (ABSENT, None, 16, 1, 0, -1, "16", 16.0, True)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
ROPES: tuple[Any, ...] = (
    ABSENT, None, {}, [], "yarn", {"rope_type": "default"}, {"rope_type": None}, {"rope_type": "nonsense"},
    {"type": "default"}, {"factor": 2.0}, {"rope_type": 3}, {"rope_type": "default", "factor": 2.0},
    {"rope_type": "linear"}, {"type": "linear"}, {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": "2"}, {"rope_type": "linear", "factor": None},
    {"rope_type": "linear", "factor": 0.5}, {"rope_type": "dynamic"}, {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 4.0}, YARN, {**YARN, "type": "yarn"},
    {**YARN, "type": "linear"}, {**YARN, "factor": None}, {**YARN, "original_max_position_embeddings": None},
    {key: value for key, value in YARN.items() if key != "factor"}, {**YARN, "attention_factor": 1.0},
    {**YARN, "beta_fast": "32"}, {**YARN, "nonsense": 1}, {"rope_type": "llama3"}, LLAMA3,
    {**LLAMA3, "low_freq_factor": ABSENT}, {**LLAMA3, "high_freq_factor": ABSENT}, {**LLAMA3, "factor": ABSENT},
    {"rope_type": "longrope"}, LONG, {**LONG, "long_factor": ABSENT}, {"rope_type": "proportional"},
    {"type": "mrope", "mrope_section": [8, 4, 4]}, {"rope_type": "default", "mrope_section": [8, 4, 4]},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"type": "su", "factor": 2.0},
)  # fmt: skip
FULL_ROPE = {"rope_theta": 1000000.0, "rope_type": "default"}

KEYS: Mapping[str, tuple[Any, ...]] = {
    "architectures": (
        ABSENT, None, [], "DFlashDraftModel", ["Qwen3DFlashDraftModel"], ["LlamaForCausalLM"],
        ["DFlashDraftModel", "Other"], ["Other", "DFlashDraftModel"],
    ),
    "model_type": (ABSENT, None, "", "nonsense", 3),
    "hidden_size": (*SIZES, 128), "intermediate_size": (*SIZES, 128, 48), "vocab_size": (*SIZES, 32, 128),
    "num_hidden_layers": (ABSENT, None, True, "2", 2.0, 0, -1, 1, 3),
    "num_attention_heads": (ABSENT, None, True, "4", 4.0, 0, 3, 8, 2),
    "num_key_value_heads": (ABSENT, None, True, "2", 2.0, 0, 3, 4, 1),
    "head_dim": (ABSENT, None, True, "32", 32.0, 0, 16, 64),
    "rms_norm_eps": (ABSENT, None, "1e-6", 0, 0.0, 1, 1e-5), "max_position_embeddings": (*SIZES, 256),
    "hidden_act": (ABSENT, None, "gelu", "relu", "swigluoai", "SiLU", "nonsense", 3),
    "attention_bias": FLAGS, "attention_dropout": (ABSENT, None, "0", 0, 0.1), "tie_word_embeddings": FLAGS,
    "rope_theta": (ABSENT, None, "1000000", 0, -1, 10000, 1000000), "rope_scaling": ROPES,
    "partial_rotary_factor": (None, 1.0, 0.5, "0.5", 1), "mrope_section": (None, [8, 4, 4]),
    "layer_types": KINDS, "sliding_window": WINDOWS, "use_sliding_window": FLAGS,
    "max_window_layers": (None, 0, 1, 2, 5, "0", -1), "is_causal": (*FLAGS, []),
    "block_size": (*INTEGERS, 16), "dflash_config.block_size": (*INTEGERS, 16),
    "num_target_layers": INTEGERS, "dflash_config.num_target_layers": INTEGERS,
    "dflash_config.mask_token_id": (ABSENT, None, True, "63", 63.0, 62.5, -1, 0, 64),
    "mask_token_id": (None, 63, 62, "63", -1), "dflash_config.mask_token": (None, "", "<mask>", 3),
    "dflash_config.target_layer_ids": TAPS, "target_layer_ids": ([0, 2], [0, 1], None, [], "0,2"),
    "eagle_aux_hidden_state_layer_ids": (None, [], [1, 3], [2, 3], [1, 2, 3], "1,3"),
    "dflash_config": (ABSENT, None, [], {}, "x"),
    "dflash_config.causal": FLAGS, "dflash_config.is_causal": FLAGS, "dflash_config.use_swa": FLAGS,
    "dflash_config.swa_window_size": (None, 16, "16", 0), "dflash_config.attention_sink_bias": FLAGS,
    "add_swa_attention_sink_bias": (None, True, False, 1), "dflash_config.attention_value_scale": NUMBERS,
    "draft_vocab_size": (None, 64, 32, "64", 64.0), "target_hidden_size": (None, 64, 32, "64", 0),
    "dflash_config.input_embedding_scale": NUMBERS, "dflash_config.output_multiplier": NUMBERS,
    "dflash_config.final_logit_softcapping": NUMBERS, "output_multiplier": (None, 0.5, "1"),
    "final_logit_softcapping": (None, 20.0, "1"), "input_embedding_scale": (None, 2.0, "1"),
    "logit_scale": (None, 1, 0.05, "1"), "is_neox_style": FLAGS, "rope_is_neox_style": FLAGS, "use_gemma_norm": FLAGS,
    "has_own_lm_head": (None, False), "dflash_config.sample_from_anchor": (None, False, True, "true"),
    "dflash_config.projector_type": (None, "", "dflash", "nonsense"), "pard_token": (63,), "auto_map": (None, {}),
    "dtype": (ABSENT, None, "bfloat16", "float16", "nonsense"), "torch_dtype": ("bfloat16", "nonsense"),
    "quantization_config": (None, {}), "time_step_limit": ([0.0, float("inf")],), "nonsense": (1, None, {}),
    "dflash_config.thresh_head_direct_len": (True,), "dflash_config.nonsense": (1, None),
}  # fmt: skip
"""Key -> its values on the base `full`."""

ATTENTION: Mapping[str, tuple[Any, ...]] = {
    "layer_types": (ABSENT, None, [FULL] * 2, [SLIDING, FULL], [SLIDING] * 2, [SLIDING]),
    "sliding_window": WINDOWS, "use_sliding_window": FLAGS, "max_window_layers": (0, 1, 2),
    "is_causal": (None, True, False, "false", 0), "dflash_config.causal": (None, True, False, "false"),
    "dflash_config.use_swa": (True, False, None), "dflash_config.swa_window_size": (None, 8),
}  # fmt: skip
"""Key -> its values on the bases with windows and on the base that states no attention."""

TOGETHER: tuple[Mapping[str, Any], ...] = (
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": 16}, {"use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"sliding_window": 16, "max_window_layers": 0}, {"use_sliding_window": False, "sliding_window": 16},
    {"dflash_config.use_swa": True, "sliding_window": 16},
    {"dflash_config.use_swa": True, "sliding_window": 16, "use_sliding_window": False},
    {"dflash_config.use_swa": True, "sliding_window": 16, "use_sliding_window": True},
    {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 16},
    {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 16, "sliding_window": 8},
    {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 16, "is_causal": True},
    {"is_causal": False, "dflash_config.causal": True}, {"is_causal": True, "dflash_config.causal": False},
    {"is_causal": None, "dflash_config.causal": True}, {"is_causal": "false", "dflash_config.causal": False},
    {"is_causal": False, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    {"is_causal": True, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
)  # fmt: skip
"""Changes of several keys, on `full` and on `bare`."""

ELSEWHERE: tuple[Mapping[str, Any], ...] = (
    {"block_size": 4, "dflash_config.block_size": 8}, {"block_size": ABSENT, "dflash_config.block_size": 4},
    {"num_target_layers": ABSENT, "dflash_config.num_target_layers": 4},
    {"num_target_layers": ABSENT, "dflash_config.target_layer_ids": ABSENT},
    {"num_target_layers": 8, "dflash_config.target_layer_ids": ABSENT},
    {"dflash_config": ABSENT, "target_layer_ids": [0, 2], "mask_token_id": 63},
    {"dflash_config": None, "target_layer_ids": [0, 2], "mask_token_id": 63},
    {"dflash_config.target_layer_ids": ABSENT, "target_layer_ids": [0, 2]},
    {"dflash_config.target_layer_ids": None, "target_layer_ids": [0, 2]},
    {"dflash_config.target_layer_ids": ABSENT, "eagle_aux_hidden_state_layer_ids": [1, 3]},
    {"dflash_config.mask_token_id": ABSENT, "mask_token_id": 63},
    {"dflash_config.mask_token_id": None, "mask_token_id": 63},
    {"dflash_config.mask_token_id": ABSENT, "pard_token": 63}, {"num_key_value_heads": 4, "head_dim": 16},
    {"head_dim": ABSENT, "hidden_size": 64}, {"model_type": ABSENT, "architectures": ABSENT},
    {"num_attention_heads": 4, "num_key_value_heads": ABSENT, "head_dim": ABSENT},
)  # fmt: skip
"""Changes of several keys, on `full`."""

ROPE_PARAMETERS: tuple[Any, ...] = (
    None, {}, [], FULL_ROPE, {"rope_theta": 1000000.0}, {"rope_type": "default"}, {**YARN, **FULL_ROPE},
    {"rope_theta": 1000000.0, **YARN}, {"rope_theta": 1000000.0, "rope_type": "linear"},
    {"rope_theta": 1000000.0, "rope_type": "llama3"}, {"rope_theta": None, "rope_type": "default"},
    {"rope_theta": "1000000", "rope_type": "default"}, {FULL: FULL_ROPE}, {FULL: FULL_ROPE, SLIDING: FULL_ROPE},
    {FULL: FULL_ROPE, SLIDING: {**FULL_ROPE, "rope_theta": 10000.0}},
)  # fmt: skip
"""Values of rope_parameters on `full`, in place of the other rope keys."""

PARAMETERS: tuple[Mapping[str, Any], ...] = (
    *({"rope_theta": ABSENT, "rope_scaling": ABSENT, "rope_parameters": value} for value in ROPE_PARAMETERS),
    {"rope_parameters": FULL_ROPE}, {"rope_parameters": {**FULL_ROPE, "rope_theta": 10000.0}},
    {"rope_parameters": {"rope_type": "default"}}, {"rope_parameters": None}, {"rope_parameters": {}},
    {"rope_parameters": FULL_ROPE, "rope_scaling": YARN}, {"rope_parameters": {"rope_theta": 1.0, **YARN}},
    {"rope_theta": ABSENT, "rope_scaling": {"rope_theta": 1000000.0, "rope_type": "default"}},
    {"rope_theta": ABSENT, "rope_scaling": YARN}, {"rope_theta": ABSENT, "rope_scaling": ABSENT},
)  # fmt: skip
"""Changes of rope keys, on `full`."""

TENSORS: Mapping[str, tuple[int, ...] | None] = {
    "verifier_norm.weight": (64,), "verifier_lm_head.weight": (64, 64), "embed_tokens.weight": (64, 64),
    "lm_head.weight": (64, 64), "nonsense.weight": (4,), "t2d": (64,), "d2t": (64,), "rotary_emb.inv_freq": (16,),
    "layers.2.mlp.up_proj.weight": (96, 64), "layers.0.self_attn.q_proj.bias": (128,),
    "layers.0.self_attn.attention_sink_bias": (4,), "mask_hidden": (64,), "layers.0.self_attn.q_norm.weight": None,
    "fc.weight": None, "norm.weight": None, "layers.1.mlp.down_proj.weight": None, "hidden_norm.weight": (32,),
    "thresh_head.weight": (4, 64), "self_attn.q_norm.weight": (32,),
}  # fmt: skip
"""Name of a tensor that is added or changed, with its shape; None to leave it out. On `full`."""

RESIZED: tuple[tuple[str, tuple[int, ...]], ...] = tuple(
    (f"layers.0.{module}.weight", (rows + more, columns + wider))
    for module, (rows, columns) in {
        "self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
        "self_attn.o_proj": (64, 128), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
    }.items()
    for more, wider in ((32, 0), (-32, 0), (0, 32), (0, -32), (32, 32))
)  # fmt: skip
"""A projection of another shape than the config says: more or fewer rows or columns, or more of both. On `full`."""
BIASED: tuple[Mapping[str, Any], ...] = (
    {"num_attention_heads": 2}, {"num_attention_heads": 8}, {"num_key_value_heads": 1}, {"intermediate_size": 48},
    {"intermediate_size": 128},
)  # fmt: skip
"""A stated size that differs from the projections and biases in the file. On `gpt_oss`."""


BODY = "transformer_layer_config."
METHODS = "speculators_config.proposal_methods"
GREEDY = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
SPECULATORS: Mapping[str, tuple[Any, ...]] = {
    "architectures": (ABSENT, None, [], ["Other"]), "model_type": ("qwen3", "speculators", "nonsense"),
    "speculators_model_type": (ABSENT, None, "eagle3", "nonsense"), "speculators_version": (ABSENT, None),
    "speculators_config": (ABSENT, None, {}, []), "speculators_config.default_proposal_method": (ABSENT, "other"),
    METHODS: (
        ABSENT, None, [], {}, [{}], [{"proposal_type": "greedy"}], [{**GREEDY, "speculative_tokens": None}],
        [{**GREEDY, "speculative_tokens": "3"}], [{**GREEDY, "speculative_tokens": 0}],
        [{**GREEDY, "speculative_tokens": 7}], [GREEDY, {**GREEDY, "speculative_tokens": 1}],
    ),
    "speculators_config.verifier": (ABSENT, None, {}),
    "speculators_config.verifier.name_or_path": (ABSENT, None, "/models/target", 3),
    "speculators_config.algorithm": (ABSENT, "other"),
    "transformer_layer_config": (ABSENT, None, {}, []),
    f"{BODY}model_type": (ABSENT, None, "", "llama", "qwen2", "gpt_oss", "mistral", "gemma3_text", "nonsense"),
    f"{BODY}architectures": (["Qwen3ForCausalLM"], None), f"{BODY}hidden_size": (ABSENT, None, "64", 64.0, 128),
    f"{BODY}num_hidden_layers": (ABSENT, None, 1, 3), f"{BODY}head_dim": (ABSENT, None, 16),
    f"{BODY}num_key_value_heads": (ABSENT, None, 4), f"{BODY}vocab_size": (ABSENT, None, 32, 128),
    f"{BODY}rms_norm_eps": (ABSENT, None, 1e-5), f"{BODY}hidden_act": (ABSENT, "gelu"),
    f"{BODY}attention_bias": (ABSENT, True), f"{BODY}rope_theta": (ABSENT, 10000), f"{BODY}rope_scaling": (YARN, {}),
    f"{BODY}rope_parameters": (FULL_ROPE, {**FULL_ROPE, "rope_theta": 10000.0}, {}),
    f"{BODY}layer_types": (ABSENT, None, [], [FULL], [SLIDING] * 2), f"{BODY}sliding_window": (ABSENT, 16),
    f"{BODY}use_sliding_window": (ABSENT, None, True), f"{BODY}max_position_embeddings": (ABSENT, 256),
    f"{BODY}is_causal": (None, True, False), f"{BODY}dtype": (ABSENT, "bfloat16", "nonsense"),
    f"{BODY}mask_token_id": (62,), f"{BODY}dflash_config": ({"causal": True}, {"mask_token_id": 62}),
    "aux_hidden_state_layer_ids": (
        ABSENT, None, [], "1,3", 2, [1], [3, 1], [1, 1], [0, 2], [1, 4], [1, 5], ["1", "3"], [1.0, 3.0], [1, 2.5],
        [1, 2, 3],
    ),
    "mask_token_id": (ABSENT, None, "63", 63.0, 62.5, -1, 64), "block_size": (ABSENT, None, "4", 1, 8),
    "draft_vocab_size": (ABSENT, None, 32, "64"), "target_hidden_size": (ABSENT, 64, 32, 0, "64"),
    "sliding_window_non_causal": (ABSENT, None, False, "false", 0),
    "sample_from_anchor": (ABSENT, None, True, "true"), "is_causal": (None, True, False), "layer_types": ([FULL] * 2,),
    "dflash_config": ({}, {"causal": True}, {"use_swa": True}), "tie_word_embeddings": (ABSENT, None, True),
    "quantization_config": (None, {}), "nonsense": (1,), "dtype": ("bfloat16",), "logit_scale": (0.5,),
    "is_neox_style": (False,), "target_layer_ids": ([0, 1],), "eagle_aux_hidden_state_layer_ids": ([1, 2],),
}  # fmt: skip
"""Key -> its values on the base `speculators`."""

_WINDOWED = {f"{BODY}sliding_window": 16, f"{BODY}use_sliding_window": True}
SPECULATORS_TOGETHER: tuple[Mapping[str, Any], ...] = (
    *(
        {**_WINDOWED, f"{BODY}layer_types": kinds, "sliding_window_non_causal": flag}
        for kinds in ([SLIDING] * 2, [SLIDING, FULL])
        for flag in (ABSENT, None, False, True)
    ),
    {**_WINDOWED, f"{BODY}layer_types": ABSENT},
    {**_WINDOWED, f"{BODY}layer_types": None, f"{BODY}max_window_layers": 0},
    {**_WINDOWED, f"{BODY}layer_types": [SLIDING] * 2, f"{BODY}is_causal": False, "sliding_window_non_causal": False},
    {f"{BODY}rope_theta": ABSENT, f"{BODY}rope_scaling": ABSENT, f"{BODY}rope_parameters": FULL_ROPE},
    {f"{BODY}rope_theta": ABSENT, f"{BODY}rope_scaling": ABSENT, f"{BODY}rope_parameters": ABSENT},
)  # fmt: skip
"""Changes of several keys, on `speculators`."""

MODEL_TYPES = (
    "llama", "qwen2", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_text", "mistral", "ministral", "mixtral",
    "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "granite", "cohere2", "glm4", "deepseek_v3",
    "minimax",
)  # fmt: skip
"""Types of decoders of targets, which exporters may leave in the config of a draft."""
BY_TYPE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("full", {}), ("bare", {}), ("sliding", {}), ("mixed", {}),
    ("full", {"rope_theta": ABSENT, "rope_scaling": ABSENT}),
)  # fmt: skip
"""The bases and changes that each type is tried with."""

READ_BY_LLAMA = (
    "architectures", "block_size", "dflash_config", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers", "target_layer_ids", "mask_token_id", "num_target_layers", "model_type",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConfigCase:
    """A config with its tensors."""

    base: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    tensor: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        said = ", ".join(f"{key}={json.dumps(value)}" for key, value in self.changes.items())
        of_tensor = " ".join(filter(None, (self.tensor, "x".join(map(str, self.shape or ())))))
        return f"{self.base}: {said or of_tensor or 'as it is'}".replace(f'"{ABSENT}"', "absent")

    @property
    def is_read_by_llama(self) -> bool:
        """Whether it is about keys and tensors whose reading in llama.cpp's converter and loader is known."""
        return (
            self.base not in ("gpt_oss", "speculators")
            and self.changes.get("model_type") not in MODEL_TYPES
            and all(key.startswith(READ_BY_LLAMA) for key in self.changes)
        )

    @property
    def config(self) -> dict[str, Any]:
        """The draft's config."""
        write = WRITERS.get(self.base, support.native_config)
        return changed(write(SHAPE), {**BASES[self.base], **self.changes})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of a tensor -> its shape."""
        shapes = support.body_shapes(replace(SHAPE, bias=self.base == "gpt_oss"))
        if self.tensor:
            shape = self.shape or TENSORS[self.tensor]
            shapes = {**shapes, self.tensor: shape or ()}
            if shape is None:
                del shapes[self.tensor]
        return shapes


LATER: tuple[ConfigCase, ...] = (
    *(ConfigCase(base="full", tensor=tensor, shape=shape) for tensor, shape in RESIZED),
    *(ConfigCase(base="gpt_oss", changes=changes) for changes in BIASED),
)
"""The cases that releases of vLLM before 0.33 were not asked about."""


def changed(written: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with other values of dotted keys; ABSENT removes a key."""
    config: dict[str, Any] = json.loads(json.dumps(written))
    for dotted, value in changes.items():
        *parents, key = dotted.split(".")
        container = config
        for parent in parents:
            container = container.setdefault(parent, {})
        container.pop(key, None)
        if value != ABSENT:
            container[key] = without_absent(value)
    return config


def without_absent(value: Any) -> Any:
    """A copy of a value, without keys that are absent."""
    return {key: item for key, item in value.items() if item != ABSENT} if isinstance(value, dict) else value


def all_cases() -> dict[str, ConfigCase]:
    """Name -> case, each config once."""
    return {case.name: case for case in _cases()}


def _cases() -> Iterator[ConfigCase]:
    for base in BASES:
        yield ConfigCase(base=base)
    for key, values in KEYS.items():
        for value in values:
            yield ConfigCase(base="full", changes={key: value})
    for base in ("bare", "sliding", "mixed", "gpt_oss"):
        for key, values in ATTENTION.items():
            for value in values:
                yield ConfigCase(base=base, changes={key: value})
    for changes in TOGETHER:
        yield ConfigCase(base="full", changes=changes)
        yield ConfigCase(base="bare", changes=changes)
    for changes in (*ELSEWHERE, *PARAMETERS):
        yield ConfigCase(base="full", changes=changes)
    yield ConfigCase(base="gpt_oss", changes={"num_target_layers": ABSENT})
    for value in ROPES:
        yield ConfigCase(base="gpt_oss", changes={"rope_theta": ABSENT, "rope_parameters": value})
    for tensor in TENSORS:
        yield ConfigCase(base="full", tensor=tensor)
    yield from LATER
    for key, values in SPECULATORS.items():
        for value in values:
            yield ConfigCase(base="speculators", changes={key: value})
    for changes in SPECULATORS_TOGETHER:
        yield ConfigCase(base="speculators", changes=changes)
    for model_type in MODEL_TYPES:
        for base, changes in BY_TYPE:
            yield ConfigCase(base=base, changes={"model_type": model_type, **changes})
