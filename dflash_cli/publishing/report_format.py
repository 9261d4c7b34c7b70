"""In which forms a report is written: found by the end of a file's name, or asked for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dflash_cli.acceptance.acceptance_report import markdown_table, to_markdown
from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.comparing.comparison_report import letter
from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_runtime.errors import UsageError

ReportFormat = Literal["html", "png", "md", "csv"]
Results = Sequence[StoredEvaluation]


def choose_format(output: Path | None, asked: ReportFormat | None) -> ReportFormat:
    """The format that was asked for, else what a file's name ends with, else Markdown.

    Raises:
        UsageError: the end of the name is none of them.
    """
    if asked is not None or output is None:
        return asked or "md"
    found = WRITERS.keys() & {output.suffix.removeprefix(".").lower()}
    if not found:
        names = ", ".join(f".{name}" for name in WRITERS)
        raise UsageError(f"{output}: ends with {output.suffix!r}, expected one of {names}", hint="or pass --format")
    return found.pop()


def write_report(results: Results, chosen: ReportFormat) -> bytes:
    """The report in one form; text is UTF-8.

    Raises:
        UnsupportedError: what draws it is not installed.
    """
    return WRITERS[chosen](results)


def _html(results: Results) -> bytes:
    from dflash_cli.publishing.html_report import to_html

    return to_html(results).encode()


def _png(results: Results) -> bytes:
    from dflash_cli.publishing.png_report import to_png

    return to_png(results)


def _csv(results: Results) -> bytes:
    from dflash_cli.publishing.csv_report import to_csv

    return to_csv(results).encode()


def _markdown(results: Results) -> bytes:
    """One report, or a table of all and then one after the other."""
    if len(results) == 1:
        return to_markdown(results[0].evaluation).encode()
    rows = [_row(place, item) for place, item in enumerate(results)]
    columns = ("", "result", "draft", "prompts", "steps", "acceptance length")
    parts = ["\n".join(["# Acceptance of several results", "", *markdown_table(columns, rows), ""])]
    parts += [to_markdown(item.evaluation, f"{letter(place)}: {item.name}") for place, item in enumerate(results)]
    return "\n".join(parts).encode()


def _row(place: int, stored: StoredEvaluation) -> list[str]:
    total = stored.evaluation.total
    numbers = [str(total.num_conversations), str(total.counts.num_drafts)]
    length = f"{total.counts.acceptance_len:.3f}{_span(total.acceptance_len_interval)}"
    return [letter(place), stored.name, str(stored.evaluation.settings.get("draft")), *numbers, length]


def _span(interval: Interval | None) -> str:
    return f" [{interval.low:.3f}, {interval.high:.3f}]" if interval is not None else ""


WRITERS: dict[ReportFormat, Callable[[Results], bytes]] = {
    "html": _html,
    "png": _png,
    "md": _markdown,
    "csv": _csv,
}
