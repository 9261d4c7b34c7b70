"""Results as one tidy table: each row has one value of one result. docs/how-to/publishing.md lists the columns."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from dflash_cli.acceptance.measured_values import MeasuredValue, measured_values
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


def to_csv(results: Sequence[StoredEvaluation]) -> str:
    """Return the table with a header line. Unknown values are left out, and missing intervals have empty cells."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for stored in results:
        evaluation = stored.evaluation
        names = {"result": stored.name, **{role: evaluation.settings.get(role) for role in ("draft", "target")}}
        groups = [({"category": name}, item) for name, item in {"": evaluation.total, **evaluation.categories}.items()]
        groups += [({"condition": item.condition.name}, item.summary) for item in evaluation.conditions]
        for group, summary in groups:
            writer.writerows({**names, **group, **_cells(item)} for item in measured_values(summary))
    return stream.getvalue()


def _cells(item: MeasuredValue) -> dict[str, Any]:
    cells = {"quantity": item.quantity, "position": item.position, "value": repr(item.value), "count": item.count}
    return cells | (to_json(item.interval) or {})
