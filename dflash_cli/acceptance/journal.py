"""A file to which each answer is appended when it ends, so that an interrupted evaluation can continue.

The first line holds the settings; every further line is one answer. Lines are only appended: answers to other prompts
stay, and a later line for the same prompt wins. A last line that was cut off by a crash is removed when the file is
opened again.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Annotated, Any, ClassVar

from dflash_cli.documents.atomic_file import (
    Output,
    atomic_text,
    check_output,
    is_stream,
    json_line,
    naming_output,
    open_output,
)
from dflash_cli.documents.reading import parse_object, read_document, read_stored
from dflash_cli.generation.answers import Answer, AnswerRow
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.terminal.interruption import how_to_continue
from dflash_runtime.checkpoint.stored.strict_json import MAX_ROWS_BYTES
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import UsageError
from dflash_runtime.json_values import is_int
from dflash_runtime.scheduling.request_output import RequestOutput


@dataclass(frozen=True, slots=True)
class JournalHead:
    """The first line of a file of `eval-acceptance --output`."""

    KIND: ClassVar[str] = "answers"

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow(AnswerRow):
    """One answer, as `dflash eval-acceptance --output` writes it."""

    turn: int
    digest: Annotated[str, "of the prompt"]
    category: str | None
    committed_lengths: Annotated[tuple[int, ...], "tokens of each verify step that are in the answer"]

    def answer(self, row: PromptRow) -> Answer:
        """Return the stored answer to this prompt."""
        output = RequestOutput(
            index=row.index,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            acceptance_lengths=self.acceptance_lengths,
            committed_lengths=self.committed_lengths,
            verify_widths=self.verify_widths,
            rejected_ids=self.rejected_ids,
            draft_confidences=self.draft_confidences,
            num_loaded=self.num_loaded,
        )
        return Answer(row, self.turn, output, self.text)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Content of a file: its settings, its answers by line number, and the number of bytes in whole lines."""

    settings: Mapping[str, Any]
    records: Mapping[int, Mapping[str, Any]]
    num_bytes: int


def check_journal(path: Path, *, resume: bool, force: bool) -> None:
    """Refuse a path that a run may not write to. A run with several files checks all of them before it writes any.

    Raises:
        UsageError: the parent is not a directory, or the file exists and neither `resume` nor `force` is given.
    """
    check_output(path, force=resume or force, hint="pass --resume to continue it, or --force to replace it")


def check_settings(
    path: Path,
    stored: Mapping[str, Any],
    settings: Mapping[str, Any],
    hint: str,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Require that a file or folder was made with these settings. `hints` has the hints of single settings.

    Raises:
        UsageError: naming the first setting that differs.
    """
    for key in sorted({*stored, *settings}):
        was, is_now = stored.get(key), settings.get(key)
        if was != is_now:
            raise UsageError(
                f"made with {key} {was!r}, but this run has {is_now!r}",
                id="settings-differ",
                path=path,
                field=key,
                found=was,
                expected=repr(is_now),
                hint=hints.get(key, hint),
            )


class Journal:
    """Answers of a run, in memory, and on disk if there is a path.

    `settings` hold everything that decides an answer; a file with other settings is refused. A failed answer is not
    stored, so a resumed run asks its prompt again.

    Raises:
        UsageError: the file exists and neither `resume` nor `force` is true, it is not a file of answers, or it has
            other settings.
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
        self._settings: dict[str, Any] = to_json(settings)
        self._head = JournalHead(self._settings)
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
    def pending(self) -> list[PromptRow]:
        """Rows with at least one unanswered turn."""
        return [
            row for row in self._rows if any((row.index, turn) not in self._answers for turn in range(row.num_turns))
        ]

    @property
    def answers(self) -> list[Answer]:
        """Every answer so far, in input order."""
        return [self._answers[key] for key in sorted(self._answers)]

    def add(self, answer: Answer) -> None:
        """Store an answer in memory and on disk, unless it failed."""
        if answer.output.error is None:
            self._answers[answer.row.index, answer.turn] = answer
            row, number = answer.row, self._settings.get("num_speculative_tokens", 0)
            self._write(
                JournalRow.of(
                    answer,
                    number,
                    turn=answer.turn,
                    digest=row.digest,
                    category=row.category,
                    committed_lengths=answer.output.committed_lengths,
                )
            )

    def drop_unfinished(self) -> None:
        """Drop conversations that lack a turn from memory; their answers stay on disk."""
        for row in self.pending:
            for turn in range(row.num_turns):
                self._answers.pop((row.index, turn), None)

    def __enter__(self) -> "Journal":
        if self._path is None:
            return self
        with ExitStack() as files:
            if is_stream(self._path):
                self._output = files.enter_context(open_output(self._path, "w"))
                self._write(self._head)
            else:
                self._output = self._open_file(self._path, files)
            self._open_files = files.pop_all()
        return self

    def _open_file(self, path: Path, files: ExitStack) -> Output:
        """Lock the file before it changes; then remove an unfinished last line, or start the file anew.

        Raises:
            UsageError: another run writes to the file, or has written to it since it was read.
        """
        if path.exists():
            output = files.enter_context(open_output(path, "a"))
            _lock(output)
            if self._stored is not None and self._stored.num_bytes:
                with naming_output(path), path.open("rb") as stored:
                    stored.seek(self._stored.num_bytes)
                    if b"\n" in stored.read():
                        raise UsageError(
                            "another run has written to this file", id="file-in-use", path=path, hint=AGAIN
                        )
                    os.truncate(path, self._stored.num_bytes)
                return output
        with atomic_text(path) as new:
            new.write(json_line(self._head))
        output = files.enter_context(open_output(path, "a"))
        _lock(output)
        return output

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.__exit__(kind, error, trace)

    def _write(self, row: JournalHead | JournalRow) -> None:
        if self._output is not None:
            try:
                self._output.write(json_line(row))
                self._output.flush()
            except OSError as error:
                if not is_stream(self._output.path):
                    error.add_note(how_to_continue(self._output.path))
                raise

    def _take(self, path: Path, stored: _Stored) -> None:
        """Take over stored answers to rows of this run."""
        if not stored.num_bytes:
            return
        hint = "give the same options again, or name another file with --output"
        check_settings(path, stored.settings, self._settings, hint, HINTS)
        by_index = {row.index: row for row in self._rows}
        for number, record in stored.records.items():
            index = record.get("index")
            row = by_index.get(index) if is_int(index) else None
            if row is None or row.digest != record.get("digest") or "error" in record:
                continue
            stored_row = from_json(JournalRow, record, path=f"{path}:{number}", error=UsageError, hint=TAKE_OUT)
            self._answers[row.index, stored_row.turn] = stored_row.answer(row)
        self.drop_unfinished()


HEAD_START = json_line(JournalHead({}))[: -len("{}}\n")].encode()
HEAD_HINT = "a file of --output starts with its settings"
AGAIN = "run the command again; it continues from the answers in the file"
TAKE_OUT = "delete the line; the prompt is asked again"
HINTS = dict.fromkeys(
    ("draft_digest", "target_digest", "draft_modified_ns", "target_modified_ns"),
    "the checkpoint has changed; name another file with --output",
)


def stored_settings(path: Path) -> Mapping[str, Any]:
    """The settings of a file of answers; empty if the run was stopped while it wrote them.

    Raises:
        UsageError: the file is not a file of answers.
    """
    return _read(path).settings


def _read(path: Path) -> _Stored:
    """Parse a file of answers.

    Raises:
        UsageError: the first line is not the head of a file of answers, or a further line is not a JSON object.
    """
    data = read_stored(path, MAX_ROWS_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and HEAD_START.startswith(data[: len(HEAD_START)]):
        return _Stored({}, {}, 0)  # the run was stopped while it wrote the first line
    first, *lines = whole.split(b"\n")[:-1] or [data]
    settings = read_document(JournalHead, first, path, hint=HEAD_HINT).settings
    records = {number: parse_object(line, f"{path}:{number}") for number, line in enumerate(lines, start=2)}
    return _Stored(settings, records, len(whole))


def _lock(output: Output) -> None:
    """Refuse a second run that writes to the same file, if the file system supports locks.

    Raises:
        UsageError: another run holds the lock.
    """
    try:
        import fcntl
    except ImportError:
        return
    with suppress(OSError):
        try:
            fcntl.flock(output.stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError("another run is writing to this file", id="file-in-use", path=output.path) from error
