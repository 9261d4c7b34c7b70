"""Strict and bounded readers: from a file to text, and from text to an object of a document's class."""

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, TextIO, TypeVar

from dflash_runtime.checkpoint.strict_json import MAX_JSON_BYTES, MAX_ROWS_BYTES, parse_json, read_bytes
from dflash_runtime.documents import from_json
from dflash_runtime.errors import (
    CheckpointError,
    CheckpointNotFound,
    DFlashError,
    RequestError,
    UsageError,
    unreadable,
)

Read = TypeVar("Read")


def read_document(
    kind: type[Read], text: bytes, path: object, *, error: type[DFlashError] = UsageError, hint: str | None = None
) -> Read:
    """Read the JSON text of a document of class `kind`; `path` is where it is from, for errors.

    Raises:
        error: the text is not JSON, or a key is missing, unknown or holds a wrong value.
        UnsupportedError: the document has a later schema version.
    """
    return from_json(kind, parse_object(text, path, error=error), path=path, error=error, hint=hint)


def parse_object(text: bytes, path: object, *, error: type[DFlashError] = UsageError) -> dict[str, Any]:
    """Parse a JSON object strictly; see `parse_json`.

    Raises:
        error: the text is not JSON, not an object, or nested too deeply.
    """
    try:
        return parse_json(text, Path(str(path)))
    except CheckpointError as wrong:
        raise _as_kind(error, wrong, path) from wrong


def read_input(path: Path, limit: int = MAX_JSON_BYTES, *, error: type[DFlashError] = UsageError) -> bytes:
    """Return the bytes of a file that the user named: a regular file of at most `limit` bytes.

    Raises:
        CheckpointNotFound: the file does not exist.
        error: the file is a directory, a pipe or a device, or is too large.
        FileUnreadable: the system does not give the file to this user.
    """
    try:
        return read_bytes(path, limit)
    except FileNotFoundError as wrong:
        raise CheckpointNotFound("no such file", id="no-such-file", path=path) from wrong
    except CheckpointError as wrong:
        raise _as_kind(error, wrong, path) from wrong
    except OSError as wrong:
        raise unreadable(path, wrong) from wrong


def read_text(path: Path, limit: int = MAX_JSON_BYTES, *, error: type[DFlashError] = UsageError) -> str:
    """Return the text of a file without a byte order mark; see `read_input`.

    Raises:
        error: also if the file is not UTF-8.
    """
    try:
        return read_input(path, limit, error=error).decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        text = f"not UTF-8 at byte {wrong.start}"
        raise error(text, id="not-utf-8", path=path, found=wrong.start) from wrong


def text_lines(text: str) -> list[str]:
    """Return the lines of a text, which end with LF, CR or both.

    `str.splitlines` also splits at U+2028 and U+0085, which JSON allows inside a string.
    """
    lines = re.split(r"\r\n|\r|\n", text)
    return lines if lines[-1] else lines[:-1]


def bounded_lines(stream: TextIO, name: str, *, error: type[DFlashError] = RequestError) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not blank. The stream may be a pipe.

    Raises:
        error: a line or the whole text is too long.
    """
    num_chars = 0
    for number in count(1):
        line = stream.readline(MAX_JSON_BYTES + 1)
        num_chars += len(line)
        if len(line) > MAX_JSON_BYTES or num_chars > MAX_ROWS_BYTES:
            expected = f"lines of at most {MAX_JSON_BYTES} and a text of at most {MAX_ROWS_BYTES} characters"
            text = f"found {num_chars} characters, expected {expected}"
            raise error(text, id="json-too-large", path=f"{name}:{number}", found=num_chars, expected=expected)
        if not line:
            return
        if line.strip():
            yield number, line


def _as_kind(kind: type[DFlashError], wrong: CheckpointError, path: object) -> DFlashError:
    message = wrong.message.removeprefix(f"{path}: ")
    id = "not-a-document" if wrong.id == "checkpoint-error" else wrong.id
    return kind(message, id=id, path=path, found=wrong.found, expected=wrong.expected, hint=wrong.hint)
