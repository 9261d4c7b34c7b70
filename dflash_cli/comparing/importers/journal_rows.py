"""The file of `dflash eval-acceptance --output`: settings, then a line for each answer."""

from collections.abc import Sequence
from typing import ClassVar

from dflash_cli.acceptance.conversation_counts import ConversationCounts, pool_conditions
from dflash_cli.acceptance.journal import JournalHead, JournalRow
from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_cli.comparing.own_facts import own_facts
from dflash_runtime.documents import from_json
from dflash_runtime.errors import UsageError
from dflash_runtime.metrics import AcceptanceCounts


@RESULT_FORMATS.register("rows")
class JournalRows(ResultFormat):
    """The output of `dflash eval-acceptance --output`. A later line about a turn replaces an earlier one."""

    title: ClassVar[str] = "dflash eval-acceptance --output"

    def recognises(self, file: ResultFile) -> bool:
        return bool(file.rows) and isinstance(file.rows[0].get("settings"), dict)

    def read(self, file: ResultFile) -> MeasuredResult:
        settings = from_json(JournalHead, file.rows[0], path=file.path, error=UsageError).settings
        answers = {
            (row.index, row.turn): row for row in file.read_rows(JournalRow) if row.error is None and not row.is_plain
        }
        rows = [answers[key] for key in sorted(answers)]
        conversations: dict[int, list[JournalRow]] = {}
        for row in rows:
            conversations.setdefault(row.index, []).append(row)
        counts = AcceptanceCounts(settings["num_speculative_tokens"])
        for row in rows:
            widths = row.verify_widths or [counts.num_speculative_tokens + 1] * len(row.acceptance_lengths)
            for length, width in zip(row.acceptance_lengths, widths, strict=True):
                if not 1 <= length <= width:
                    text = f"prompt {row.index + 1}: a step of {length} tokens, expected 1 to {width}"
                    raise file.refuse(text, id="malformed-result")
                counts.add(length - 1, width - 1)
        pooled = pool_conditions(_conversation(turns) for turns in conversations.values())
        return self.of_counts(file, counts, conversations=pooled, facts=own_facts(settings))


def _conversation(rows: Sequence[JournalRow]) -> ConversationCounts:
    first = rows[0]
    return ConversationCounts.of_turns(
        rows,
        id=first.id,
        prompt_index=first.index if first.prompt_index is None else first.prompt_index,
        digest=first.digest,
        category=first.category,
        condition=first.condition,
    )
