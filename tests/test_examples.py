"""The short examples run unchanged."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from merged_target import merge
from safetensors.torch import load_file
from tiny_pair.card import model_card

from dflash_cli.checkpoints.references import tiny_directory
from dflash_testing.paths import ROOT


@pytest.mark.parametrize("name", ["generate.py", "own_draft.py"])
def test_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, because their imports are already loaded."""
    path = str(ROOT / "examples" / name)
    monkeypatch.setattr(sys, "argv", [path])
    runpy.run_path(path, run_name="__main__")
    shown = capsys.readouterr()
    found = re.search(r"acceptance length ([0-9.]+)", shown.out + shown.err)
    assert found is not None
    assert float(found[1]) > 1.5, "the target accepts no draft token"


def test_a_merged_target_has_other_attention_and_the_same_rest(tmp_path: Path) -> None:
    assert merge(tiny_directory() / "target", tmp_path / "merged", 0.1) == 18
    folders = (tiny_directory() / "target", tmp_path / "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    changed = {name for name, tensor in before.items() if not tensor.equal(after[name])}
    assert len(changed) == 18
    assert all("self_attn" in name for name in changed)
    name = min(changed)
    change, size = (after[name].float() - before[name].float()).norm().item(), before[name].float().norm().item()
    assert change == pytest.approx(0.1 * size, rel=0.02)
    assert {path.name for path in (tmp_path / "merged").iterdir()} >= {"config.json", "tokenizer.json"}


def test_the_model_card_of_the_bundle_is_current() -> None:
    """`examples/tiny_pair/card.py` writes the README of the bundled pair from its report."""
    folder = ROOT / "dflash_cli" / "tiny"
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert model_card(report) == (folder / "README.md").read_text(encoding="utf-8")
