"""The file of `dflash eval-acceptance --rows`: settings, then a line for each answer."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dflash_cli.acceptance.conversation_counts import ConversationCounts, TurnSteps, count_turns, pool_conditions
from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_runtime.metrics import AcceptanceCounts


@RESULT_FORMATS.register("rows")
class JournalRows(ResultFormat):
    """What `dflash eval-acceptance --rows` writes. A later line about a turn overrules an earlier one."""

    title: ClassVar[str] = "dflash eval-acceptance --rows"

    def recognises(self, file: ResultFile) -> bool:
        return bool(file.rows) and isinstance(file.rows[0].get("settings"), dict)

    def read(self, file: ResultFile) -> MeasuredResult:
        settings = file.rows[0]["settings"]
        answers = {
            (row["index"], row["turn"]): row for row in file.rows[1:] if "error" not in row and not row.get("is_plain")
        }
        rows = [answers[key] for key in sorted(answers)]
        conversations: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            conversations.setdefault(row["index"], []).append(row)
        counts = AcceptanceCounts(settings["num_speculative_tokens"])
        for row in rows:
            lengths = row["acceptance_lengths"]
            widths = row.get("verify_widths") or [counts.num_speculative_tokens + 1] * len(lengths)
            for length, width in zip(lengths, widths, strict=True):
                counts.add(length - 1, width - 1)
        if counts.acceptance_len is None:
            raise file.refuse("has no steps, so there is no acceptance to compare")
        return MeasuredResult(
            name=str(file.path),
            source=self.title,
            acceptance_len=counts.acceptance_len,
            conversations=pool_conditions(_conversation(turns) for turns in conversations.values()),
            counts=counts,
            facts=settings,
        )


def _conversation(rows: Sequence[Mapping[str, Any]]) -> ConversationCounts:
    turns = [
        TurnSteps(len(row["prompt_token_ids"]), row["acceptance_lengths"], row["committed_lengths"]) for row in rows
    ]
    return ConversationCounts(
        digest=rows[0]["digest"],
        name=str(rows[0].get("id", f"prompt {rows[0].get('prompt_index', rows[0]['index']) + 1}")),
        category=rows[0]["category"],
        condition=rows[0].get("condition"),
        **count_turns(turns),
    )
