"""One evaluation as JSON, as tables, and as Markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_cli.evaluation.statistics import DEFINITIONS, Summary

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `dflash eval-acceptance` found."""

    total: Summary
    categories: Mapping[str, Summary]
    settings: Mapping[str, Any]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            **self.total.to_json(),
            "categories": {name: summary.to_json() for name, summary in self.categories.items()},
            "settings": dict(self.settings),
            "seconds": round(self.seconds, 6),
        }


def headline(evaluation: Evaluation) -> str:
    """`acceptance length 3.52 [3.31, 3.74], at most 8`."""
    total = evaluation.total
    block = total.counts.num_speculative_tokens + 1
    return f"acceptance length {_length(total)}, at most {block}"


def legend(evaluation: Evaluation) -> str:
    """What the headline counts, and its largest possible value."""
    block = evaluation.total.counts.num_speculative_tokens + 1
    interval = evaluation.total.interval
    lines = [
        "average number of tokens committed per verify step, the target's own token included (vLLM's definition)",
        f"at most {block}: {block - 1} drafted tokens and the target's own",
    ]
    if interval is not None:
        lines[1] += f"; in brackets, the {100 * interval.confidence:g}% interval over prompts"
    return "\n".join(lines)


def tables(evaluation: Evaluation, *, with_definitions: bool = True) -> dict[str, Table]:
    """Title -> columns and rows."""
    found = {"by position": _position_table(evaluation.total)}
    if evaluation.categories:
        found["by category"] = _category_table(evaluation)
    if with_definitions:
        found["by each project's own definition"] = _definition_table(evaluation.total)
    return found


def to_markdown(evaluation: Evaluation) -> str:
    """A report to keep beside a checkpoint."""
    lines = ["# Acceptance", "", f"**{headline(evaluation)}**", "", legend(evaluation), ""]
    lines += [f"- {name}: `{value}`" for name, value in evaluation.settings.items() if value is not None]
    for title, (columns, rows) in tables(evaluation).items():
        lines += ["", f"## {title.capitalize()}", "", _markdown_row(columns), _markdown_row(["---"] * len(columns))]
        lines += [_markdown_row(row) for row in rows]
    return "\n".join(lines) + "\n"


def _position_table(total: Summary) -> Table:
    counts = total.counts
    rows = [
        (str(place + 1), f"{accepted}", _rate(rate), _rate(conditional), _bar(rate))
        for place, (accepted, rate, conditional) in enumerate(
            zip(counts.per_pos_accepted, counts.per_pos_acceptance_rates, total.conditional_rates, strict=False)
        )
    ]
    return ("position", "accepted", "share of steps", "share if the position before was accepted", ""), rows


def _definition_table(total: Summary) -> Table:
    rows = [
        (name, "-" if total.definitions[name] is None else f"{total.definitions[name]:.3f}", meaning)
        for name, meaning in DEFINITIONS.items()
    ]
    return ("definition", "value", "meaning"), rows


def _category_table(evaluation: Evaluation) -> Table:
    rows = [
        (name, str(summary.num_requests), str(summary.counts.num_drafts), _length(summary))
        for name, summary in evaluation.categories.items()
    ]
    total = evaluation.total
    rows.append(("all", str(total.num_requests), str(total.counts.num_drafts), _length(total)))
    return ("category", "prompts", "steps", "acceptance length"), rows


def _length(summary: Summary) -> str:
    if summary.counts.acceptance_len is None:
        return "-"
    text = f"{summary.counts.acceptance_len:.3f}"
    return text + (f" [{summary.interval.low:.3f}, {summary.interval.high:.3f}]" if summary.interval else "")


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def _bar(rate: float) -> str:
    return "▇" * math.ceil(rate * 20)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
