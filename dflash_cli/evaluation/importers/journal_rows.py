"""The file of `dflash eval-acceptance --rows`: settings, then a line for each answer."""

from typing import Any, ClassVar

from dflash_cli.evaluation.conversation_counts import pool_rows
from dflash_cli.evaluation.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_runtime.metrics import AcceptanceCounts


@RESULT_FORMATS.register("rows")
class JournalRows(ResultFormat):
    """What `dflash eval-acceptance --rows` writes. A later line about a turn overrules an earlier one."""

    title: ClassVar[str] = "dflash eval-acceptance --rows"

    def recognises(self, file: ResultFile) -> bool:
        return bool(file.rows) and isinstance(file.rows[0].get("settings"), dict)

    def read(self, file: ResultFile) -> MeasuredResult:
        settings = file.rows[0]["settings"]
        turns = {(row["index"], row["turn"]): row for row in file.rows[1:] if "error" not in row}
        rows = [turns[key] for key in sorted(turns)]
        counts = AcceptanceCounts(settings["num_speculative_tokens"])
        for row in rows:
            for length, width in zip(row["acceptance_lengths"], row["verify_widths"], strict=True):
                counts.add(length - 1, width - 1)
        if counts.acceptance_len is None:
            raise file.refuse("has no steps, so there is no acceptance to compare")
        return MeasuredResult(
            name=str(file.path),
            source=self.title,
            acceptance_len=counts.acceptance_len,
            conversations=pool_rows(_turn(row) for row in rows),
            counts=counts,
            facts=settings,
        )


def _turn(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "key": row["index"],
        "digest": row["digest"],
        "name": str(row.get("id", f"prompt {row['index'] + 1}")),
        "category": row["category"],
        "num_tokens": sum(row["acceptance_lengths"]),
        "num_steps": len(row["acceptance_lengths"]),
    }
