"""Results as Markdown: one report, or a table of all results and then each report."""

import re
from collections.abc import Sequence

from dflash_cli.acceptance.acceptance_report import (
    REJECTED,
    TABLE_NOTE,
    Evaluation,
    headline,
    legend,
    provenance,
    tables,
)
from dflash_cli.comparing.comparison_report import position_finding, position_table
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.comparing.stored_evaluation import StoredEvaluation

COLUMNS = ("result", "draft", "prompts", "steps", "acceptance length")


def to_markdown(results: Sequence[StoredEvaluation], comparisons: Sequence[Comparison] = ()) -> str:
    """Return the report of one or several results, and their differences by position."""
    if len(results) == 1:
        return evaluation_to_markdown(results[0].evaluation)
    rows = [_row(item) for item in results]
    parts = ["\n".join(["# Acceptance of several results", "", *markdown_table(COLUMNS, rows), ""])]
    parts += map(_differences, (item for item in comparisons if item.positions))
    parts += [evaluation_to_markdown(item.evaluation, item.name) for item in results]
    return "\n".join(parts)


def _differences(comparison: Comparison) -> str:
    """Return the section of one result compared with the first."""
    (_, _, _, *columns), rows = position_table(comparison, 1)
    names = comparison.base.name, comparison.other.name
    title = f"## {as_text(f'{names[1]} minus {names[0]}')} by position"
    return "\n".join(
        [
            title,
            "",
            as_text(position_finding(comparison)),
            "",
            *markdown_table(("position", *names, *columns), rows),
            "",
        ]
    )


def evaluation_to_markdown(evaluation: Evaluation, title: str = "Acceptance") -> str:
    """Return the report of one evaluation. Backslashes keep the lines of the legend apart."""
    explained = "\\\n".join(map(as_text, [*legend(evaluation), TABLE_NOTE]))
    lines = [f"# {as_text(title)}", "", f"**{as_text(headline(evaluation))}**", "", explained, ""]
    if evaluation.prompts.warning is not None:
        lines += [f"Note: {as_text(evaluation.prompts.warning)}.", ""]
    for paragraph in (*(shape.lines for shape in evaluation.shapes), *evaluation.remarks):
        lines += [*map(as_text, paragraph), ""]
    lines += [f"- {name}: {as_code(str(value))}" for name, value in provenance(evaluation).items()]
    if evaluation.failed:
        lines += ["", "## Not measured", "", *(f"- {as_text(failure.error)}" for failure in evaluation.failed)]
    for name, (columns, rows) in tables(evaluation).items():
        if name == REJECTED:
            rows = [(as_code(token), *numbers, as_code(chosen)) for token, *numbers, chosen in rows]
        lines += ["", f"## {name.capitalize()}", "", *markdown_table(columns, rows)]
    return "\n".join(lines) + "\n"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Cells are escaped, except inline code from `as_code`."""
    return [_table_line(columns), _table_line(["---"] * len(columns)), *map(_table_line, rows)]


def _row(stored: StoredEvaluation) -> list[str]:
    total = stored.evaluation.total
    numbers = [str(total.num_conversations), str(total.counts.num_drafts)]
    return [stored.name, str(stored.evaluation.settings.get("draft")), *numbers, total.length_text]


def as_text(text: str) -> str:
    """Return the text on one line, so that Markdown and HTML in it stay text."""
    escaped = re.sub(r"([\\`*<>|]|\b_|_\b|\](?=[(\[]))", r"\\\1", " ".join(text.split()))
    return re.sub(r"^([#+-]|\d+[.)])(?= )", r"\\\1", escaped)


def as_code(text: str) -> str:
    """Return the text as inline code on one line, so that Markdown and HTML in it stay text and spaces stay."""
    text = re.sub(r"[\r\n\v\f\x85\u2028\u2029]", " ", text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return _Code(f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}")


def as_block(text: str) -> list[str]:
    """Return the lines of a fenced shell command, whatever backticks it has."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}sh", text, fence]


class _Code(str):
    """Inline code, in which only a table's bars are escaped."""


def _table_line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") if isinstance(cell, _Code) else as_text(cell) for cell in cells)
    return f"| {' | '.join(escaped)} |"
