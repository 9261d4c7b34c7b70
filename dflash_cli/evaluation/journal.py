"""A file to which each answer is appended as it ends, so that an interrupted evaluation can continue.

The first line holds the settings; every further line is one answer. A line is written whole or, where the machine
stopped in the middle of one, dropped when the file is read again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from dflash_cli.generation.answers import Answer
from dflash_cli.generation.atomic_file import is_stream, json_line
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.errors import UsageError
from dflash_runtime.scheduling.request import FinishReason, RequestOutput


class Journal:
    """Answers of a run, in memory, and on disk where a path is given.

    Raises:
        UsageError: the file exists and neither `resume` nor `force` was asked for, or it was made under other settings.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        rows: Sequence[PromptRow],
        *,
        resume: bool,
        force: bool = False,
    ) -> None:
        self._path = path
        self._settings = json.loads(json.dumps(dict(settings)))
        self._rows = rows
        self._stream: TextIO | None = None
        self._answers: dict[tuple[int, int], Answer] = {}
        if path is not None and path.exists() and not is_stream(path):
            if resume:
                self._read(path)
            elif not force:
                raise UsageError(
                    f"{path}: exists already", hint="pass --resume to continue it, or --force to replace it"
                )

    @property
    def pending(self) -> list[PromptRow]:
        """Rows of which some turn is not answered yet."""
        return [
            row for row in self._rows if any((row.index, turn) not in self._answers for turn in range(row.num_turns))
        ]

    @property
    def answers(self) -> list[Answer]:
        """Every answer so far, in input order."""
        return [self._answers[key] for key in sorted(self._answers)]

    def add(self, answer: Answer) -> None:
        """Keep an answer."""
        self._answers[answer.row.index, answer.turn] = answer
        self._write(_to_json(answer))

    def __enter__(self) -> "Journal":
        if self._path is not None:
            if not self._path.parent.is_dir():
                raise UsageError(f"{self._path.parent}: no such directory")
            # Rewritten rather than appended to, which drops a broken last line and rows that are no longer asked for.
            self._stream = self._path.open("w", encoding="utf-8")
            self._write({"settings": self._settings})
            for answer in self.answers:
                self._write(_to_json(answer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()

    def _write(self, row: dict[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json_line(row))
            self._stream.flush()

    def _read(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        if not lines[0]:
            return
        settings = _parse(lines[0]).get("settings")
        if not isinstance(settings, dict):
            raise UsageError(f"{path}: not a file written by --rows, whose first line holds settings")
        for key in sorted({*settings, *self._settings}):
            if settings.get(key) != self._settings.get(key):
                raise UsageError(
                    f"{path}: made with {key} {settings.get(key)!r}, but this run has {self._settings.get(key)!r}",
                    hint="name another file with --rows",
                )
        by_index = {row.index: row for row in self._rows}
        # The text after the last line feed is empty, or the beginning of a line that was cut off.
        for line in lines[1:-1]:
            record = _parse(line)
            row = by_index.get(record.get("index", -1))
            if row is not None and row.digest == record.get("digest"):
                self._answers[row.index, record["turn"]] = _from_json(record, row)
        self._drop_unfinished()

    def _drop_unfinished(self) -> None:
        """A conversation is taken whole or asked again: its later turns build on its earlier ones."""
        for row in self.pending:
            for turn in range(row.num_turns):
                self._answers.pop((row.index, turn), None)


def _to_json(answer: Answer) -> dict[str, Any]:
    return answer.to_json() | {
        "turn": answer.turn,
        "digest": answer.row.digest,
        "category": answer.row.category,
        "committed_lengths": list(answer.output.committed_lengths),
    }


def _from_json(record: Mapping[str, Any], row: PromptRow) -> Answer:
    output = RequestOutput(
        index=row.index,
        prompt_token_ids=tuple(record["prompt_token_ids"]),
        token_ids=tuple(record["token_ids"]),
        finish_reason=FinishReason(record["finish_reason"]),
        acceptance_lengths=tuple(record["acceptance_lengths"]),
        committed_lengths=tuple(record["committed_lengths"]),
    )
    return Answer(row, record["turn"], output, record["text"])


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
