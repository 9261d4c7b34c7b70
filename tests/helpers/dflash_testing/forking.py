"""The command line in a fork of this process, with signals and descriptors of its own and without another import."""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from typing import NoReturn

from dflash_testing.command_line import Outcome

LIMIT_S = 60.0


class Fork:
    """A running `dflash` whose stdout is a pipe, or is closed. Commands should have `--threads 1`."""

    def __init__(self, *arguments: object, is_stdout_closed: bool = False) -> None:
        reader, writer = os.pipe()
        with tempfile.TemporaryFile() as err, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # pytest-xdist has threads, which the fork does not use
            self.process = os.fork()
            if self.process == 0:
                os.close(reader)
                _become(list(map(str, arguments)), None if is_stdout_closed else writer, err.fileno())
            os.close(writer)
            self._err = os.fdopen(os.dup(err.fileno()))
        self.stdout = os.fdopen(reader)

    def end(self, *, when: Callable[[], bool], number: signal.Signals = signal.SIGINT) -> Outcome:
        """Send a signal as soon as a condition holds -> the outcome."""
        until = time.monotonic() + LIMIT_S
        while not when() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(self.process, number)
        return self.wait()

    def wait(self) -> Outcome:
        """The outcome of the process, with the rest of its output. Its stdout may be closed before."""
        out = "" if self.stdout.closed else self.stdout.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self._err.seek(0)
        outcome = Outcome(code, out, self._err.read())
        self.stdout.close()
        self._err.close()
        assert "Traceback" not in outcome.err
        return outcome


def _become(arguments: list[str], out: int | None, err: int) -> NoReturn:
    """Run `main` with these descriptors and leave as the interpreter does, but without the exit handlers of pytest."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin, sys.argv = TextIOWrapper(BytesIO()), ["dflash", *arguments]
        os.dup2(err, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        if out is None:
            os.close(1)
            sys.stdout = None
        else:
            os.dup2(out, 1)
            os.close(out)
            sys.stdout = os.fdopen(1, "w")
        from dflash_cli.main import main

        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        assert sys.stdout is not None, "main opens closed streams"
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)
