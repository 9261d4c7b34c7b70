"""The short examples run unchanged."""

import re
import runpy
import sys

import pytest

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
