"""Write results: a file is complete or absent. A device or a pipe is written directly."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from dflash_runtime.documents import to_json
from dflash_runtime.errors import UsageError
from dflash_runtime.whole_files import NotWritten, hidden_path, written_whole


def check_output(path: Path, *, force: bool, hint: str = "pass --force to replace it", is_folder: bool = False) -> None:
    """Refuse an output before anything is computed. All commands use this rule for files and folders.

    Raises:
        UsageError: the parent is not a directory, or no files can be made in it. Or the output exists and `force` is
            false. Or the output is a directory instead of a file.
    """
    check_parent(path)
    if path.is_dir() and not is_folder:
        raise UsageError("is a directory, expected a file name", id="output-is-directory", path=path)
    if os.path.lexists(path) and not is_stream(path) and not force:
        raise UsageError("exists already", id="output-exists", path=path, hint=hint)


def check_parent(path: Path) -> None:
    """Require that the parent of an output is a directory in which files can be made.

    Raises:
        NotWritten: the system makes no file with this name there.
        UsageError: naming the parent.
    """
    if str(path) == "-":
        raise UsageError(
            "is no file name here", id="output-is-dash", path=path, found="-", expected="a file name",
            hint="name a file; commands that can print do so without --output",
        )  # fmt: skip
    parent = path.absolute().parent
    a_file = next((item for item in (path.parent, *path.parent.parents) if item.exists() and not item.is_dir()), None)
    if a_file is not None:
        raise UsageError(
            "is a file, expected a directory", id="parent-is-a-file", path=a_file, found="a file",
            expected="a directory", hint="name a path in a directory",
        )  # fmt: skip
    if not parent.is_dir():
        raise UsageError(
            "no such directory",
            id="no-parent-directory",
            path=path.parent,
            hint=f"make it first: mkdir -p {path.parent}",
        )
    if not is_stream(path) and not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"no files can be made in this directory, so {path.name} cannot be written", id="permission-denied",
            path=path.parent, found=path.name,
            hint="name a file in another directory, or give this user the right to write here",
        )  # fmt: skip
    if not is_stream(path):
        _try_to_write(path)


def _try_to_write(path: Path) -> None:
    """Make and remove a hidden file beside an output: access rights do not tell what the system refuses."""
    real = Path(os.path.realpath(path))
    if not real.name:
        return  # the root folder
    trial = hidden_path(real, "tmp")
    with naming_output(path):
        trial.touch(exist_ok=False)
        trial.unlink()


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, such as /dev/null, which is written and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


@dataclass(frozen=True, slots=True)
class Output:
    """An open text file. Its errors name the file, which errors of the system do not."""

    path: Path
    stream: TextIO

    def write(self, text: str) -> None:
        """Write text.

        Raises:
            NotWritten: the system refuses, for example because the disk is full.
        """
        with naming_output(self.path):
            self.stream.write(text)

    def flush(self) -> None:
        """Pass buffered text to the system."""
        with naming_output(self.path):
            self.stream.flush()

    def close(self) -> None:
        """Flush and close."""
        with naming_output(self.path):
            self.stream.close()


@contextmanager
def atomic_text(path: Path) -> Iterator[Output]:
    """Write a text file that appears under its name only if the block ends without an error.

    A link stays a link. A device or a pipe is written directly.

    Raises:
        UsageError: the directory does not exist, or the path is a directory.
    """
    with naming_output(path):
        is_folder = path.is_dir()
    if is_folder:
        raise UsageError("is a directory, expected a file name", id="output-is-directory", path=path)
    check_parent(path)
    if is_stream(path):
        with open_output(path, "w") as output:
            yield output
        return
    with written_whole(Path(os.path.realpath(path))) as partial, open_output(path, "w", at=partial) as output:
        yield output


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is complete or absent. A device or a pipe is written directly.

    Raises:
        NotWritten: the system refuses, for example because the disk is full.
    """
    if is_stream(path):
        with naming_output(path):
            path.write_bytes(data)
        return
    with naming_output(path), written_whole(path) as partial:
        partial.write_bytes(data)


def make_folder(path: Path) -> None:
    """Make an output folder in an existing folder, unless it exists.

    Raises:
        NotWritten: the system refuses.
        UsageError: this user may not write there.
    """
    with naming_output(path):
        path.mkdir(exist_ok=True)


@contextmanager
def open_output(path: Path, mode: Literal["w", "a"], *, at: Path | None = None) -> Iterator[Output]:
    """Open a text file. Errors name `path`, also if the file is written `at` another path first."""
    with naming_output(path):
        stream = (at or path).open(mode, encoding="utf-8")
    output = Output(path, stream)
    try:
        yield output
    except BaseException:
        with suppress(OSError):  # an error of closing would hide the error of the block
            stream.close()
        raise
    output.close()


@contextmanager
def naming_output(path: Path) -> Iterator[None]:
    """Add the name of the output to errors of the system.

    Raises:
        NotWritten: the system refuses to write.
        UsageError: this user may not write the file.
    """
    try:
        yield
    except PermissionError as error:
        raise UsageError(
            "this user may not write the file", id="permission-denied", path=path,
            hint="name another file, or give this user the right to write this one",
        ) from error  # fmt: skip
    except OSError as error:
        raise NotWritten(error.errno, error.strerror, str(path)) from error


def json_line(row: Any) -> str:
    """A document as one line of JSON Lines."""
    return json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n"
