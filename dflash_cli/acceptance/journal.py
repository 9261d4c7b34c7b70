"""A file to which each answer is appended as it ends, so that an interrupted evaluation can continue.

The first line holds the settings; every further line is one answer. Lines are only ever added: answers to prompts that
a run does not ask for stay, and what is not taken as an answer any more is overruled by a later line. A line that was
cut off in the middle, where the process or the machine stopped, is taken away when the file is opened again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_cli.documents.atomic_file import Output, atomic_text, is_stream, json_line, naming_output, open_output
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.terminal import console
from dflash_runtime.errors import UsageError
from dflash_runtime.scheduling.request import FinishReason, RequestOutput


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a file holds: its settings, its answers by line number, and how many of its bytes are whole lines."""

    settings: Mapping[str, Any]
    records: Mapping[int, Mapping[str, Any]]
    num_bytes: int


def check_journal(path: Path, *, resume: bool, force: bool) -> None:
    """Whether a run may write there; for those with several files, before the first of them is written.

    Raises:
        UsageError: its folder is none, or the file exists and neither `resume` nor `force` was asked for.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory")
    if path.exists() and not is_stream(path) and not (resume or force):
        raise UsageError(f"{path}: exists already", hint="pass --resume to continue it, or --force to replace it")


class Journal:
    """Answers of a run, in memory, and on disk where a path is given.

    `settings` are what decides an answer: a file made under others is refused. A failed answer is not kept, so that it
    is asked again.

    Raises:
        UsageError: the file exists and neither `resume` nor `force` was asked for, it is no such file, or it was made
            under other settings.
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
        self._output: Output | None = None
        self._open_files = ExitStack()
        self._answers: dict[tuple[int, int], Answer] = {}
        self._stored: _Stored | None = None
        if path is not None and path.exists() and not is_stream(path):
            check_journal(path, resume=resume, force=force)
            if resume:
                self._stored = _read(path)
                self._take(path, self._stored)

    @property
    def _head(self) -> dict[str, Any]:
        """The first line; the settings stand first in it, by which one that was cut off is known."""
        return {"settings": self._settings, "schema_version": console.SCHEMA_VERSION, "kind": "answers"}

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
        """Keep an answer, in memory and on disk, unless it failed."""
        if answer.output.error is None:
            self._answers[answer.row.index, answer.turn] = answer
            self._write(_to_json(answer, self._settings.get("num_speculative_tokens", 0)))

    def drop_unfinished(self) -> None:
        """Take out what there is of conversations that lack a turn; on disk it stays."""
        for row in self.pending:
            for turn in range(row.num_turns):
                self._answers.pop((row.index, turn), None)

    def __enter__(self) -> "Journal":
        if self._path is None:
            return self
        if not self._path.parent.is_dir():
            raise UsageError(f"{self._path.parent}: no such directory")
        if self._stored is not None and self._stored.num_bytes:
            with naming_output(self._path):
                if self._path.stat().st_size > self._stored.num_bytes:
                    os.truncate(self._path, self._stored.num_bytes)
        elif not is_stream(self._path):
            with atomic_text(self._path) as output:
                output.write(json_line(self._head))
        self._output = self._open_files.enter_context(open_output(self._path, "w" if is_stream(self._path) else "a"))
        if is_stream(self._path):
            self._write(self._head)
        else:
            _lock(self._output)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.__exit__(kind, error, trace)

    def _write(self, row: dict[str, Any]) -> None:
        if self._output is not None:
            self._output.write(json_line(row))
            self._output.flush()

    def _take(self, path: Path, stored: _Stored) -> None:
        """Take over the answers of a file to the rows that are asked for."""
        if not stored.num_bytes:
            return
        for key in sorted({*stored.settings, *self._settings}):
            was, is_now = stored.settings.get(key), self._settings.get(key)
            if was != is_now:
                raise UsageError(
                    f"{path}: made with {key} {was!r}, but this run has {is_now!r}",
                    hint=HINTS.get(key, "give the same options again, or name another file with --rows"),
                )
        by_index = {row.index: row for row in self._rows}
        for number, record in stored.records.items():
            row = by_index.get(record.get("index", -1))
            if row is None or row.digest != record.get("digest") or "error" in record:
                continue
            try:
                self._answers[row.index, record["turn"]] = _from_json(record, row)
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(f"{path}:{number}: is no answer of --rows: {error!r}") from error
        self.drop_unfinished()


HINTS = dict.fromkeys(
    ("draft_digest", "target_digest", "draft_modified_ns", "target_modified_ns"),
    "the checkpoint is another one than it was: name another file with --rows",
)


def _read(path: Path) -> _Stored:
    """Parse a file of answers.

    Raises:
        UsageError: it is none, or one of its lines is not.
    """
    with naming_output(path):
        data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        # Nothing, or the beginning of the first line: the run was stopped before it had asked anything.
        if data and not data.startswith(b'{"settings"'[: len(data)]):
            raise UsageError(f"{path}: not a file of --rows, which starts with its settings")
        return _Stored({}, {}, 0)
    records = {number: _parse(line) for number, line in enumerate(whole.split(b"\n")[:-1], start=1)}
    first = records.pop(1)
    settings = first.get("settings") if first is not None else None
    if not isinstance(settings, dict):
        raise UsageError(f"{path}: not a file of --rows, which starts with its settings")
    found = {}
    for number, record in records.items():
        if record is None:
            raise UsageError(
                f"{path}:{number}: is no answer of --rows", hint="take the line out, to have it asked again"
            )
        found[number] = record
    return _Stored(settings, found, len(whole))


def _lock(output: Output) -> None:
    """Keep a second run from writing to the same file, where the file system can.

    Raises:
        UsageError: another run has it.
    """
    try:
        import fcntl
    except ImportError:
        return
    with suppress(OSError):
        try:
            fcntl.flock(output.stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{output.path}: another run is writing to it") from error


def _to_json(answer: Answer, num_speculative_tokens: int) -> dict[str, Any]:
    return answer.to_json(num_speculative_tokens) | {
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
        verify_widths=tuple(record.get("verify_widths", ())),
        rejected_ids=tuple(record.get("rejected_ids", ())),
        num_loaded=record.get("num_loaded", 0),
    )
    return Answer(row, record["turn"], output, record["text"])


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
