"""The pages of the documentation are found in a checkout and in a wheel."""

import tomllib
from pathlib import Path

import pytest

from dflash_cli.terminal import documentation
from dflash_runtime.errors import UsageError
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses


def test_every_page_of_the_repository_is_a_topic() -> None:
    """Names are file names without folder, so two pages must not share one."""
    pages = sorted(file.stem for file in (ROOT / "docs").rglob("*.md"))
    assert sorted(documentation.topics()) == pages
    assert len(pages) == len(set(pages)) > 20
    assert list(documentation.topics())[:2] == ["index", "tutorial"]


def test_a_topic_is_listed_with_its_title_and_shown_whole() -> None:
    assert documentation.topics()["checks"] == "Checks"
    assert documentation.text("checks") == (ROOT / "docs" / "reference" / "checks.md").read_text(encoding="utf-8")


def test_every_title_is_a_heading_of_its_own() -> None:
    titles = documentation.topics()
    assert all(title and not title.startswith("#") for title in titles.values())
    assert len(set(titles.values())) == len(titles)


def test_an_unknown_topic_is_refused_with_the_nearest_one() -> None:
    with refuses(UsageError, "unknown-topic", found="chekcs") as caught:
        documentation.text("chekcs")
    assert "checks?" in caught.value.message
    with refuses(UsageError, "unknown-topic", found="xyzzy") as caught:
        documentation.text("xyzzy")
    assert "?" not in caught.value.message


def test_pages_in_the_package_come_before_those_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a wheel, where `dflash_cli/docs` has the pages."""
    for section in documentation.SECTIONS:
        (tmp_path / "docs" / section).mkdir(parents=True)
    (tmp_path / "docs" / "index.md").write_text("# First\n")
    (tmp_path / "docs" / "tutorial.md").write_text("# Second\n")
    (tmp_path / "docs" / "how-to" / "own.md").write_text("# Packaged\n\ntext\n")
    monkeypatch.setattr(documentation, "files", lambda package: tmp_path)
    assert documentation.topics() == {"index": "First", "tutorial": "Second", "own": "Packaged"}
    assert documentation.text("own") == "# Packaged\n\ntext\n"


def test_the_wheel_takes_the_pages_along() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {"docs": "dflash_cli/docs"}
