"""A key of unknown meaning, wherever it stands, is named by every command and lost only on demand."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.conversion.repair import repair_draft
from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_runtime.errors import LossyConversion
from dflash_testing import checkpoints as support
from dflash_testing import kinds
from dflash_testing.command_line import invoke
from dflash_testing.config_cases import ABSENT, BODY, METHODS, SLIDING, changed
from dflash_testing.refusals import refuses

LINEAR = {"rope_type": "linear", "factor": 2.0}
GREEDY = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
OUTER = "speculators_config."
NATIVE: Mapping[str, Mapping[str, Any]] = {
    "zig": {"zig": 1}, "zig of null": {"zig": None}, "dflash_config.zig": {"dflash_config.zig": {"zag": [1]}},
    "rope_scaling.zig": {"rope_scaling": {**LINEAR, "zig": 3}},
    "rope_parameters.zig": {
        "rope_theta": ABSENT, "rope_scaling": ABSENT,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "zig": 3},
    },
    "rope_parameters.sliding_attention.zig": {
        "layer_types": [SLIDING] * 2, "sliding_window": 8, "use_sliding_window": True,
        "rope_theta": ABSENT, "rope_scaling": ABSENT,
        "rope_parameters": {SLIDING: {"rope_theta": 1e6, "rope_type": "default", "zig": 3}},
    },
    "dflash_config.is_causal": {"is_causal": ABSENT, "dflash_config.is_causal": True},
    "dflash_config.logit_scale": {"dflash_config.logit_scale": 0.5}, "mlp_bias": {"mlp_bias": True},
}  # fmt: skip
"""The place of an unknown key -> the changes of a native config."""
SPECULATORS: Mapping[str, Mapping[str, Any]] = {
    "zig": {"zig": 1}, f"{BODY}zig": {f"{BODY}zig": 1}, f"{OUTER}zig": {f"{OUTER}zig": 1},
    f"{OUTER}verifier.zig": {f"{OUTER}verifier.zig": 1}, f"{METHODS}[0].zig": {METHODS: [{**GREEDY, "zig": 1}]},
    f"{BODY}rope_scaling.zig": {f"{BODY}rope_scaling": {**LINEAR, "zig": 3}},
    "dflash_config": {"dflash_config": {"zig": 1}}, f"{BODY}dflash_config.zig": {f"{BODY}dflash_config": {"zig": 1}},
}  # fmt: skip
"""The same for a speculators config."""
Write = Callable[[support.Shape], dict[str, Any]]
WRITERS: Mapping[str, Write] = {"native": support.native_config, "speculators": support.speculators_config}
CASES = [("native", place) for place in NATIVE] + [("speculators", place) for place in SPECULATORS]


def make(path: Path, dialect: str, place: str) -> Path:
    """A draft with an unknown key."""
    changes = {"native": NATIVE, "speculators": SPECULATORS}[dialect][place]
    config = changed({**WRITERS[dialect](support.SMALL), "num_target_layers": 4}, changes)
    return support.write_checkpoint(path, config, support.body_arrays())


def stated(config: Any, place: str) -> Any:
    """The value of a dotted key. A part such as `key[0]` indexes a list."""
    for part in place.partition(" ")[0].split("."):
        key, _, index = part.partition("[")
        config = config[key]
        config = config[int(index[:-1])] if index else config
    return config


@pytest.mark.parametrize(("dialect", "place"), CASES)
def test_it_is_named_by_inspect_and_validate(dialect: str, place: str, tmp_path: Path) -> None:
    draft, key = make(tmp_path / "draft", dialect, place), place.partition(" ")[0]
    found = json.loads(invoke("inspect", draft, "--json").out)
    assert {key.removeprefix(BODY), f"speculators.{key}"} & found["carried"].keys()
    findings = validate_draft(ValidationPlan(draft=draft)).findings
    assert f"config.json:{key}" in {item.location for item in findings if item.id == "C49"}


@pytest.mark.parametrize(("dialect", "place"), CASES)
def test_its_own_dialect_keeps_it_and_lists_it_once(dialect: str, place: str, tmp_path: Path) -> None:
    draft = make(tmp_path / "draft", dialect, place)
    manifest = support.convert(draft, tmp_path / "out", dialect, verifier="acme/target")
    before, after = (json.loads((path / "config.json").read_text()) for path in (draft, tmp_path / "out"))
    if "sliding_attention." not in place:  # one rope of both kinds becomes plain
        assert stated(after, place) == stated(before, place)
    listed = [item["from"] for item in manifest["config"] if item["from"] is not None]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("place", SPECULATORS)
def test_another_dialect_keeps_it_or_asks(place: str, tmp_path: Path) -> None:
    """A native file cannot state some keys. Only allow_lossy drops them, and the manifest lists them."""
    draft = make(tmp_path / "draft", "speculators", place)
    if place.startswith(BODY):
        support.convert(draft, tmp_path / "out", "native")
        assert "zig" in json.dumps(json.loads((tmp_path / "out" / "config.json").read_text()))
        return
    with refuses(LossyConversion, "keys-lost"):
        support.convert(draft, tmp_path / "out", "native")
    manifest = support.convert(draft, tmp_path / "out", "native", allow_lossy=True)
    dropped = {item["from"] for item in manifest["config"] if item["change"] == "dropped"}
    assert any(item.startswith(place) for item in dropped)


@pytest.mark.parametrize("dialect", ["native", "speculators"])
def test_a_repair_neither_settles_nor_loses_it(dialect: str, tmp_path: Path) -> None:
    """C49 is never fixed: no tool knows whether the training applied the key."""
    cases = {"native": NATIVE, "speculators": SPECULATORS}[dialect]
    for index, place in enumerate(cases):
        draft = make(tmp_path / f"draft-{index}", dialect, place)
        plan = ValidationPlan(draft=draft, engines=parse_engines("vllm"))
        repaired = repair_draft(plan, validate_draft(plan), tmp_path / f"fixed-{index}")
        assert repaired is None or ("C49" not in repaired.fixed and "C49" in {item.id for item in repaired.left}), place


def test_a_repair_does_not_call_settings_fixed_that_it_drops(tmp_path: Path) -> None:
    """Speculators files of this tool have one proposal method, so that a second one is dropped and stays listed."""
    config = changed(support.speculators_config(), {METHODS: [GREEDY, {**GREEDY, "proposal_type": "sampling"}]})
    plan = ValidationPlan(draft=support.write_checkpoint(tmp_path / "draft", config, support.body_arrays()))
    repaired = repair_draft(plan, validate_draft(plan), tmp_path / "fixed")
    assert repaired is not None
    assert (repaired.fixed, "C49" in {item.id for item in repaired.left}) == (("C33",), True)


def test_a_key_that_is_checked_is_not_called_unknown(tmp_path: Path) -> None:
    """eagle_aux_hidden_state_layer_ids states the tapped layers a second time, and C08 compares both lists."""
    config = support.native_config(eagle_aux_hidden_state_layer_ids=[1, 3])
    draft = support.write_checkpoint(tmp_path / "draft", config, support.body_arrays())
    assert "C49" not in {item.id for item in validate_draft(ValidationPlan(draft=draft)).findings}


@pytest.mark.parametrize("name", kinds.CASES)
def test_a_key_of_rope_is_named_in_a_draft_of_every_kind(name: str, tmp_path: Path) -> None:
    case = kinds.CASES[name]
    body = BODY if "transformer_layer_config" in case.config else ""
    config = changed(case.config, {f"{body}rope_scaling": {**LINEAR, "zig": 3}})
    draft = case.write(tmp_path / "draft", config)
    found = json.loads(invoke("inspect", draft, "--json").out)
    assert found["carried"][f"{body}rope_scaling.zig"] == 3
    findings = validate_draft(ValidationPlan(draft=draft)).findings
    assert f"config.json:{body}rope_scaling.zig" in {item.location for item in findings if item.id == "D02"}
