"""The format of a report, chosen by an option or by the suffix of the file name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_runtime.errors import UsageError

ReportFormat = Literal["html", "png", "md", "csv"]
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


def write_report(results: Results, chosen: ReportFormat) -> bytes:
    """Return the report in one format. Texts are UTF-8.

    Raises:
        UnsupportedError: a PNG without matplotlib.
    """
    match chosen:
        case "html":
            from dflash_cli.publishing.html_report import to_html

            return to_html(results).encode()
        case "png":
            from dflash_cli.publishing.png_report import to_png

            return to_png(results)
        case "md":
            from dflash_cli.publishing.markdown_report import to_markdown

            return to_markdown(results).encode()
        case "csv":
            from dflash_cli.publishing.csv_report import to_csv

            return to_csv(results).encode()
