"""Where results may be written, and how: a file is complete or absent, a device or a pipe is written to as it is."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from dflash_runtime.documents import to_json
from dflash_runtime.errors import UsageError


def check_output(path: Path, *, force: bool, hint: str = "pass --force to replace it") -> None:
    """Refuse an output before anything is computed for it: one rule for every file and directory that is written.

    Raises:
        UsageError: the folder it would be in does not exist, or it exists itself and `force` is not given.
    """
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory", hint=f"make it first: mkdir -p {path.parent}")
    if os.path.lexists(path) and not is_stream(path) and not force:
        raise UsageError(f"{path}: exists already", hint=hint)


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, such as /dev/null, which is written to and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


@dataclass(frozen=True, slots=True)
class Output:
    """A text file that is being written; an error of writing it has its name, which the system does not give."""

    path: Path
    stream: TextIO

    def write(self, text: str) -> None:
        """Add text.

        Raises:
            OSError: it cannot be written, as on a full disk.
        """
        with naming_output(self.path):
            self.stream.write(text)

    def flush(self) -> None:
        """Hand everything written to the system."""
        with naming_output(self.path):
            self.stream.flush()

    def close(self) -> None:
        """Flush and close."""
        with naming_output(self.path):
            self.stream.close()


@contextmanager
def atomic_text(path: Path) -> Iterator[Output]:
    """A text file that appears under its name only when the block ends without an error.

    A link stays a link to it. A device or a pipe is written to.

    Raises:
        UsageError: the directory does not exist, or the path is a directory.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a directory, expected a file name")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory")
    if is_stream(path):
        with open_output(path, "w") as output:
            yield output
        return
    resolved = path.resolve()
    partial = resolved.with_name(f"{partial_prefix(resolved)}{os.getpid()}")
    try:
        with open_output(path, "w", at=partial) as output:
            yield output
        with naming_output(path):
            partial.replace(resolved)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """A file that appears under its name with all of these bytes, or not at all. A device or a pipe is written to.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    if is_stream(path):
        with naming_output(path):
            path.write_bytes(data)
        return
    partial = path.with_name(f"{partial_prefix(path)}{os.getpid()}")
    try:
        with naming_output(path):
            partial.write_bytes(data)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def partial_prefix(path: Path) -> str:
    """How the name of a file begins under which `path` is written, until it is whole."""
    return f".{path.name}.tmp-"


@contextmanager
def open_output(path: Path, mode: Literal["w", "a"], *, at: Path | None = None) -> Iterator[Output]:
    """A file to write to, named `path` in errors, wherever it lies `at` meanwhile."""
    with naming_output(path):
        stream = (at or path).open(mode, encoding="utf-8")
    output = Output(path, stream)
    try:
        yield output
    except BaseException:
        with suppress(OSError):  # which would hide why the block failed
            stream.close()
        raise
    output.close()


@contextmanager
def naming_output(path: Path) -> Iterator[None]:
    """Give an error of the system the name of the output that it is about."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def json_line(row: Any) -> str:
    """A document as one line of JSON Lines."""
    return json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n"
