"""A sample of the cells of `examples/plant_kinds.py`: the right cause is named, and a sound draft has no finding.

Only readings of one factor are tried, so that a cell takes a fraction of a second.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import plant_kinds
import pytest
import torch
from planted_faults.kind_table import render, word_of
from planted_faults.kinds import Kind, kinds
from safetensors.torch import load_file

from dflash_cli.checkpoints.references import Role
from dflash_cli.diagnosis import readings
from dflash_cli.diagnosis.alternatives import alternative_readings
from dflash_cli.diagnosis.reading_runner import ReadingRunner

KINDS = {kind.name: kind for kind in kinds()}


@pytest.mark.parametrize(
    ("name", "strength", "factor"),
    [
        ("windows lost", "strong", "window"),
        # By default test_diagnose.py has other taps, and the next test a short block.
        pytest.param("first tap elsewhere", "strong", "taps", marks=pytest.mark.slow),
        pytest.param("short block", "strong", "block", marks=pytest.mark.slow),
        pytest.param("linear rope scaling", "strong", "rope", marks=pytest.mark.slow),
        pytest.param("mask of another id", "strong", "mask", marks=pytest.mark.slow),
        pytest.param("v_proj by columns", "mild", "weights", marks=pytest.mark.slow),
        pytest.param("KV heads reversed", "mild", "weights", marks=pytest.mark.slow),
        pytest.param("outlier in input_layernorm", "mild", "weights", marks=pytest.mark.slow),
    ],
)
def test_the_right_cause_is_named(
    name: str, strength: str, factor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = diagnosed(KINDS[name], strength, factor, tmp_path, monkeypatch)
    assert row["has_cause"]
    assert word_of({"plain": row}, "plain", KINDS[name].right) == "right"


def test_a_damaged_tensor_is_no_reading_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = diagnosed(KINDS["outputs of fc in halves"], "strong", "causality", tmp_path, monkeypatch)
    assert (row["has_cause"], row["rule"]) == (False, "R06")


def test_a_norm_times_three_is_no_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subtracting 1 gains nearly as much as a third of the norm. Only the scale restores the draft."""

    def scaled(_: Any, tensors: dict[str, Any], __: Any) -> None:
        tensors["hidden_norm.weight"] *= 3

    monkeypatch.setattr(readings, "alternative_readings", only_offsets(alternative_readings))
    row = diagnosed(Kind("", scaled, ""), "mild", "weights", tmp_path, monkeypatch)
    assert row["has_cause"] is False
    assert row["improves"][0] == "hidden_norm times 0.333"


def test_the_longest_block_that_is_tried_is_also_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of blocks of 8 that states 2. The test runs the engine with blocks four times as long as stated."""

    class OwnRunner(ReadingRunner):
        """A runner with room for the stated block, as `diagnose` uses it."""

    monkeypatch.setattr(plant_kinds, "SharedRunner", OwnRunner)
    short = Kind("", lambda config, *_: config.update(block_size=2), "")
    row = diagnosed(short, "mild", "block", tmp_path, monkeypatch)
    assert (row["has_cause"], row["rule"]) == (True, "R08")
    assert "blocks of 8" in row["sentence"]


def only_offsets(read: Any) -> Any:
    return lambda space: tuple(item for item in read(space) if item.changes_values and not item.is_guess)


def diagnosed(kind: Any, strength: str, factor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("VERY_FEW_ANCHORS", "FEW_ANCHORS", "MANY_ANCHORS", "MIN_TEST_PROMPTS", "NUM_RARE_IDS", "MAX_ON_TOP"):
        monkeypatch.setattr(readings, name, getattr(readings, name))
    plant_kinds.shorten()
    monkeypatch.setattr(plant_kinds, "BUDGET", replace(plant_kinds.BUDGET, factors=frozenset({factor})))
    plant_kinds.plant(kind, "windowed", strength, tmp_path / "draft")
    return plant_kinds.diagnose(tmp_path / "draft", "windowed")[1]


def test_integers_of_a_draft_stay_as_they_are(tmp_path: Path) -> None:
    """The map of a reduced vocabulary reaches the fault as it is stored, and the file too."""
    seen = {}
    kind = Kind("", lambda _, tensors, __: seen.update(tensors), "")
    plant_kinds.plant(kind, "reduced", "mild", tmp_path / "draft")
    written = load_file(tmp_path / "draft" / "model.safetensors")
    stored = load_file(plant_kinds.directory("reduced", Role.DRAFT) / "model.safetensors")
    for name in ("d2t", "t2d"):
        assert seen[name].dtype == written[name].dtype == stored[name].dtype
        assert torch.equal(written[name], stored[name])


def test_a_cell_that_takes_too_long_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        name, families = "endless", ("windowed",)

        @staticmethod
        def plant(*_: Any) -> None:
            try:
                time.sleep(60)
            except Exception:
                pytest.fail("a handler caught the limit")

    monkeypatch.setattr(plant_kinds, "_process", {"faults": {"endless": Endless}, "lengths": {"windowed": 7.0}})
    row = plant_kinds.run_cell(("windowed", "endless", "mild"), 1)
    assert row["too_long"] == 1
    assert word_of(row, "plain", None) == "too long"


@pytest.mark.slow
def test_cells_run_in_processes_and_resume(tmp_path: Path) -> None:
    faults, out = tmp_path / "faults.py", tmp_path / "rows.jsonl"
    faults.write_text(
        "class Lost:\n    name, families = 'lost', ('windowed',)\n\n    @staticmethod\n"
        "    def plant(config, tensors, strength):\n        del config['dflash_config']['mask_token_id']\n\n\n"
        "FAULTS = [Lost]\n"
    )
    command = [sys.executable, plant_kinds.__file__, "--faults", str(faults), "--out", str(out), "--jobs", "2"]
    for _ in range(2):
        subprocess.run([*command, "--families", "windowed", "--markdown", str(tmp_path / "page.md")], check=True)
        assert {row["strength"] for row in map(json.loads, out.read_text().splitlines())} == {"", "mild", "strong"}
        assert len(out.read_text().splitlines()) == 3
    assert "| windowed | lost | mild |  |  | named |  |  | C12 " in (tmp_path / "page.md").read_text()


def test_the_page_counts_words_by_cost() -> None:
    kind = KINDS["causal"]
    named = {"has_cause": True, "rule": "R02", "sentence": "the causality differs; next: x", "findings": []}
    low = {
        "has_cause": False,
        "rule": "R06",
        "sentence": "",
        "findings": [["R06", "warning", "", ""]],
        "improves": None,
    }
    rows = [
        {"family": "bundled", "name": kind.name, "strength": "mild", "length": 3.0, "loss": 0.6, "plain": named},
        {"family": "hybrid", "name": kind.name, "strength": "mild", "length": 7.0, "loss": 0.2, "plain": low},
    ]
    lines = render(rows, [kind]).splitlines()
    assert "| all | plain | 2 | 1 | 0 | 0 | 1 | 0 | 0 | 0 |" in lines
    assert "| cost more than half | plain | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 |" in lines
