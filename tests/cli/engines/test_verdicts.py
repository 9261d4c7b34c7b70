"""What each engine is said to do with habits of exporters is what its own code does.

Sources: vLLM 0.24.0 and 0.33.0, SGLang 0.5.23 and llama.cpp's converter by reading, see each engine's `habits`; z-lab
0.1.0 by running its loader, see tests/golden/engine_habits.json.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_cli.engines.serving_engine import parse_engines
from dflash_cli.validation.report import Report
from dflash_cli.validation.validator import ValidationRequest, validate_draft
from dflash_testing import checkpoints as support
from dflash_testing import habits
from dflash_testing.paths import GOLDEN
from dflash_testing.rule_cases.base import MIXED, Case, both, build, check, nested, rename, top, without

ENGINES = ("vllm@0.24", "vllm@0.33", "sglang", "transformers", "llama.cpp")
TABLE = {
    "model-prefix": ("stops", "stops", "serves", "serves", "stops"),
    "other-prefix": ("stops", "stops", "drops", "drops", "stops"),
    "encoder-names": ("stops", "serves", "serves", "drops", "stops"),
    "fused-projections": ("serves", "serves", "serves", "drops", "stops"),
    "no-head-dim": ("stops", "stops", "stops", "stops", "stops"),
    "interleaved-rope": ("drops", "serves", "serves", "drops", "drops"),
    "interleaved-rope-by-its-name": ("drops", "drops", "serves", "drops", "drops"),
    "gemma-norms": ("drops", "drops", "serves", "drops", "drops"),
    "unsorted-taps": ("drops", "drops", "drops", "serves", "serves"),
    "repeated-taps": ("stops", "stops", "stops", "serves", "serves"),
    "use-swa": ("drops", "serves", "drops", "drops", "drops"),
    "flat-mlx": ("stops", "stops", "stops", "serves", "stops"),
    "mask-pickle": ("drops", "serves", "serves", "drops", "drops"),
    "mask-safetensors": ("stops", "stops", "drops", "drops", "drops"),
}
"""Habit -> what each of `ENGINES` does."""


def report_on(draft: Path, engine: str) -> Report:
    return validate_draft(ValidationRequest(draft=draft, engines=parse_engines(engine)))


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


def test_the_reference_is_as_it_was_recorded() -> None:
    """The recorded loader says which habits it serves as meant."""
    recorded: dict[str, Any] = json.loads((GOLDEN / "engine_habits.json").read_text(encoding="utf-8"))
    assert recorded["provenance"]["versions"]["dflash"] == "0.1.0"
    plain = recorded["readings"]["plain"]
    for habit, reading in recorded["readings"].items():
        if habit == "plain":
            continue
        expected = TABLE[habit][ENGINES.index("transformers")]
        if expected == "stops":
            assert "error" in reading, habit
        elif expected == "serves":
            assert reading == plain | {"taps": reading["taps"]}, habit
            assert reading["taps"] == habits.TAPS.get(habit, plain["taps"])
        elif habit in habits.LOADED_IN_SILENCE:
            assert reading == plain, habit
        else:
            assert reading["num_missing"] > 0, habit


def test_a_causality_that_no_key_states_is_not_called_trained(tmp_path: Path) -> None:
    """Without is_causal, what a mixed draft was trained with is not known: a warning, and "read as"."""
    case = Case(rule="", message="", shape=MIXED, config=without("is_causal"), engines="llama.cpp,sglang,vllm@0.24")
    report = check(case, tmp_path)
    assert report.count("error") == 1  # vLLM 0.24 has no windows
    assert {item.id for item in report.findings if item.severity == "error"} == {"S28"}
    for verdict in report.verdicts:
        assert "trained" not in verdict.text
    assert "not stated, read as: 1 of 2 causal" in report.verdicts[0].text
    stated = check(Case(rule="", message="", config=top(is_causal=True), engines="vllm@0.24"), tmp_path / "stated")
    assert "(trained: 2 of 2 causal)" in stated.verdicts[0].text


@pytest.mark.parametrize("engine", ["sglang", "vllm", "transformers"])
def test_engines_are_judged_alike_on_a_specforge_export(engine: str, tmp_path: Path) -> None:
    modes = nested(attention_mode="dflash")
    case = Case(rule="", message="", shape=MIXED, config=both(without("is_causal"), modes), engines=engine)
    found = [item for item in check(case, tmp_path).findings if "and is read as 0" in item.message]
    assert [item.severity for item in found] == ["warning"]


def test_no_file_is_said_to_help_a_release_that_serves_none(tmp_path: Path) -> None:
    report = check(Case(rule="", message="", config=top(is_causal=True), engines="vllm@0.24"), tmp_path)
    assert [item.fix.partition(":")[0] for item in report.findings if item.severity == "error"] == [
        "no file helps this release; use vLLM 0.33 or later"
    ]
    mixed = check(
        Case(rule="", message="", shape=MIXED, config=top(is_causal=False), engines="vllm@0.24"), tmp_path / "m"
    )
    assert {item.serve_flag for item in mixed.findings} == {None}


def test_faults_that_differ_in_their_place_only_are_one_finding(tmp_path: Path) -> None:
    def unknown(arrays: dict[str, Any]) -> None:
        arrays.update({f"optimizer.{index}": np.zeros(4, dtype=np.float32) for index in range(5)})

    case = Case(rule="", message="", tensors=unknown)
    draft = build(case, tmp_path / "draft")
    found = [item for item in report_on(draft, "").findings if "left over from training" in item.message]
    assert [item.message for item in found] == ["unexpected: left over from training (and in 4 more places)"]


@pytest.mark.parametrize(
    "change", [nested(conv_kernel_size=2), top(markov_rank=0), top(architectures=["DFlash2DraftModel"])]
)
@pytest.mark.parametrize(
    "command", [("validate",), ("inspect",), ("serve-command", "--engine", "vllm"), ("convert", "--to", "vllm")]
)
def test_a_relative_is_unsupported_in_every_command(
    change: Callable[[dict[str, Any]], object], command: tuple[str, ...], tmp_path: Path
) -> None:
    draft = build(Case(rule="", message="", config=change), tmp_path / "draft")
    target = support.make_target(tmp_path / "target")
    more = [] if command[0] == "inspect" else ["--target", target]
    out = [tmp_path / "out"] if command[0] == "convert" else []
    outcome = support.invoke(command[0], draft, *out, *command[1:], *more)
    assert outcome.code == 5, outcome.err


def test_a_prefix_that_no_reader_knows_is_for_the_exporter(tmp_path: Path) -> None:
    report = check(Case(rule="", message="", tensors=rename("", "encoder."), engines="sglang"), tmp_path)
    fixes = [item.fix for item in report.findings if item.message == "names start with 'encoder.'"]
    assert fixes
    assert fixes[0].startswith("export the draft again")
