"""Where results may be written, and how: a file is complete or absent, a device or a pipe is written to as it is."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

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


@contextmanager
def atomic_text(path: Path) -> Iterator[TextIO]:
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
        with path.open("w", encoding="utf-8") as stream:
            yield stream
        return
    path = path.resolve()
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            yield stream
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def json_line(row: dict[str, Any]) -> str:
    """One row of JSON Lines."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
