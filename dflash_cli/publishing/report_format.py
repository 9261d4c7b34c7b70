"""The format of a report, chosen by an option or by the suffix of the file name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import ClassVar, Literal, get_args
from warnings import catch_warnings, simplefilter

from dflash_cli.acceptance.acceptance_figures import find_figures
from dflash_cli.acceptance.acceptance_report import headline
from dflash_cli.comparing.comparison_figures import difference_figures
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_cli.figures.drawing import COLUMN, Drawing, lay_out, lay_out_sheet
from dflash_cli.figures.figure import Figure
from dflash_cli.figures.figure import Name as FigureName
from dflash_cli.terminal import console
from dflash_runtime.errors import UsageError
from dflash_runtime.notices import Notice

ReportFormat = Literal["html", "svg", "pdf", "png", "md", "csv"]
Results = Sequence[StoredEvaluation]


@dataclass(frozen=True, slots=True)
class ReportedResult:
    """One result of a report."""

    name: str
    acceptance_len: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDocument:
    """Result of `dflash report`."""

    KIND: ClassVar[str] = "report"

    output: str
    format: ReportFormat
    results: tuple[ReportedResult, ...]


def choose_format(output: Path | None, asked: ReportFormat | None) -> ReportFormat:
    """Return the format `asked` for; without it, the format of the file's suffix, and Markdown for stdout.

    Raises:
        UsageError: no format has this suffix.
    """
    if asked is not None or output is None:
        return asked or "md"
    names: tuple[ReportFormat, ...] = get_args(ReportFormat)
    found = next((name for name in names if output.suffix.lower() == f".{name}"), None)
    if found is None:
        listed = ", ".join(f".{name}" for name in names)
        raise UsageError(
            id="unknown-suffix",
            path=output,
            field="suffix",
            found=output.suffix,
            expected=f"one of {listed}",
            hint="or pass --format",
        )
    return found


def name_results(results: Results, names: Sequence[str]) -> list[StoredEvaluation]:
    """Return the results under names of the user's, or of their files. Equal names of files get a number."""
    given = names or [item.name for item in results]
    unique: list[str] = []
    for name in given:
        number = next(number for number in count(1) if (f"{name} {number}" if number > 1 else name) not in unique)
        unique.append(f"{name} {number}" if number > 1 else name)
    return [replace(item, name=name) for item, name in zip(results, unique, strict=True)]


def write_report(
    results: Results, chosen: ReportFormat, name: FigureName | None = None, comparisons: Sequence[Comparison] = ()
) -> bytes:
    """Return the report in one format, with all figures or with one. Texts are UTF-8.

    `comparisons` has the further results compared with the first, if they have the same prompts.

    Raises:
        UnsupportedError: a PNG or PDF without matplotlib.
        UsageError: the results lack the figure, or the format has tables only.
    """
    if name is not None and chosen in ("md", "csv"):
        raise UsageError(field="--figure", found=name, expected=f"no figure: {chosen} has tables only")
    figures = [*find_figures({item.name: item.evaluation for item in results}), *difference_figures(comparisons)]
    if name is not None:
        figures = [_find(figures, name)]
    match chosen:
        case "html":
            from dflash_cli.publishing.html_report import to_html

            return to_html(results, figures).encode()
        case "svg":
            from dflash_cli.figures.svg_figure import to_svg

            return to_svg(_draw(results, figures, name), ", ".join(item.title for item in figures)).encode()
        case "png" | "pdf":
            return _painted(_draw(results, figures, name), chosen)
        case "md":
            from dflash_cli.publishing.markdown_report import to_markdown

            return to_markdown(results, comparisons).encode()
        case "csv":
            from dflash_cli.publishing.csv_report import to_csv

            return to_csv(results).encode()


def _find(figures: Sequence[Figure], name: FigureName) -> Figure:
    found = next((figure for figure in figures if figure.name == name), None)
    if found is None:
        known = ", ".join(figure.name for figure in figures)
        raise UsageError(
            id="no-such-figure",
            field="--figure",
            found=name,
            expected=f"a figure of these results: {known}",
            hint="context needs a run with two or more --context-lengths, categories needs prompts with categories, "
            "differences needs two or more results of the same prompts",
        )
    return found


def _painted(drawing: Drawing, chosen: Literal["png", "pdf"]) -> bytes:
    """Return the painted drawing, and warn about characters of names that its font lacks."""
    from dflash_cli.figures.painted_figure import paint

    with catch_warnings(record=True) as caught:
        simplefilter("always")
        painted = paint(drawing, chosen)
    if any("missing from font" in str(item.message) for item in caught):
        text = f"the font of the {chosen.upper()} lacks characters of a name: pass --name, or write an SVG"
        console.warn(Notice(text, id="characters-not-drawn"))
    return painted


def _draw(results: Results, figures: Sequence[Figure], name: FigureName | None) -> Drawing:
    """Return one figure as wide as a column of a paper, or a sheet with all figures below the headlines."""
    if name is not None:
        return lay_out(figures[0], COLUMN)
    return lay_out_sheet(figures, [f"{item.name}: {headline(item.evaluation)}" for item in results])
