"""Results as one tidy table: a row says one value of one result. docs/how-to/publishing.md names the columns."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from dflash_cli.acceptance.intervals.statistics import Interval, Summary
from dflash_cli.comparing.stored_evaluation import StoredEvaluation
from dflash_runtime.documents import to_json

COLUMNS = (
    "result",
    "draft",
    "target",
    "category",
    "condition",
    "quantity",
    "position",
    "value",
    "low",
    "high",
    "confidence",
    "count",
)
Row = dict[str, Any]


def to_csv(results: Sequence[StoredEvaluation]) -> str:
    """The table, with a heading; a value that is not known has no row, and an interval that is not an empty cell."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for stored in results:
        settings = stored.evaluation.settings
        names = {"result": stored.name, "draft": settings.get("draft"), "target": settings.get("target")}
        for category, summary in {"": stored.evaluation.total, **stored.evaluation.categories}.items():
            writer.writerows({**names, "category": category, **row} for row in _rows(summary))
        for item in stored.evaluation.conditions:
            writer.writerows({**names, "condition": item.condition.name, **row} for row in _rows(item.summary))
    return stream.getvalue()


def _rows(summary: Summary) -> Iterator[Row]:
    counts = summary.counts
    if counts.acceptance_len is None:
        return
    yield _row("acceptance_len", None, counts.acceptance_len, summary.acceptance_len_interval, counts.num_drafts)
    for place, (rate, number) in enumerate(zip(counts.per_pos_acceptance_rates, counts.per_pos_verified, strict=True)):
        if number:
            yield _row("accepted_share", place + 1, rate, summary.per_pos_intervals[place], number)
    for place, conditional in enumerate(summary.per_pos_conditional_rates):
        if conditional is not None:
            reached = [counts.num_drafts, *counts.per_pos_accepted][place]
            yield _row(
                "conditional_share", place + 1, conditional, summary.per_pos_conditional_intervals[place], reached
            )
    for place, number in enumerate(summary.histogram):
        yield _row("steps_giving", place + 1, number / counts.num_drafts, None, number)
    for name, value in summary.definitions.items():
        if value is not None:
            yield _row(f"definition_{name}", None, value, None, counts.num_drafts)


def _row(quantity: str, position: int | None, value: float, interval: Interval | None, count: int) -> Row:
    row: Row = {"quantity": quantity, "value": repr(value), "count": count}
    if position is not None:
        row["position"] = position
    return row | (to_json(interval) or {})
