"""Every rule fires on what it is about, and none fires on a sound draft."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import support
from dflash_cli.checks.base import all_rules
from dflash_cli.checks.engines import parse_engines
from dflash_cli.references import TINY, Role, resolve
from dflash_cli.validate import Report, validate_draft

Change = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A draft with one fault: `config` edits the config in place, `tensors` the arrays."""

    rule: str
    message: str
    severity: str = "error"
    dialect: str = "native"
    shape: support.Shape = support.SMALL
    config: Change = field(default=lambda config: None)
    tensors: Change = field(default=lambda arrays: None)
    target: Change | None = None
    engines: str = ""
    level: str = "headers"


def nested(**keys: Any) -> Change:
    return lambda config: config["dflash_config"].update(keys)


def top(**keys: Any) -> Change:
    return lambda config: config.update(keys)


def body(**keys: Any) -> Change:
    return lambda config: config["transformer_layer_config"].update(keys)


def without(*names: str, inside: str | None = None) -> Change:
    return lambda config: [(config[inside] if inside else config).pop(name) for name in names]


def outer(**keys: Any) -> Change:
    return lambda config: config["speculators_config"].update(keys)


def method(**keys: Any) -> Change:
    return lambda config: config["speculators_config"]["proposal_methods"][0].update(keys)


def add(name: str, *shape: int, dtype: Any = np.float32) -> Change:
    return lambda arrays: arrays.update({name: np.zeros(shape, dtype=dtype)})


def edit(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arrays: arrays.update({name: change(arrays[name])})


def rename(old: str, new: str) -> Change:
    def change(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if name.startswith(old)]:
            arrays[new + name.removeprefix(old)] = arrays.pop(name)

    return change


SPEC = "speculators"
SLIDING = replace(support.SMALL, windows=(16, 16))
MIXED = replace(support.SMALL, windows=(16, None))
NO_CHANGE: Change = lambda config: None  # noqa: E731
YARN = {"rope_type": "yarn", "factor": 64.0}
VERIFIER: dict[str, Any] = {"architectures": []}

CASES = [
    Case(rule="C01", message="DFlash 2", config=nested(conv_kernel_size=2)),
    Case(rule="C01", message="not a DFlash draft", config=without("architectures", "dflash_config")),
    Case(rule="C01", message="found 'medusa'", dialect=SPEC, config=top(speculators_model_type="medusa")),
    Case(rule="C03", message="block_size 4", config=nested(block_size=8)),
    Case(rule="C03", message="missing", config=without("block_size")),
    Case(rule="C03", message="found True", config=top(block_size=True)),
    Case(rule="C03", message="expected an integer of at least 2", dialect=SPEC, config=top(block_size=1)),
    Case(rule="C04", message="4, expected 3 for a block of 4", dialect=SPEC, config=method(speculative_tokens=4)),
    Case(rule="C05", message="engines would guess [1, 1]", config=without("target_layer_ids", inside="dflash_config")),
    Case(rule="C05", message="found [0, '2']", config=nested(target_layer_ids=[0, "2"])),
    Case(rule="C05", message="missing", dialect=SPEC, config=top(aux_hidden_state_layer_ids=None)),
    Case(rule="C06", message="4 is outside the target's 0..3", config=nested(target_layer_ids=[0, 4])),
    Case(rule="C06", message="0 is outside", dialect=SPEC, config=top(aux_hidden_state_layer_ids=[0, 2])),
    Case(rule="C07", message="does not ascend", config=nested(target_layer_ids=[2, 0])),
    Case(rule="C07", message="repeats a layer", config=nested(target_layer_ids=[2, 2])),
    Case(rule="C08", message="[0, 2], expected [1, 3]", config=top(eagle_aux_hidden_state_layer_ids=[0, 2])),
    Case(
        rule="C09", message="usual native list", severity="warning", dialect=SPEC,
        shape=replace(support.SMALL, taps=(0, 32), target_layers=36), target=NO_CHANGE,
    ),
    Case(rule="C10", message="last of 4", severity="warning", config=nested(target_layer_ids=[0, 3])),
    Case(rule="C11", message="5, the target has 4 layers", config=top(num_target_layers=5), target=NO_CHANGE),
    Case(rule="C11", message="missing", severity="warning", config=without("num_target_layers")),
    Case(rule="C12", message="null", config=nested(mask_token_id=None)),
    Case(rule="C12", message="missing", config=without("mask_token_id", inside="dflash_config")),
    Case(rule="C12", message="found True", dialect=SPEC, config=top(mask_token_id=True)),
    Case(rule="C12", message="outside the vocabulary of 32", config=nested(mask_token_id=32)),
    Case(rule="C13", message="different values", config=top(mask_token_id=30)),
    Case(rule="C14", message="also eos_token_id", severity="warning", config=top(eos_token_id=[2, 31])),
    Case(rule="C15", message="3 entries for 2 layers", config=top(layer_types=["full_attention"] * 3)),
    Case(rule="C15", message="'linear_attention'", config=top(layer_types=["full_attention", "linear_attention"])),
    Case(rule="C16", message="false beside sliding layers", shape=SLIDING, config=top(use_sliding_window=False)),
    Case(rule="C16", message="missing beside", shape=SLIDING, config=without("use_sliding_window")),
    Case(rule="C16", message="found None", shape=SLIDING, config=top(sliding_window=None)),
    Case(
        rule="C17", message="true", severity="warning",
        config=nested(use_swa=True, swa_window_size=16, causal=False),
    ),
    Case(rule="C18", message="false but dflash_config.causal is true", config=nested(causal=True)),
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
        rule="C20", message="false", severity="warning", dialect=SPEC, engines="vllm@0.20",
        config=top(sliding_window_non_causal=False),
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
    Case(rule="C24", message="missing for rope type yarn", config=top(rope_scaling=YARN)),
    Case(rule="C26", message="0.25", severity="warning", config=top(partial_rotary_factor=0.25)),
    Case(rule="C27", message="found 'gelu'", config=top(hidden_act="gelu")),
    Case(
        rule="C25", message="64, the target's is 128", severity="warning", config=top(max_position_embeddings=64),
        target=NO_CHANGE,
    ),
    Case(rule="C28", message="true", severity="info", config=top(tie_word_embeddings=True)),
    Case(rule="C37", message="64 beside hidden_size 16", severity="warning", config=top(target_hidden_size=64)),
    Case(rule="C37", message="64 beside", engines="sglang", config=top(target_hidden_size=64)),
    Case(rule="C29", message="0.2", severity="warning", config=nested(output_multiplier=0.2)),
    Case(rule="C29", message="0.2", engines="vllm", config=nested(output_multiplier=0.2)),
    Case(rule="C30", message="'qwen3'", dialect=SPEC, config=top(model_type="qwen3")),
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
    Case(rule="C35", message="predicts at the anchor", dialect=SPEC, config=top(sample_from_anchor=True)),
    Case(rule="C35", message="predicts at the anchor", config=nested(sample_from_anchor=True)),
    Case(
        rule="C36", message="Automodel", severity="warning", config=top(architectures=["Qwen3DFlashDraftModel"])
    ),
    Case(rule="C38", message="no multiple of 3", config=top(num_key_value_heads=3)),
    Case(
        rule="C39", message="gpt_oss", severity="warning",
        config=lambda config: (config.pop("layer_types"), config.update(model_type="gpt_oss")),
    ),
    Case(rule="C00", message="attention_sink_bias", config=nested(attention_sink_bias=True)),
    Case(rule="N01", message="layers.1.self_attn.k_norm.weight", tensors=without("layers.1.self_attn.k_norm.weight")),
    Case(rule="N02", message="unexpected: left over", tensors=add("optimizer.state", 2)),
    Case(rule="N02", message="fused", tensors=add("layers.0.self_attn.qkv_proj.weight", 64, 16)),
    Case(rule="N02", message="a copy", severity="warning", tensors=add("lm_head.weight", 32, 16)),
    Case(rule="N03", message="start with 'model.'", tensors=rename("layers.", "model.layers.")),
    Case(rule="N04", message="[16, 48], expected [16, 32] = 2 taps x 16", tensors=add("fc.weight", 16, 48)),
    Case(rule="N04", message="[9], expected [8]", tensors=add("layers.0.self_attn.q_norm.weight", 9)),
    Case(rule="N06", message="has the layers [0, 1, 2]", tensors=add("layers.2.input_layernorm.weight", 16)),
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
    Case(rule="M01", message="missing, with draft_vocab_size 12 of 32", dialect=SPEC, config=top(draft_vocab_size=12)),
    Case(
        rule="M01", message="missing beside d2t", severity="warning", dialect=SPEC, shape=support.REDUCED,
        tensors=without("t2d"),
    ),
    Case(rule="M01", message="33 is more than", dialect=SPEC, config=top(draft_vocab_size=33)),
    Case(
        rule="M02", message="whole vocabulary of 32", dialect=SPEC, engines="vllm",
        tensors=add("d2t", 32, dtype=np.int64),
    ),
    Case(
        rule="M02", message="whole vocabulary", severity="warning", dialect=SPEC,
        tensors=add("d2t", 32, dtype=np.int64),
    ),
    Case(
        rule="M03", message="[31], expected [32]", dialect=SPEC, shape=support.REDUCED,
        tensors=add("t2d", 31, dtype=bool),
    ),
    Case(
        rule="M04", message="I32, expected I64", severity="warning", dialect=SPEC, shape=support.REDUCED,
        tensors=edit("d2t", lambda item: item.astype(np.int32)),
    ),
    Case(
        rule="M04", message="F32, expected BOOL", dialect=SPEC, shape=support.REDUCED, tensors=add("t2d", 32),
    ),
    Case(rule="P01", message="16, the target's is 24", target=top(hidden_size=24)),
    Case(rule="P01", message="64, the target's", dialect=SPEC, config=top(target_hidden_size=64), target=NO_CHANGE),
    Case(rule="P02", message="32, the target's is 40", target=top(vocab_size=40)),
    Case(rule="P03", message="outside the target's 16 embeddings", target=top(vocab_size=16)),
    Case(rule="P03", message="stop token", severity="warning", target=top(eos_token_id=31)),
    Case(rule="P05", message="1000000.0, the target's is 10000.0", severity="warning", target=top(rope_theta=10000)),
    Case(
        rule="P06", message="taps layer 2", target=top(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    ),
    Case(
        rule="P08", message="trained for other/model", severity="warning", dialect=SPEC, target=NO_CHANGE,
        config=outer(verifier={"name_or_path": "other/model", **VERIFIER}),
    ),
    Case(rule="S09", message="speculators dialect", dialect=SPEC, engines="sglang"),
    Case(rule="S10", message="12 of 32", dialect=SPEC, shape=support.REDUCED, engines="sglang"),
    Case(
        rule="N13", message="1 values are NaN", level="weights",
        tensors=edit("norm.weight", lambda item: np.where(np.arange(16) == 3, np.nan, item).astype(np.float32)),
    ),
    Case(rule="N13", message="every value is zero", level="weights", tensors=add("norm.weight", 16)),
    Case(
        rule="N14", message="columns of layer 2", severity="warning", level="weights",
        tensors=edit("fc.weight", lambda item: item * (np.arange(32) < 16).astype(np.float32)),
    ),
    Case(
        rule="M05", message="selects 11 ids", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("t2d", lambda item: item & (np.arange(32) != 0)),
    ),
    Case(
        rule="M06", message="look like ids", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("d2t", lambda item: item + np.arange(12)),
    ),
    Case(
        rule="M06", message="do not ascend", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("d2t", lambda item: np.where(np.arange(12) == 5, 0, item)),
    ),
    Case(
        rule="M06", message="other ids than t2d", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("t2d", lambda item: np.roll(item, 1)),
    ),
    Case(
        rule="M09", message="leaves out the stop token 31", severity="warning", dialect=SPEC, shape=support.REDUCED,
        level="weights", target=top(eos_token_id=31),
    ),
    Case(
        rule="M10", message="row 0 of lm_head.weight", severity="warning", dialect=SPEC, shape=support.REDUCED,
        level="weights", target=NO_CHANGE, tensors=edit("lm_head.weight", lambda item: item + 1),
    ),
    Case(
        rule="M07", message="first 12 ids", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("d2t", np.zeros_like),
    ),
]  # fmt: skip


def build(case: Case, path: Path) -> Path:
    shape = case.shape
    arrays = support.body_arrays(shape)
    if shape.draft_vocab != shape.vocab:
        arrays |= support.reduced_arrays(shape, support.target_arrays(shape))
    config = support.native_config(shape) if case.dialect == "native" else support.speculators_config(shape)
    case.config(config)
    case.tensors(arrays)
    return support.write_checkpoint(path, config, arrays)


def check(case: Case, directory: Path) -> Report:
    draft = build(case, directory / "draft")
    target = None
    if case.target is not None:
        config = support.target_config(case.shape)
        case.target(config)
        target = support.write_checkpoint(directory / "target", config, support.target_arrays(case.shape))
    return validate_draft(
        draft,
        target=target,
        target_reference=None if target is None else str(target),
        engines=parse_engines(case.engines),
        level="weights" if case.level == "weights" else "headers",
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.message[:24]}")
def test_rule_fires(case: Case, tmp_path: Path) -> None:
    found = [finding for finding in check(case, tmp_path).findings if finding.id == case.rule]
    assert any(case.message in finding.message for finding in found), check(case, tmp_path).findings
    assert case.severity in {finding.severity for finding in found}


def test_every_rule_has_a_case() -> None:
    covered = {case.rule for case in CASES} | {"N15"}
    assert {rule.id for rule in all_rules()} <= covered


def test_mask_embedding(tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft")
    (draft / "mask_embedding.pt").write_bytes(b"")
    assert [finding.id for finding in validate_draft(draft).findings] == ["N15"]


@pytest.mark.parametrize("level", ["headers", "weights"])
@pytest.mark.parametrize("dialect", ["native", "speculators", "reduced"])
@pytest.mark.parametrize("shape", [support.SMALL, SLIDING, replace(support.SMALL, bias=True)])
def test_silent_on_sound_drafts(dialect: str, shape: support.Shape, level: Any, tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target", shape)
    if dialect == "native":
        draft = support.make_native(tmp_path / "draft", shape)
    else:
        reduced = replace(shape, draft_vocab=12) if dialect == "reduced" else shape
        draft = support.make_speculators(tmp_path / "draft", reduced)
    report = validate_draft(
        draft, target=target, target_reference=str(target), engines=parse_engines("vllm"), level=level
    )
    assert report.findings == ()


@pytest.mark.parametrize("level", ["headers", "weights"])
@pytest.mark.parametrize("name", ["tiny", "tiny:reduced"])
def test_silent_on_the_bundled_drafts(name: str, level: Any) -> None:
    report = validate_draft(
        resolve(name, Role.DRAFT),
        target=resolve(TINY, Role.TARGET),
        target_reference=TINY,
        engines=parse_engines("vllm"),
        level=level,
    )
    assert report.findings == ()


def test_a_relative_gets_one_finding(tmp_path: Path) -> None:
    case = Case(rule="C01", message="", config=nested(conv_kernel_size=2, mask_token_id=None))
    assert [finding.id for finding in check(case, tmp_path).findings] == ["C01"]


def test_a_broken_config_is_still_held_to_the_other_rules(tmp_path: Path) -> None:
    case = Case(
        rule="", message="", config=nested(mask_token_id=None, target_layer_ids=[0, 9]), tensors=without("norm.weight")
    )
    assert {"C06", "C12", "N01"} <= {finding.id for finding in check(case, tmp_path).findings}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), dialect=st.sampled_from(["native", "speculators"]))
def test_junk_in_any_key_is_a_finding_at_most(data: st.DataObject, dialect: str, tmp_path: Path) -> None:
    """No rule stumbles over a value of the wrong type, in whatever key it stands."""
    draft, target = tmp_path / "draft", tmp_path / "target"
    if not draft.exists():
        support.make_speculators(draft, support.REDUCED)
        support.make_target(target, support.REDUCED)
    config = support.native_config() if dialect == "native" else support.speculators_config(support.REDUCED)
    config |= {"is_causal": False, "eagle_aux_hidden_state_layer_ids": [1, 3], "eos_token_id": 1}
    for _ in range(data.draw(st.integers(1, 2))):
        inner = data.draw(
            st.sampled_from(["", *sorted(key for key, value in config.items() if isinstance(value, dict))])
        )
        container = config[inner] if inner else config
        if container:
            container[data.draw(st.sampled_from(sorted(container)))] = data.draw(support.json_junk())
    support.write_config(draft, config)
    validate_draft(
        draft, target=target, target_reference=str(target), engines=parse_engines("vllm,sglang"), level="weights"
    )
