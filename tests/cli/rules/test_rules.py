"""Every rule reports the faults in its cases, and no rule reports a fault in a sound draft."""

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.checkpoints.target_copies import find_difference
from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.rules.rule import PLACEHOLDER, all_rules
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.themes import rows
from dflash_cli.rules.validator import validate_draft
from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT
from dflash_testing.rule_cases.base import SLIDING, SPEC, Case, body, both, check, edit, nested, nothing, without
from dflash_testing.rule_cases.collected import CASES

REGISTERING = re.compile(r"check(_\w+)?|reading_rule")
"""Names of functions that register a rule by its id, their first argument."""

ENGINES = "vllm,sglang,transformers,llama.cpp"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_fires(case: Case, tmp_path: Path) -> None:
    report = check(case, tmp_path)
    assert case.reported(report), report.findings
    assert not [item.fix for item in report.findings if PLACEHOLDER.search(item.fix) or "DRAFT" in item.fix.split()]


def test_every_rule_has_a_case() -> None:
    covered = {case.rule for case in CASES}
    assert {rule.id for rule in all_rules() if rule.level not in ("run", "kv-transfer")} == covered


def test_only_the_decorator_of_a_rule_names_its_id() -> None:
    """Flags of the decorator state every other consequence of a rule."""
    ids = {rule.id for rule in all_rules()}
    stated = re.compile(rf"""["']({"|".join(ids)})["']""")
    for file in (ROOT / "dflash_cli").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if not stated.search(text):
            continue
        tree = ast.parse(text)
        decorators = {
            node.args[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and REGISTERING.fullmatch(node.func.id)
            and node.args
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in ids:
                assert node in decorators, f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_every_rule_has_an_effect_a_command_and_a_source(rule: Any) -> None:
    assert rule.title.endswith(".")
    assert rule.effect
    assert "dflash " in rule.fix
    assert len(rule.source) > 5


@pytest.mark.parametrize("level", ["headers", "weights"])
@pytest.mark.parametrize("dialect", ["native", "speculators", "reduced"])
@pytest.mark.parametrize("shape", [support.SMALL, SLIDING, replace(support.SMALL, bias=True)])
def test_silent_on_sound_drafts(dialect: str, shape: support.Shape, level: Any, tmp_path: Path) -> None:
    target = support.make_target(tmp_path / "target", shape)
    if dialect == "native":
        draft = support.make_native(tmp_path / "dflash-draft", shape)
    else:
        reduced = replace(shape, draft_vocab=12) if dialect == "reduced" else shape
        draft = support.make_speculators(tmp_path / "dflash-draft", reduced)
    request = ValidationPlan(
        draft=draft,
        draft_reference=str(draft),
        target=target,
        target_reference=str(target),
        engines=parse_engines("vllm"),
        level=level,
        num_speculative_tokens=shape.block - 1,
    )
    assert validate_draft(request).findings == ()


@pytest.mark.parametrize("level", ["headers", "weights"])
@pytest.mark.parametrize("name", ["tiny", "tiny:reduced"])
def test_silent_on_the_bundled_drafts(name: str, level: Any) -> None:
    engines = ENGINES if name == "tiny" else "vllm"
    request = ValidationPlan(
        draft=fetch_directory(name, Role.DRAFT),
        target=fetch_directory(TINY, Role.TARGET),
        target_reference=TINY,
        engines=parse_engines(engines),
        level=level,
    )
    report = validate_draft(request)
    assert report.findings == ()
    assert [verdict.outcome for verdict in report.verdicts] == ["serves"] * len(report.engines)


def test_a_relative_gets_one_finding(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        nested(mask_token_id=None)(config)
        config["architectures"] = ["Gemma4DSparkModel"]

    case = Case(rule="C01", config=change)
    assert [finding.id for finding in check(case, tmp_path).findings] == ["C01"]


@pytest.mark.parametrize("rule", ["C04", "C30"])
def test_a_fault_for_one_engine_names_that_engine(rule: str, tmp_path: Path) -> None:
    """`diagnose` runs the draft in dflash, so it does not name a fault of one engine as the cause."""
    case = next(item for item in CASES if item.rule == rule and not item.engines)
    (found,) = [item for item in check(case, tmp_path).findings if item.id == rule]
    assert (found.severity, found.engines) == ("warning", ("vllm",))


def test_a_tap_outside_the_target_is_one_finding(tmp_path: Path) -> None:
    config = nested(target_layer_ids=[0, 4])
    report = check(Case(config=config, target=lambda config: None), tmp_path)
    assert [item.id for item in report.findings if re.search(r"\b4\b", item.message)] == ["P06"]


def test_findings_of_one_rule_have_different_effects(tmp_path: Path) -> None:
    """The effect of a warning is weaker than the effect of an error."""
    for rule in ("N13", "P31"):
        cases = [item for item in CASES if item.rule == rule]
        found = {
            item.effect
            for number, case in enumerate(cases)
            for item in case.reported(check(case, tmp_path / f"{rule}-{number}"))
        }
        assert len(found) > 1, rule


def test_other_rules_also_check_a_broken_config(tmp_path: Path) -> None:
    case = Case(config=nested(mask_token_id=None, target_layer_ids=[0, 9]), tensors=without("norm.weight"))
    assert {"C06", "C12", "N01"} <= {finding.id for finding in check(case, tmp_path).findings}


def test_a_wrong_vocab_size_is_a_fault_of_the_config_if_the_tensors_fit_the_target(tmp_path: Path) -> None:
    wrong = Case(dialect=SPEC, shape=support.REDUCED, config=body(vocab_size=31))
    alone = {finding.id for finding in check(wrong, tmp_path).findings}
    beside = {finding.id for finding in check(replace(wrong, target=nothing), tmp_path / "pair").findings}
    assert "M03" in alone
    assert "P02" in beside
    assert "M03" not in beside


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("M05", edit("t2d", lambda item: item | (np.arange(32) == np.flatnonzero(~item)[0]))),
        ("M06", edit("d2t", lambda item: item + np.arange(12))),
        ("M07", edit("d2t", np.zeros_like)),
        ("M01", lambda arrays: arrays.pop("d2t")),
        ("M03", edit("d2t", lambda item: item[:-1])),
    ],
)
def test_rows_are_not_compared_through_a_broken_map(rule: str, change: Any, tmp_path: Path) -> None:
    """The embedding has a row for every id and needs no map."""
    embedding = np.roll(support.target_arrays(support.REDUCED)["model.embed_tokens.weight"], 1, axis=0)
    head = edit("lm_head.weight", lambda item: np.roll(item, 1, axis=0))
    case = Case(
        dialect=SPEC, shape=support.REDUCED, level="weights", target=nothing,
        tensors=both(change, head, lambda arrays: arrays.update({"embed_tokens.weight": embedding})),
    )  # fmt: skip
    found = [(finding.id, finding.location) for finding in check(case, tmp_path).findings]
    assert rule in {item for item, _ in found}
    assert {location for item, location in found if item in ("M10", "M12")} == {"model.safetensors:embed_tokens.weight"}


def test_a_head_and_its_map_may_be_in_any_order_together(tmp_path: Path) -> None:
    order = np.roll(np.arange(12), 5)
    moved = both(
        edit("d2t", lambda item: (item + np.arange(12))[order] - np.arange(12)),
        edit("lm_head.weight", lambda item: item[order]),
    )
    case = Case(dialect=SPEC, shape=support.REDUCED, level="weights", target=nothing, tensors=moved)
    found = {finding.id: finding.severity for finding in check(case, tmp_path).findings}
    assert found["M13"] == "info"
    assert not found.keys() & {"M05", "M06", "M10", "M11", "M12"}


def test_two_rules_compare_a_copied_head_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison reads all rows of draft and target."""
    compared: list[str] = []

    def counting(draft: Any, name: str, target: Any) -> str | None:
        compared.append(name)
        return find_difference(draft, name, target)

    monkeypatch.setattr(rows, "find_difference", counting)
    wrong = next(case for case in CASES if case.rule == "M12")
    assert {"M10", "M12"} <= {finding.id for finding in check(wrong, tmp_path).findings}
    assert compared == ["lm_head.weight"]


@pytest.mark.parametrize("rule", ["N33", "N34", "N35", "N36", "N37"])
def test_a_tensor_with_nan_is_compared_with_no_other(rule: str, tmp_path: Path) -> None:
    """NaN has a rule of its own. Other layers do not differ from it."""
    case = next(case for case in CASES if case.rule == rule)

    def spoil(arrays: dict[str, Any]) -> None:
        for name in ("layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight", "norm.weight"):
            arrays[name] = np.where(np.arange(arrays[name].size).reshape(arrays[name].shape) == 0, np.nan, arrays[name])

    findings = check(replace(case, tensors=spoil), tmp_path).findings
    found = {item.id for item in findings}
    assert rule not in found
    assert "N13" in found


WRONG = (None, 3, "x", [["x"]], {"a": None})
"""A value of each JSON type."""


@pytest.fixture(scope="module")
def reduced_pair(tmp_path_factory: pytest.TempPathFactory) -> ValidationPlan:
    """A reduced draft whose config a test may replace, and its target."""
    folder = tmp_path_factory.mktemp("pair")
    target = support.make_target(folder / "target", support.REDUCED)
    return ValidationPlan(
        draft=support.make_speculators(folder / "draft", support.REDUCED),
        target=target,
        target_reference=str(target),
        engines=parse_engines(ENGINES),
        num_speculative_tokens=3,
    )


def full_config(dialect: str) -> dict[str, Any]:
    config = support.speculators_config(support.REDUCED)
    if dialect == "native":
        config = support.native_config(rope_scaling={"rope_type": "linear", "factor": 2.0})
    return config | {"is_causal": False, "eagle_aux_hidden_state_layer_ids": [1, 3], "eos_token_id": 1}


def check_config(pair: ValidationPlan, config: dict[str, Any]) -> None:
    assert isinstance(pair.draft, Path)
    support.write_config(pair.draft, config)
    validate_draft(pair)


def containers(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config, *(value for value in config.values() if isinstance(value, dict) and value)]


@pytest.mark.parametrize("dialect", ["native", "speculators"])
def test_a_value_of_another_type_is_only_a_finding(dialect: str, reduced_pair: ValidationPlan) -> None:
    """No rule raises an error for a value of any type, under any key."""
    config = full_config(dialect)
    for container in containers(config):
        for key, right in [*container.items()]:
            for container[key] in WRONG:
                check_config(reduced_pair, config)
            container[key] = right


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), dialect=st.sampled_from(["native", "speculators"]))
def test_junk_values_of_two_keys_are_only_findings(
    data: st.DataObject, dialect: str, reduced_pair: ValidationPlan
) -> None:
    """Also for rules that read weights."""
    config = full_config(dialect)
    for _ in range(data.draw(st.integers(1, 2))):
        container = data.draw(st.sampled_from(containers(config)))
        container[data.draw(st.sampled_from(sorted(container)))] = data.draw(support.json_junk())
    check_config(replace(reduced_pair, level="weights"), config)


def test_a_sound_quantised_checkpoint_is_not_compared_with_plain_shapes(tmp_path: Path) -> None:
    """The quantizer chooses names, types and shapes. The one finding is a warning that dflash does not check them."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    draft, target = tmp_path / "draft", tmp_path / "target"
    support.make_native(draft)
    support.make_target(target)
    weights = {}
    for name, tensor in load_file(draft / "model.safetensors").items():
        if name.endswith("proj.weight"):
            weights[f"{name}_packed"] = np.zeros((tensor.shape[0], tensor.shape[1] // 2), dtype=np.uint8)
            weights[f"{name}_scale"] = np.ones((tensor.shape[0], 1), dtype=np.float32)
        else:
            weights[name] = tensor
    save_file(weights, draft / "model.safetensors")
    support.write_config(draft, support.native_config() | {"quantization_config": {"quant_method": "modelopt"}})
    request = ValidationPlan(draft=draft, target=target, target_reference=str(target))
    found = [(finding.id, str(finding.severity)) for finding in validate_draft(request).findings]
    assert found == [("N11", "warning")]
