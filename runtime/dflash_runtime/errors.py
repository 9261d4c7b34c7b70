"""Errors that a user can act on. Any other exception that reaches the command line is a bug.

error                 exit code   situation
DFlashError                   1   the root of all errors
  UsageError                  2   options that contradict each other, or an invalid value
    RequestError              2   a prompt or sampling parameters that the engine cannot serve
  CheckpointError             3   a malformed checkpoint
    InvalidConfig             3   a missing or wrong field of a config
    TensorMismatch            3   missing, unexpected and misshapen tensors, all in one error
    PairMismatch              3   a draft and a target that do not fit each other
    InvalidHandoff            3   a malformed, truncated or altered hand-off
    HandoffMismatch           3   a hand-off of another pair, or with missing rows
  GateFailed                  3   a threshold of the user was missed
  CheckpointNotFound          4   an absent or gated checkpoint, an unknown revision, or no network
  FileUnreadable              4   a file or folder that the system does not give to this user, or cannot read
  PeerUnreachable             4   the other process of a hand-off does not answer, or has ended
  UnsupportedError            5   valid input that this tool does not support
    UnknownFormat             5   an unknown dialect, or a relative of DFlash
    LossyConversion           5   a conversion that would lose something
  CapacityError               6   not enough device memory, KV pages or disk space
"""

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dflash_runtime.phrases import shorten

MAX_FOUND_CHARS = 80
"""The most characters of `found` in a message."""


NON_FINITE = "non-finite-logits"
"""Id of errors about NaN or infinite logits of a target."""


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING: Any = _Missing()
"""The value of `found` for an absent field."""


class DFlashError(Exception):
    """An error that a user can act on. The command line prints it as one line and exits with `exit_code`.

    message    the sentence; without one it is written from `field`, `found` and `expected`
    id         the situation in kebab-case, `resume-without-rows`; by default the class, `usage-error`
    path       the file or folder at fault; the message begins with it
    field      the option, config key, tensor or row at fault
    found      the wrong value, or MISSING
    expected   the expected value or form, in words
    hint       the command to try next
    """

    exit_code = 1

    def __init__(
        self,
        message: str = "",
        *,
        id: str = "",
        path: object = None,
        field: str | None = None,
        found: Any = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        text = message or _sentence(field, found, expected)
        super().__init__(text if path is None else f"{path}: {text}")
        self.message: str = self.args[0]
        self.id = id or _kebab_case(type(self).__name__)
        self.path = path
        self.field = field
        self.found = found
        self.expected = expected
        self.hint = hint


class UsageError(DFlashError):
    """Options that contradict each other, or a value that is not valid."""

    exit_code = 2


class RequestError(UsageError):
    """A prompt or sampling parameters that the engine cannot serve."""


class CheckpointError(DFlashError):
    """A malformed checkpoint."""

    exit_code = 3


class InvalidConfig(CheckpointError):
    """A missing or wrong field of a config."""

    def __init__(
        self,
        field: str,
        found: Any,
        expected: str,
        *,
        id: str = "",
        path: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(id=id, path=path, field=field, found=found, expected=expected, hint=hint)


class TensorMismatch(CheckpointError):
    """All missing, unexpected and misshapen tensors of a checkpoint.

    `wrong` maps the name of a misshapen tensor to the shape that was found and the shape that was expected.
    """

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        wrong: Mapping[str, tuple[str, str]] | None = None,
        path: object = None,
        hint: str | None = None,
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.wrong = dict(wrong or {})
        parts = []
        if self.missing:
            parts.append(f"missing tensors: {_listed(self.missing, ', ')}")
        if self.unexpected:
            parts.append(f"unexpected tensors: {_listed(self.unexpected, ', ')}")
        if self.wrong:
            misshapen = [f"{name}: found {found}, expected {shape}" for name, (found, shape) in self.wrong.items()]
            parts.append(_listed(misshapen, "; "))
        super().__init__("; ".join(parts), path=path, hint=hint)


class PairMismatch(CheckpointError):
    """A draft that was not made for this target."""


class InvalidHandoff(CheckpointError):
    """A malformed, truncated or altered hand-off."""


class HandoffMismatch(CheckpointError):
    """A hand-off that this engine cannot continue from: it is of another pair, or lacks rows."""


class GateFailed(DFlashError):
    """A threshold of the user was missed, or validation found errors."""

    exit_code = 3


class CheckpointNotFound(DFlashError):
    """An absent, gated or unreachable checkpoint, or an unknown revision."""

    exit_code = 4


class FileUnreadable(DFlashError):
    """A file or folder that the system does not give to this user, or cannot read"""

    exit_code = 4


class PeerUnreachable(DFlashError):
    """The other process of a hand-off does not answer, or has ended."""

    exit_code = 4


class UnsupportedError(DFlashError):
    """Valid input that this tool does not support."""

    exit_code = 5


class UnknownFormat(UnsupportedError):
    """A checkpoint of an unknown dialect, or of a relative of DFlash."""


class LossyConversion(UnsupportedError):
    """A conversion that would lose something. The message names the loss and the reason."""


class CapacityError(DFlashError):
    """Not enough device memory, KV pages or disk space."""

    exit_code = 6


def error_of(exit_code: int) -> type[DFlashError]:
    """Return the most general error class with this exit code."""
    kinds = (RequestError, CheckpointError, CheckpointNotFound, UnsupportedError, CapacityError)
    return next((kind for kind in kinds if kind.exit_code == exit_code), DFlashError)


@contextmanager
def naming_file(path: object) -> Iterator[None]:
    """Add a file's path to errors of code that knows only the content."""
    try:
        yield
    except (CheckpointError, UnsupportedError) as error:
        if error.path is None and not error.message.startswith(f"{path}: "):
            error.path, error.message = path, f"{path}: {error.message}"
            error.args = (error.message,)
        raise


def unreadable(path: object, error: OSError) -> CheckpointError | FileUnreadable | CapacityError:
    """Return the error for the system's `error` at reading `path`, which a link may have promised in vain."""
    reason = (error.strerror or str(error) or type(error).__name__).lower()  # a library of Rust sets only the text
    if error.errno == errno.ENOMEM:
        return out_of_memory(path)
    hint = "give this user the right to read it" if isinstance(error, PermissionError) else None
    kind = CheckpointError if isinstance(error, FileNotFoundError) else FileUnreadable
    return kind(f"cannot be read: {reason}", id="file-unreadable", path=path, found=reason, hint=hint)


def out_of_memory(path: object) -> CapacityError:
    """Return the error for a file that does not fit into memory."""
    return CapacityError("cannot be read: out of memory", id="out-of-memory", path=path)


@contextmanager
def hinting(hint: str) -> Iterator[None]:
    """Add this hint to errors of a checkpoint without a hint."""
    try:
        yield
    except CheckpointError as error:
        error.hint = error.hint or hint
        raise


def _listed(items: Sequence[str], separator: str, limit: int = 100) -> str:
    """The first `limit` items, and the number of the others."""
    rest = len(items) - limit
    return separator.join(items[:limit]) + (f"{separator}and {rest} more" if rest > 0 else "")


def _sentence(field: str | None, found: Any, expected: str | None) -> str:
    """`--top-p: found 2.0, expected a number from 0 to 1`."""
    found_text = "missing" if found is MISSING else f"found {shorten(repr(found), MAX_FOUND_CHARS)}"
    return f"{field}: {found_text}, expected {expected}"


def _kebab_case(name: str) -> str:
    """`TensorMismatch` as `tensor-mismatch`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
