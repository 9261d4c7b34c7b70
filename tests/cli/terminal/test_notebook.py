"""Results in a notebook: the figures and tables of the terminal and of the report, without Jupyter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dflash_cli import compare, report
from dflash_cli.terminal.shown import Shown
from dflash_testing.evaluations import HOSTILE, drawn_evaluation, write_evaluation


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return (
        write_evaluation(tmp_path / "a.json", drawn_evaluation(0.7)),
        write_evaluation(tmp_path / "b.json", drawn_evaluation(0.5)),
    )


def check_html(result: Shown, num_figures: int, *texts: str) -> None:
    """Require well-formed HTML with tables and figures that bring their colours along."""
    page = result._repr_html_()
    whole = ElementTree.fromstring(f"<div>{page.replace('<br>', '<br/>')}</div>")
    drawings = [item for item in whole.iter() if item.tag.endswith("svg")]
    assert len(drawings) == num_figures
    assert "class=" not in page, "no style of the page colours the shapes"
    assert "<style" not in page, "a style would colour other cells"
    shown = "".join(whole.itertext())
    assert [text for text in texts if text not in shown] == []


def test_an_evaluation_has_the_figures_of_its_report() -> None:
    result = drawn_evaluation(0.7)
    check_html(result, 4, "acceptance length", "by position", "share of verify steps", "draft position", "code")
    assert HOSTILE not in result._repr_html_()
    assert "\\n" not in repr(result), "each line of the legend is a line"
    assert result._repr_svg_() == result._repr_html_().partition("<figure>")[2].partition("</figure>")[0]


def test_a_comparison_has_differences_by_position(files: tuple[Path, Path]) -> None:
    found = compare(results=files)
    check_html(found, 1, "B against A", "B against A, by position", "difference of shares", "lower")


@pytest.mark.parametrize(
    ("form", "name", "check"),
    [
        ("svg", "_repr_svg_", lambda shown: shown.startswith("<svg ")),
        ("md", "_repr_markdown_", lambda shown: shown.startswith("# Acceptance")),
        ("png", "_repr_png_", lambda shown: shown.startswith(b"\x89PNG")),
    ],
)
def test_a_report_shows_itself(form: Any, name: str, check: Callable[[Any], bool], files: tuple[Path, Path]) -> None:
    if form == "png":
        pytest.importorskip("matplotlib")
    made = report(results=files, format=form)
    assert check(getattr(made, name)())
    others = {"_repr_svg_", "_repr_markdown_", "_repr_png_"} - {name}
    assert [getattr(made, other)() for other in others] == [None, None]


def test_a_result_without_figures_has_none() -> None:
    class Plain(Shown):
        def summary(self) -> list[str]:
            return ["a line"]

    assert Plain()._repr_svg_() is None
    assert Plain()._repr_html_() == "<p>a line</p>"
