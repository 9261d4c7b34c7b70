"""A check that runs in every place of CI fails if the bundled pair's acceptance leaves its interval."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_cli import evaluate
from dflash_cli.checkpoints.references import tiny_directory
from dflash_testing.edits import edit_config
from dflash_testing.paths import ROOT

SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "acceptance.py"))


@pytest.mark.parametrize(
    ("changed", "code"),
    [({}, 0), ({"tiny": 3.2}, 1), ({"tiny:reduced": 2.95}, 1), ({"tiny:dflash2": 3.44}, 1), ({"tiny:dspark": 3.44}, 1)],
)
def test_an_acceptance_length_outside_its_interval_fails(
    changed: dict[str, float], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = {"tiny": 3.44, "tiny:reduced": 2.75, "tiny:dflash2": 3.92, "tiny:dspark": 4.15} | changed
    monkeypatch.setitem(SCRIPT["main"].__globals__, "measure", lambda draft, device: lengths[draft])
    assert SCRIPT["main"]() == code
    assert capsys.readouterr().out.count("OUTSIDE") == code


@pytest.mark.slow
def test_a_damaged_draft_leaves_the_interval(tmp_path: Path) -> None:
    """The rope base of training is lost, as by a reader that falls back to a default."""
    for file in (tiny_directory() / "draft").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path, rope_theta=10000.0)
    low, high = SCRIPT["INTERVALS"]["tiny"]
    lost = evaluate(draft=str(tmp_path), target="tiny", device="cpu").total.counts.acceptance_len
    assert lost is not None
    assert lost < low
    assert low <= SCRIPT["measure"]("tiny", "cpu") <= high


def test_ci_runs_the_check_on_a_cpu_and_on_a_gpu() -> None:
    checks = [line.split() for line in (ROOT / ".ci" / "run").read_text().splitlines() if "scripts/check" in line]
    assert {"types", "style", "acceptance", "wheel"} <= {part for check in checks for part in check}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())["jobs"]
    runs = {name: [step.get("run") for step in job["steps"]] for name, job in jobs.items()}
    assert "scripts/check acceptance" in runs["acceptance"]
    assert "scripts/check acceptance" in runs["gpu"]
    assert jobs["gpu"]["env"]["DEVICE"] == "cuda"
