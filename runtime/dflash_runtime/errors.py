"""The errors a user can act on; anything else that escapes is a bug.

* DFlashError                 id, path, field, found, expected, message, hint; the command line exits with `exit_code`
  x UsageError            2   options that contradict each other
    - RequestError        2   a prompt or sampling parameters the engine cannot serve
  x CheckpointError       3   a checkpoint that breaks its own rules
    - InvalidConfig       3   one field: where, what was found, what was expected
    - TensorMismatch      3   missing, unexpected and misshapen tensors, all at once
    - PairMismatch        3   a draft and a target that do not fit each other
    - InvalidHandoff      3   a hand-off that is malformed, truncated or not what was saved
    - HandoffMismatch     3   a hand-off of another pair, or without all its rows
  x GateFailed            3   a threshold that was asked for was not met
  x CheckpointNotFound    4   absent, gated, offline, or a revision that does not exist
  x PeerUnreachable       4   a process at the other end of a hand-off that does not answer, or is gone
  x UnsupportedError      5   sound, but not something this tool serves
    - UnknownFormat       5   no known dialect, or a relative of DFlash
    - LossyConversion     5   something would be lost
  x CapacityError         6   out of device memory, pages or disk
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dflash_runtime.phrases import shorten


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING: Any = _Missing()
"""As `found`: the field is absent."""


class DFlashError(Exception):
    """Root of every error that a user can act on. The command line prints it as one line and exits with `exit_code`.

    id        names the situation in kebab-case: `resume-without-rows`. By default it names the class: `usage-error`.
    path      the file or folder at fault
    field     the option, config key, tensor or row at fault
    found     the value that was found, MISSING if the field is absent
    expected  the value or form that was expected, in words
    hint      the next command to try

    Without a `message`, the sentence is written from `field`, `found` and `expected`.
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
    """Options that contradict each other or cannot be understood."""

    exit_code = 2


class RequestError(UsageError):
    """A prompt or sampling parameters that the engine cannot serve."""


class CheckpointError(DFlashError):
    """A checkpoint that is present but malformed."""

    exit_code = 3


class InvalidConfig(CheckpointError):
    """One field of a config that is missing or holds a wrong value."""

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
    """Every missing, unexpected and misshapen tensor of a checkpoint.

    `wrong` maps a tensor's name to what was found and what was expected.
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
    """A hand-off that is not what was saved: malformed, cut short or altered."""


class HandoffMismatch(CheckpointError):
    """A hand-off that this engine cannot go on from: of another pair, or without rows that it needs."""


class GateFailed(DFlashError):
    """A threshold the user asked for was not met, or validation found errors."""

    exit_code = 3


class CheckpointNotFound(DFlashError):
    """Absent, gated, unreachable, or a revision that does not exist."""

    exit_code = 4


class PeerUnreachable(DFlashError):
    """The process at the other end of a hand-off does not answer, or is gone."""

    exit_code = 4


class UnsupportedError(DFlashError):
    """Sound input that this tool does not serve."""

    exit_code = 5


class UnknownFormat(UnsupportedError):
    """A checkpoint of no known dialect, or of a named relative of DFlash."""


class LossyConversion(UnsupportedError):
    """A conversion that would lose something. The message names what and why."""


class CapacityError(DFlashError):
    """Not enough device memory, KV pages or disk space."""

    exit_code = 6


@contextmanager
def naming_file(path: object) -> Iterator[None]:
    """Add the file's path to errors raised by code that knows only its content."""
    try:
        yield
    except (InvalidConfig, InvalidHandoff, UnsupportedError) as error:
        if error.path is None and not error.message.startswith(f"{path}: "):
            error.path, error.message = path, f"{path}: {error.message}"
            error.args = (error.message,)
        raise


def _listed(items: Sequence[str], separator: str, limit: int = 100) -> str:
    """A list that stays readable where a file has thousands of the kind."""
    rest = len(items) - limit
    return separator.join(items[:limit]) + (f"{separator}and {rest} more" if rest > 0 else "")


def _sentence(field: str | None, found: Any, expected: str | None) -> str:
    """`--top-p: found 2.0, expected a number from 0 to 1`."""
    found_text = "missing" if found is MISSING else f"found {shorten(repr(found), 80)}"
    return f"{field}: {found_text}, expected {expected}"


def _kebab_case(name: str) -> str:
    """`TensorMismatch` as `tensor-mismatch`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
