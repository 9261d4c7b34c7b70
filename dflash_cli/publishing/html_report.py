"""A report as one self-contained HTML page: without network and scripts, light or dark by the reader's setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dflash_cli.acceptance.acceptance_report import (
    REJECTED,
    Evaluation,
    command_line,
    headline,
    legend,
    provenance,
    tables,
)
from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_cli.figures.drawing import COLOURS
from dflash_cli.figures.figure import Figure
from dflash_cli.figures.svg_figure import page_svg
from dflash_runtime.phrases import plural


def to_html(results: Sequence[StoredEvaluation], figures: Sequence[Figure]) -> str:
    """Return the page with some figures. All texts of the results are escaped."""
    folder = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    evaluations = [item.evaluation for item in results]
    return page.get_template("page.html").render(
        title="Acceptance of " + " and ".join(dict.fromkeys(str(item.settings.get("draft")) for item in evaluations)),
        subtitle="Tokens per verify step, in total, by position and by category",
        results=[_result(item) for item in results],
        notes=[item.prompts.warning for item in evaluations[:1] if item.prompts.warning],
        legend="; ".join(legend(evaluations[0])),
        figures=[(figure, page_svg(figure, number)) for number, figure in enumerate(figures)],
        rejected=REJECTED,
        colours=COLOURS,
    )


def _result(stored: StoredEvaluation) -> dict[str, Any]:
    evaluation = stored.evaluation
    return {
        "name": stored.name,
        "length": f"{evaluation.total.counts.acceptance_len:.3f}",
        "interval": _interval_text(evaluation.total),
        "facts": _facts(evaluation),
        "shapes": evaluation.shapes,
        "remarks": evaluation.remarks,
        "tables": [
            (title.capitalize(), *_without_bars(columns, rows)) for title, (columns, rows) in tables(evaluation).items()
        ],
        "failures": [failure.error for failure in evaluation.failed],
        "command": command_line(evaluation),
        "provenance": [(name, str(value)) for name, value in provenance(evaluation).items()],
    }


def _interval_text(total: Summary) -> str:
    found = total.acceptance_len_interval
    if found is None:
        return f"tokens per step; no interval: {total.acceptance_len_no_interval}"
    return f"tokens per step; {100 * found.confidence:g}% interval [{found.low:.3f}, {found.high:.3f}]"


def _facts(evaluation: Evaluation) -> str:
    total, settings = evaluation.total, evaluation.settings
    pair = f"{settings.get('draft')} for {settings.get('target')}"
    more = headline(evaluation).partition(", at most ")[2]
    sizes = f"{plural(total.num_conversations, 'prompt')}, {plural(total.counts.num_drafts, 'step')}"
    return f"{pair}; {sizes}; at most {more}"


def _without_bars(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], list[list[str]]]:
    """Return a table without the unnamed column of bars, which only a terminal needs."""
    kept = [place for place, column in enumerate(columns) if column]
    return [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]
