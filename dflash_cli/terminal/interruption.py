"""Handle Ctrl-C, SIGTERM, a closed reader of stdout and closed streams.

Typer ends silently on KeyboardInterrupt and EPIPE, so both become errors of our own before Typer sees them.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflash_runtime.errors import DFlashError

_received: int | None = None


class Interrupted(DFlashError):
    """Ctrl-C or SIGTERM ended the run. The message says what is kept, the hint how to continue.

    `found` is the number of finished answers, and `path` the file or folder that keeps them.
    """

    def __init__(
        self, message: str = "", *, num_answers: int | None = None, kept_in: object = None, hint: str | None = None
    ) -> None:
        self.exit_code = signal_exit_code()
        word = "terminated" if _received == signal.SIGTERM else "interrupted"
        super().__init__(f"{word}: {message}" if message else word, id=word, found=num_answers, hint=hint)
        self.path = kept_in


def how_to_continue(kept_in: object) -> str:
    """The hint of an interrupted run. `kept_in` is the file or folder with its answers, or None if they are lost."""
    if kept_in is None:
        return "the answers are lost; --output keeps them, and --resume continues from them"
    return f"the answers are kept in {kept_in}; run the same command with --resume to continue"


def signal_exit_code() -> int:
    """The exit code that shells use: 143 after SIGTERM, 130 after Ctrl-C."""
    return 128 + (_received or signal.SIGINT)


class ReaderGone(Exception):
    """The process that reads stdout has ended, such as `head` in `dflash explain | head`."""


@contextmanager
def turned_into_errors() -> Iterator[None]:
    """Turn interruptions and a closed pipe on stdout into exceptions that Typer lets through.

    Raises:
        Interrupted: after KeyboardInterrupt, or after another exception if a signal was received.
        ReaderGone: after EPIPE on stdout.
        DFlashError: after EPIPE on a named pipe, which is an output.
    """
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        raise Interrupted from error
    except OSError as error:
        if _received is not None:
            raise Interrupted from error
        if error.errno != errno.EPIPE:
            raise
        if error.filename is None:
            raise ReaderGone from error
        raise DFlashError("its reader has ended", id="reader-gone", path=error.filename) from error
    except Exception as error:
        # A library that is interrupted during its import may raise any exception.
        if _received is not None:
            raise Interrupted from error
        raise


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt. An ignored signal stays ignored, for example under nohup."""
    global _received
    _received = None
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received = None


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as under cron or after `>&-`.

    Each gets its own descriptor. Otherwise the next opened file would get descriptor 1 and receive the results.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def discard(stream: Any) -> None:
    """Connect a stream that cannot be written to the null device, so that Python can close it without an error."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return


def _raise(number: int, _frame: object) -> None:
    global _received
    _received = number
    raise KeyboardInterrupt
