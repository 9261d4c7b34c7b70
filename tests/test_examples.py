"""The short examples run unchanged."""

import json
import re
import runpy
import sys

import pytest
from tiny_pair.card import model_card

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


def test_the_model_card_of_the_bundle_is_current() -> None:
    """`examples/tiny_pair/card.py` writes the README of the bundled pair from its report."""
    folder = ROOT / "dflash_cli" / "tiny"
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert model_card(report) == (folder / "README.md").read_text(encoding="utf-8")
