"""A checkpoint is recognised as a draft, a target, or neither, and detection runs once."""

from pathlib import Path

import pytest

from dflash_cli.checkpoints import description, opening
from dflash_cli.checkpoints.description import describe
from dflash_cli.formats.detection import find_dialect
from dflash_runtime.errors import UnknownFormat
from dflash_testing import checkpoints as support
from dflash_testing.refusals import refuses


def test_the_dialect_is_detected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def count(*args: object) -> object:
        asked.append(args)
        return find_dialect(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(description, "find_dialect", count)
    monkeypatch.setattr(opening, "detect", count)
    found = describe(support.make_native(tmp_path / "draft"))
    assert (found.kind, found.dialect) == ("draft", "native")
    assert len(asked) == 1


def test_a_target(tmp_path: Path) -> None:
    found = describe(support.make_target(tmp_path / "target"))
    assert (found.kind, found.dialect) == ("target", None)


def test_neither(tmp_path: Path) -> None:
    path = support.write_checkpoint(tmp_path / "other", {"architectures": ["Bert"]}, support.body_arrays())
    with refuses(UnknownFormat, "not-a-draft", path=path / "config.json"):
        describe(path)


def test_a_relative_is_refused_by_name(tmp_path: Path) -> None:
    path = support.make_native(tmp_path / "draft", architectures=["Gemma4DSparkModel"])
    with refuses(UnknownFormat, "relative-of-dflash", found="dspark-variant"):
        describe(path)
