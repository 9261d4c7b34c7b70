"""What each engine is said to do with habits of exporters is what its own code does.

Sources: vLLM 0.24.0 to 0.33.0, SGLang 0.5.23 and llama.cpp's converter by reading, see each engine's `habits`; z-lab
0.1.0 by running its loader, see tests/golden/engine_habits.json.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_cli.engines.serving_engine import parse_engines
from dflash_cli.rules.report import Report
from dflash_cli.rules.validator import ValidationPlan, validate_draft
from dflash_testing import checkpoints as support
from dflash_testing import habits
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
"""Habit -> what each of `ENGINES` does."""


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
    """Habit -> what a reader's own code took from such a draft."""
    recorded = json.loads((GOLDEN / "engine_habits.json").read_text(encoding="utf-8"))
    assert recorded["provenance"]["versions"]["dflash"] == "0.1.0"
    return {item["habit"]: item["reading"] for item in recorded["readings"] if item["reader"] == reader}


def test_the_reference_does_as_it_is_said_to() -> None:
    """z-lab's loader stops, leaves tensors at random values, or is the same as for a draft without the habit."""
    found = readings("z-lab 0.1.0")
    plain = found["plain"]
    assert "error" in found["no-head-dim"]
    for habit in ("other-prefix", "encoder-names", "fused-projections"):
        assert found[habit]["missing"], habit
    for habit in ("model-prefix", "flat-mlx"):
        assert found[habit] == plain, habit
    for habit, taps in (("unsorted-taps", [2, 0]), ("repeated-taps", [2, 2])):
        assert found[habit] == plain | {"taps": taps}, "as they are listed"
    for habit in ("interleaved-rope", "interleaved-rope-by-its-name", "gemma-norms", "use-swa", "mask-pickle"):
        assert found[habit] == plain, f"{habit}: the loader does not look at it"


def test_windows_by_use_swa_are_read_by_vllm_alone() -> None:
    found = {reader: readings(reader)["use-swa"]["windows"] for reader in ("vllm 0.33.0", "sglang 0.5.23")}
    assert found == {"vllm 0.33.0": [16, 16], "sglang 0.5.23": [None, None]}


@pytest.mark.parametrize("reader", ["vllm 0.33.0", "sglang 0.5.23", "z-lab 0.1.0"])
@pytest.mark.parametrize("habit", ["mixed-unstated", "mixed-specforge"])
def test_unstated_causality_is_served_by_the_kind_of_layer(reader: str, habit: str, tmp_path: Path) -> None:
    """What `served_causality` says of each engine is what its own code takes."""
    assert readings(reader)[habit]["causal"] == [True, False]
    name = {"vllm 0.33.0": "vllm", "sglang 0.5.23": "sglang", "z-lab 0.1.0": "transformers"}[reader]
    verdict = report_on(habits.make(tmp_path / "draft", habit), name).verdicts[0]
    assert verdict.causal == (True, False)
    assert verdict.outcome == "serves"


@pytest.mark.parametrize("reader", ["vllm 0.33.0", "sglang 0.5.23"])
def test_an_unstated_head_dim_is_that_of_the_config_class(reader: str) -> None:
    assert readings(reader)["no-head-dim"]["head_dim"] == 128


def test_a_causality_that_no_key_states_is_not_called_trained(tmp_path: Path) -> None:
    """Without is_causal, what a mixed draft was trained with is not known: a warning, and "read as"."""
    case = Case(shape=MIXED, config=without("is_causal"), engines="llama.cpp,sglang,vllm@0.24")
    report = check(case, tmp_path)
    assert report.count("error") == 1  # vLLM 0.24 has no windows
    assert {item.id for item in report.findings if item.severity == "error"} == {"S28"}
    for verdict in report.verdicts:
        assert "trained" not in verdict.text
    assert "not stated, read as 1 of 2 causal" in report.verdicts[0].text
    stated = check(Case(config=top(is_causal=True), engines="vllm@0.24"), tmp_path / "stated")
    assert "(trained with 2 of 2 causal)" in stated.verdicts[0].text


@pytest.mark.parametrize("engine", ["sglang", "vllm", "transformers"])
def test_engines_are_judged_alike_on_a_specforge_export(engine: str, tmp_path: Path) -> None:
    modes = nested(attention_mode="dflash")
    case = Case(shape=MIXED, config=both(without("is_causal"), modes), engines=engine)
    found = [item for item in check(case, tmp_path).findings if "and is read as 0" in item.message]
    assert [item.severity for item in found] == ["warning"]


@pytest.mark.parametrize(("release", "shape"), [("0.24", SLIDING), ("0.24", MIXED), ("0.25", MIXED)])
def test_layers_that_a_release_cannot_serve_are_one_finding(release: str, shape: support.Shape, tmp_path: Path) -> None:
    """Windows and causality are then lost together, and no file helps."""
    told = top(sliding_window_non_causal=False)
    case = Case(shape=shape, dialect="speculators", config=told, engines=f"vllm@{release}")
    (found,) = [item for item in check(case, tmp_path).findings if item.severity == "error"]
    assert found.fix.partition(":")[0] == "no file helps this release; use vLLM 0.33 or later"
    assert ("serves 0 of 2 layers causally" in found.message) is (release == "0.24")
    assert found.serve_flag is None


def test_one_flag_for_all_layers_is_read_by_every_release(tmp_path: Path) -> None:
    """dflash_config.causal is what 0.24 and 0.25 look at, and is_causal is not."""
    for minor in (24, 25, 26, 33):
        case = Case(config=both(top(is_causal=True), nested(causal=True)), engines=f"vllm@0.{minor}")
        (verdict,) = check(case, tmp_path / str(minor)).verdicts
        assert (verdict.outcome, verdict.causal) == ("serves", (True, True))


def test_faults_that_differ_in_their_place_only_are_one_finding(tmp_path: Path) -> None:
    def unknown(arrays: dict[str, Any]) -> None:
        arrays.update({f"optimizer.{index}": np.zeros(4, dtype=np.float32) for index in range(5)})

    case = Case(tensors=unknown)
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
    draft = build(Case(config=change), tmp_path / "draft")
    target = support.make_target(tmp_path / "target")
    more = [] if command[0] == "inspect" else ["--target", target]
    out = [tmp_path / "out"] if command[0] == "convert" else []
    outcome = support.invoke(command[0], draft, *out, *command[1:], *more)
    assert outcome.code == 5, outcome.err


def test_a_prefix_that_no_reader_knows_is_for_the_exporter(tmp_path: Path) -> None:
    report = check(Case(tensors=rename("", "encoder."), engines="sglang"), tmp_path)
    fixes = [item.fix for item in report.findings if item.message == "names start with 'encoder.'"]
    assert fixes
    assert fixes[0].startswith("export the draft again")


@pytest.mark.parametrize("habit", ["interleaved-rope", "gemma-norms"])
def test_what_this_tool_does_not_read_either_is_not_run(habit: str, tmp_path: Path) -> None:
    """The run level would measure another draft than the one that was trained."""
    draft, target = habits.make(tmp_path / "draft", habit), support.make_target(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [3, 4, 5]}\n' * 4)
    prompts = ("--prompts", tmp_path / "prompts.jsonl", "-n", 8)
    outcome = support.invoke("validate", draft, "--target", target, "--level", "run", *prompts)
    assert "the pair was not run, because of errors that stop it" in outcome.err
    refused = support.invoke("generate", "x", "-d", draft, "-t", target)
    assert refused.code == 5
    assert "which this runtime does not compute" in refused.err


@pytest.mark.parametrize("command", ["diagnose", "generate", "eval-acceptance"])
def test_a_relative_is_not_run(command: str, tmp_path: Path) -> None:
    draft = build(Case(config=nested(conv_kernel_size=2)), tmp_path / "draft")
    words = ("x", "-d", draft) if command == "generate" else (draft,)
    outcome = support.invoke(command, *words, "--target", support.make_target(tmp_path / "target"))
    assert outcome.code == 5, outcome.err
