"""Strict and bounded readers: from a file to text, and from text to an object of a document's class.

Every text file that the user names may be packed with gzip, and may begin with a byte order mark.
"""

import codecs
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar, cast

from dflash_runtime.checkpoint.stored.strict_json import (
    MAX_JSON_BYTES,
    MAX_ROWS_BYTES,
    parse_json,
    read_bytes,
    regular_size,
    too_large_json,
)
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

PACKED_SUFFIX = ".gz"
PACKED_START = b"\x1f\x8b"
"""The first bytes of a gzip file, whatever its name."""


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
    with _as_kind(error, path):
        return parse_json(text, Path(str(path)))


def read_input(path: Path, limit: int = MAX_JSON_BYTES, *, error: type[DFlashError] = UsageError) -> bytes:
    """Return the unpacked bytes of a regular file that the user named, at most `limit`, without a byte order mark.

    Raises:
        CheckpointNotFound: the file does not exist.
        error: the file is a directory, a pipe or a device, is too large, or is not a whole gzip file.
        FileUnreadable: the system does not give the file to this user.
    """
    with _explaining(path, error), _as_kind(error, path):
        size, data = regular_size(path), b""  # before the file is opened, because opening a pipe would wait
        if size <= limit:
            with path.open("rb") as stream:
                data = _unpacked(stream).read(limit + 1)
        if max(size, len(data)) > limit:
            raise too_large_json(max(size, len(data)), path, limit)
        return data


def read_stored(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a file as they are stored, because a run will continue the file; see `read_input`."""
    with _explaining(path, UsageError), _as_kind(UsageError, path):
        return read_bytes(path, limit)


def read_text(path: Path, limit: int = MAX_JSON_BYTES, *, error: type[DFlashError] = UsageError) -> str:
    """Return the text of a file; see `read_input`.

    Raises:
        error: also if the file is not UTF-8.
    """
    data = read_input(path, limit, error=error)
    with _explaining(path, error):
        return data.decode()


def unpacked_name(name: str) -> Path:
    """Return the name of a file without the suffix of gzip: `a.jsonl` for `a.jsonl.gz`."""
    return Path(name.removesuffix(PACKED_SUFFIX))


@contextmanager
def open_text(path: Path | None, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open the text of a file or a pipe, or of stdin if `path` is None, to read it line by line.

    Raises:
        CheckpointNotFound: the file does not exist.
        RequestError: the file is a directory, is not a whole gzip file, or is not UTF-8.
        FileUnreadable: the system does not give the file to this user.
    """
    with open_lines(path, error=RequestError) as stream:
        text = io.TextIOWrapper(cast(IO[bytes], stream), encoding="utf-8", newline=newline)
        try:
            yield text
        finally:
            text.detach()


@contextmanager
def open_lines(path: Path | None, *, error: type[DFlashError]) -> Iterator[io.BufferedReader]:
    """Open the bytes of a text; see `open_text`."""
    with _explaining(path or "stdin", error):
        if path is None:
            stdin: Any = sys.stdin.buffer
            yield _unpacked(stdin if hasattr(stdin, "peek") else io.BufferedReader(stdin))
            return
        with path.open("rb") as stream:
            yield _unpacked(stream)


def _unpacked(stream: Any) -> io.BufferedReader:
    """Return a buffered stream unpacked, after its byte order mark."""
    if stream.peek(len(PACKED_START)).startswith(PACKED_START):
        from gzip import GzipFile

        stream = io.BufferedReader(cast(io.RawIOBase, GzipFile(fileobj=stream)))
    if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return cast(io.BufferedReader, stream)


@contextmanager
def _explaining(path: Path | str, kind: type[DFlashError]) -> Iterator[None]:
    """Raise errors about a file that the user named in one line, as errors of this kind."""
    import zlib
    from gzip import BadGzipFile

    try:
        yield
    except FileNotFoundError as wrong:
        raise CheckpointNotFound("no such file", id="no-such-file", path=path) from wrong
    except IsADirectoryError as wrong:
        text, expected = "is a directory, expected a file", "a file"
        raise kind(text, id="not-a-regular-file", path=path, expected=expected) from wrong
    except (BadGzipFile, EOFError, zlib.error) as wrong:
        text, hint = f"not a whole gzip file: {wrong}", "copy the file again, or unpack it with gunzip"
        raise kind(text, id="not-gzip", path=path, expected="a whole gzip file", hint=hint) from wrong
    except UnicodeDecodeError as wrong:
        found = f"byte {wrong.object[wrong.start]:#04x}"
        text, hint = f"found {found}, expected UTF-8", "save the file as UTF-8"
        raise kind(text, id="not-utf-8", path=path, found=found, expected="UTF-8", hint=hint) from wrong
    except OSError as wrong:
        raise unreadable(path, wrong) from wrong


def text_lines(text: str) -> list[str]:
    """Return the lines of a text, which end with LF, CR or both.

    `str.splitlines` also splits at U+2028 and U+0085, which JSON allows inside a string.
    """
    lines = re.split(r"\r\n|\r|\n", text)
    return lines if lines[-1] else lines[:-1]


def bounded_lines(stream: TextIO, name: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not blank. The stream may be a pipe.

    Raises:
        RequestError: a line or the whole text is too long.
    """
    num_chars = 0
    for number in count(1):
        line = stream.readline(MAX_JSON_BYTES + 1)
        num_chars += len(line)
        if len(line) > MAX_JSON_BYTES or num_chars > MAX_ROWS_BYTES:
            expected = f"lines of at most {MAX_JSON_BYTES} and a text of at most {MAX_ROWS_BYTES} characters"
            text = f"found {num_chars} characters, expected {expected}"
            raise RequestError(text, id="json-too-large", path=f"{name}:{number}", found=num_chars, expected=expected)
        if not line:
            return
        if line.strip():
            yield number, line


@contextmanager
def _as_kind(kind: type[DFlashError], path: object) -> Iterator[None]:
    """Raise an error of a reader of checkpoints as one of this kind."""
    try:
        yield
    except CheckpointError as wrong:
        message = wrong.message.removeprefix(f"{path}: ")
        id = "not-a-document" if wrong.id == "checkpoint-error" else wrong.id
        raise kind(message, id=id, path=path, found=wrong.found, expected=wrong.expected, hint=wrong.hint) from wrong
