"""Files and directories that appear under their name complete, or not at all."""

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_WHOLE_BYTES = 100
"""The longest name that is kept whole in its hidden name. File systems take names of at most 143 or 255 bytes."""

ADDED_BYTES = len(".~01234567.tmp-01234567")

_SWAP = threading.Lock()
"""Held while one directory replaces another."""


class NotWritten(OSError):
    """The system did not write a file or a folder. `filename` is the name that the user gave it."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A hidden path next to `path`, to write a file or a directory to.

    When the block ends without an error, it is renamed to `path` and replaces the file or directory there. Otherwise it
    is removed. A process that is killed leaves at most the hidden path.

    Raises:
        NotWritten: the rename failed.
    """
    partial, replaced = hidden_path(path, "tmp"), hidden_path(path, "old")
    try:
        yield partial
        try:
            with _SWAP:
                if partial.is_dir() and path.exists():  # a rename replaces no directory that has files
                    path.replace(replaced)
                partial.replace(path)
        except OSError as error:
            raise NotWritten(error.errno, error.strerror, str(path)) from error
    finally:
        _remove(partial)
        _remove(replaced)


def hidden_path(path: Path, kind: str) -> Path:
    """An unused path `.NAME.KIND-01234567` in the same directory; see `hidden_stem`."""
    return path.with_name(f"{hidden_stem(path.name)}.{kind}-{secrets.token_hex(4)}")


def hidden_stem(name: str) -> str:
    """`.NAME`. A long name is cut and gets a digest, so that the hidden path has no longer name than the path."""
    data = os.fsencode(name)
    if len(data) <= MAX_WHOLE_BYTES:
        return f".{name}"
    beginning = data[: len(data) - ADDED_BYTES].decode(errors="ignore")
    return f".{beginning}~{hashlib.sha256(data).hexdigest()[:8]}"


def _remove(path: Path) -> None:
    """Remove a file or directory if it exists and the system allows it."""
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
