"""The declared outcome of each habit of exporters equals what the engine's own code does.

Sources: the code of vLLM 0.24.0 to 0.33.0, SGLang 0.5.23 and llama.cpp's converter, see each engine's `habits`; runs of
z-lab 0.1.0's loader, see tests/golden/engine_habits.json.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.rules.report import Report
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_testing import checkpoints as support
from dflash_testing import habits
from dflash_testing.command_line import invoke
from dflash_testing.paths import GOLDEN
from dflash_testing.rule_cases.base import MIXED, SLIDING, Case, both, build, check, nested, rename, top, without

ENGINES = ("vllm@0.24", "vllm@0.25", "vllm@0.28", "vllm@0.33", "sglang", "transformers", "llama.cpp")
TABLE = {
    "model-prefix": ("stops", "stops", "stops", "stops", "serves", "serves", "stops"),
    "other-prefix": ("stops", "stops", "stops", "stops", "drops", "drops", "stops"),
    "encoder-names": ("stops", "stops", "serves", "serves", "serves", "drops", "stops"),
    "fused-projections": ("serves", "serves", "serves", "serves", "serves", "drops", "stops"),
    "no-head-dim": ("stops", "stops", "stops", "stops", "stops", "stops", "stops"),
    "interleaved-rope": ("drops", "drops", "drops", "serves", "serves", "drops", "drops"),
    "interleaved-rope-by-its-name": ("drops", "drops", "drops", "drops", "serves", "drops", "drops"),
    "gemma-norms": ("drops", "drops", "drops", "drops", "serves", "drops", "drops"),
    "nested-style": ("drops", "drops", "drops", "drops", "drops", "drops", "drops"),
    "unsorted-taps": ("drops", "drops", "drops", "drops", "drops", "serves", "serves"),
    "repeated-taps": ("stops", "stops", "stops", "stops", "stops", "serves", "serves"),
    "use-swa": ("drops", "serves", "serves", "serves", "drops", "drops", "drops"),
    "flat-mlx": ("stops", "stops", "stops", "stops", "stops", "serves", "stops"),
    "mask-pickle": ("drops", "serves", "serves", "serves", "serves", "drops", "drops"),
    "mask-safetensors": ("stops", "stops", "stops", "stops", "drops", "drops", "drops"),
}
"""Habit -> the outcome in each of `ENGINES`."""


def report_on(draft: Path, engine: str) -> Report:
    return validate_draft(ValidationPlan(draft=draft, engines=parse_engines(engine)))


@pytest.mark.parametrize("habit", TABLE)
def test_the_verdict_is_what_the_engine_does(habit: str, tmp_path: Path) -> None:
    draft = habits.make(tmp_path / "dflash-draft", habit)
    found = {engine: report_on(draft, engine).verdicts[0].outcome for engine in ENGINES}
    assert found == dict(zip(ENGINES, TABLE[habit], strict=True))


@pytest.mark.parametrize("habit", TABLE)
def test_an_engine_that_serves_it_finds_no_error(habit: str, tmp_path: Path) -> None:
    draft = habits.make(tmp_path / "dflash-draft", habit)
    for engine, outcome in zip(ENGINES, TABLE[habit], strict=True):
        assert bool(report_on(draft, engine).count("error")) == (outcome != "serves"), engine


def readings(reader: str) -> dict[str, dict[str, Any]]:
    """Habit -> the values that a reader's own code read from such a draft."""
    recorded = json.loads((GOLDEN / "engine_habits.json").read_text(encoding="utf-8"))
    assert recorded["provenance"]["versions"]["dflash"] == "0.1.0"
    return {item["habit"]: item["reading"] for item in recorded["readings"] if item["reader"] == reader}


def test_the_reference_has_the_declared_outcomes() -> None:
    """z-lab's loader stops, leaves tensors at random values, or ignores the habit."""
    found = readings("z-lab 0.1.0")
    plain = found["plain"]
    assert "error" in found["no-head-dim"]
    for habit in ("other-prefix", "encoder-names", "fused-projections"):
        assert found[habit]["missing"], habit
    for habit in ("model-prefix", "flat-mlx"):
        assert found[habit] == plain, habit
    for habit, taps in (("unsorted-taps", [2, 0]), ("repeated-taps", [2, 2])):
        assert found[habit] == plain | {"taps": taps}, "in the listed order"
    for habit in ("interleaved-rope", "interleaved-rope-by-its-name", "gemma-norms", "use-swa", "mask-pickle"):
        assert found[habit] == plain, f"{habit}: the loader ignores it"


def test_windows_by_use_swa_are_read_by_vllm_alone() -> None:
    found = {reader: readings(reader)["use-swa"]["windows"] for reader in ("vllm 0.33.0", "sglang 0.5.23")}
    assert found == {"vllm 0.33.0": [16, 16], "sglang 0.5.23": [None, None]}


@pytest.mark.parametrize("reader", ["vllm 0.33.0", "sglang 0.5.23", "z-lab 0.1.0"])
@pytest.mark.parametrize("habit", ["mixed-unstated", "mixed-specforge"])
def test_unstated_causality_is_served_by_the_kind_of_layer(reader: str, habit: str, tmp_path: Path) -> None:
    """`served_causality` of each engine equals the causality that its own code reads."""
    assert readings(reader)[habit]["causal"] == [True, False]
    name = {"vllm 0.33.0": "vllm", "sglang 0.5.23": "sglang", "z-lab 0.1.0": "transformers"}[reader]
    verdict = report_on(habits.make(tmp_path / "draft", habit), name).verdicts[0]
    assert verdict.causal == (True, False)
    assert verdict.outcome == "serves"


@pytest.mark.parametrize("reader", ["vllm 0.33.0", "sglang 0.5.23"])
def test_an_unstated_head_dim_is_that_of_the_config_class(reader: str) -> None:
    assert readings(reader)["no-head-dim"]["head_dim"] == 128


def test_a_causality_that_no_key_states_is_not_called_trained(tmp_path: Path) -> None:
    """Without is_causal, the causality of training is not known for a mixed draft, so it is a warning."""
    case = Case(shape=MIXED, config=without("is_causal"), engines="llama.cpp,sglang,vllm@0.24")
    report = check(case, tmp_path)
    assert report.count("error") == 1  # vLLM 0.24 has no windows
    assert {item.id for item in report.findings if item.severity == "error"} == {"S28"}
    assert not any(verdict.is_stated for verdict in report.verdicts)
    assert sum(report.verdicts[0].trained or ()) == 1
    assert "1 of 2" in report.verdicts[0].text
    stated = check(Case(config=top(is_causal=True), engines="vllm@0.24"), tmp_path / "stated")
    assert stated.verdicts[0].is_stated
    assert "2 of 2" in stated.verdicts[0].text


@pytest.mark.parametrize("engine", ["sglang", "vllm", "transformers"])
def test_engines_are_judged_alike_on_a_specforge_export(engine: str, tmp_path: Path) -> None:
    modes = nested(attention_mode="dflash")
    case = Case(shape=MIXED, config=both(without("is_causal"), modes), engines=engine)
    found = [
        item for item in check(case, tmp_path).findings if item.location == "config.json:is_causal" and item.engines
    ]
    assert [item.severity for item in found] == ["warning"]


@pytest.mark.parametrize(("release", "shape"), [("0.24", SLIDING), ("0.24", MIXED), ("0.25", MIXED)])
def test_layers_that_a_release_cannot_serve_are_one_finding(release: str, shape: support.Shape, tmp_path: Path) -> None:
    """Windows and causality are lost together, and another file does not help."""
    told = top(sliding_window_non_causal=False)
    case = Case(shape=shape, dialect="speculators", config=told, engines=f"vllm@{release}")
    (found,) = [item for item in check(case, tmp_path).findings if item.severity == "error"]
    assert "vLLM 0.33" in found.fix
    assert ("0 of 2" in found.message) is (release == "0.24")
    assert found.serve_flag is None


def test_one_flag_for_all_layers_is_read_by_every_release(tmp_path: Path) -> None:
    """0.24 and 0.25 read dflash_config.causal, not is_causal."""
    for minor in (24, 25, 26, 33):
        case = Case(config=both(top(is_causal=True), nested(causal=True)), engines=f"vllm@0.{minor}")
        (verdict,) = check(case, tmp_path / str(minor)).verdicts
        assert (verdict.outcome, verdict.causal) == ("serves", (True, True))


def test_faults_that_differ_only_in_location_are_one_finding(tmp_path: Path) -> None:
    def unknown(arrays: dict[str, Any]) -> None:
        arrays.update({f"optimizer.{index}": np.zeros(4, dtype=np.float32) for index in range(5)})

    case = Case(tensors=unknown)
    draft = build(case, tmp_path / "draft")
    found = [item for item in report_on(draft, "").findings if item.location.startswith("model.safetensors:optimizer")]
    assert [item.id for item in found] == ["N02"]
    assert "4" in found[0].message


@pytest.mark.parametrize("change", [top(architectures=["Gemma4DSparkModel"]), top(architectures=["OwnDFlash2Model"])])
@pytest.mark.parametrize(
    "command", [("validate",), ("inspect",), ("serve-command", "--engine", "llama.cpp"), ("convert", "--to", "vllm")]
)
def test_a_relative_that_no_engine_serves_is_unsupported_in_every_command(
    change: Callable[[dict[str, Any]], object], command: tuple[str, ...], tmp_path: Path
) -> None:
    draft = build(Case(config=change), tmp_path / "draft")
    target = support.make_target(tmp_path / "target")
    more = [] if command[0] == "inspect" else ["--target", target]
    out = [tmp_path / "out"] if command[0] == "convert" else []
    outcome = invoke(command[0], draft, *out, *command[1:], *more)
    assert outcome.code == 5, outcome.err


@pytest.mark.parametrize(
    ("engine", "architecture", "outcome"),
    [
        ("vllm", "Gemma4DSparkModel", "serves"),
        ("vllm@0.25", "Gemma4DSparkModel", "stops"),
    ],
)
def test_a_kind_that_dflash_does_not_run_may_be_served(
    engine: str, architecture: str, outcome: str, tmp_path: Path
) -> None:
    """`inspect`, `validate` and `serve-command` give one answer."""
    draft = build(Case(config=top(architectures=[architecture])), tmp_path / "draft")
    (verdict,) = report_on(draft, engine).verdicts
    assert (verdict.outcome, verdict.reasons) == (outcome, ("C01",))
    target = support.make_target(tmp_path / "target")
    served = invoke("serve-command", draft, "--target", target, "--engine", engine)
    assert served.code == (0 if outcome == "serves" else 5), served.err
    assert ("dspark" in served.out) == (outcome == "serves" and architecture == "Gemma4DSparkModel")
    described = invoke("inspect", draft)
    assert described.error is not None
    if "@" not in engine:
        assert (verdict.engine in str(described.error.hint)) == (outcome == "serves")


def test_a_prefix_that_no_reader_knows_is_for_the_exporter(tmp_path: Path) -> None:
    report = check(Case(tensors=rename("", "encoder."), engines="sglang"), tmp_path)
    (found,) = [item for item in report.findings if item.id == "N03"]
    assert "'encoder.'" in found.message
    assert "--fix-out" not in found.fix


@pytest.mark.parametrize("habit", ["interleaved-rope", "gemma-norms"])
def test_a_draft_that_this_tool_would_misread_is_not_run(habit: str, tmp_path: Path) -> None:
    """The run level would measure another model than the trained draft."""
    draft, target = habits.make(tmp_path / "draft", habit), support.make_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [3, 4, 5]}\n' * 4)
    prompts = ("--prompts", tmp_path / "prompts.jsonl", "-n", 8)
    outcome = invoke("validate", draft, "--target", target, "--level", "run", *prompts, "--json")
    assert json.loads(outcome.out)["search"] is None
    refused = invoke("generate", "x", "-d", draft, "-t", target)
    assert refused.code == 5
    assert ("use_gemma_norm" if habit == "gemma-norms" else "is_neox_style") in refused.err


@pytest.mark.parametrize("command", ["diagnose", "generate", "eval-acceptance"])
def test_a_relative_is_not_run(command: str, tmp_path: Path) -> None:
    draft = build(Case(config=nested(gru_hidden_dim=2)), tmp_path / "draft")
    words = ("x", "-d", draft) if command == "generate" else (draft,)
    outcome = invoke(command, *words, "--target", support.make_target(tmp_path / "target"))
    assert outcome.code == 5, outcome.err
