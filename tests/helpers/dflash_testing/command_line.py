"""Runs of the command line, in this process or in one of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, StringIO, TextIOWrapper

from dflash_runtime.errors import DFlashError
from dflash_runtime.notices import Notice
from dflash_testing.documents import check_printed
from dflash_testing.paths import ROOT

IMPORT_PATHS = {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "runtime", "kernels"))}
"""For a process of its own: this tree, whatever is installed."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run of the command line. `error` and `notices` are known for runs in this process.

    `notices` are the ids of the warnings and notes on stderr that have one.
    """

    code: int
    out: str
    err: str
    error: DFlashError | None = None
    notices: tuple[str, ...] = ()

    @property
    def error_id(self) -> str | None:
        return self.error.id if self.error is not None else None

    @property
    def field(self) -> str | None:
        """The field that the error names."""
        return self.error.field if self.error is not None else None


def invoke(*args: object) -> Outcome:
    """Run the command line in this process; an error that a user can act on becomes its message and exit code."""
    from typer.testing import CliRunner

    from dflash_cli.main import app

    with recorded_notices() as notices:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
    error = result.exception
    if isinstance(error, DFlashError):
        hint = f"\nhint: {error.hint}" if error.hint else ""
        text = f"{result.stderr}error: {error.message}{hint}\n"
        return Outcome(error.exit_code, result.stdout, text, error, tuple(notices))
    if error is not None and not isinstance(error, SystemExit):
        raise error
    check_printed(result.stdout)
    return Outcome(result.exit_code, result.stdout, result.stderr, None, tuple(notices))


@contextmanager
def recorded_notices() -> Iterator[list[str]]:
    """The ids of warnings and notes while the block runs."""
    from unittest.mock import patch

    from dflash_cli.terminal import console

    ids: list[str] = []
    say = console._say

    def record(kind: str, colour: str, text: str) -> None:
        ids.extend([text.id] if isinstance(text, Notice) else [])
        say(kind, colour, text)

    with patch.object(console, "_say", record):
        yield ids


def run_main(*args: object) -> Outcome:
    """Run `main` in this process, with its own handling of errors; for what needs no process of its own."""
    from unittest.mock import patch

    from dflash_cli import main as module
    from dflash_cli.main import main

    out, err = StringIO(), StringIO()
    code, errors = 0, list[DFlashError]()
    report = module._report

    def record(error: DFlashError) -> None:
        errors.append(error)
        report(error)

    with (
        recorded_notices() as notices,
        patch.object(module, "_report", record),
        patch.object(sys, "argv", ["dflash", *map(str, args)]),
        patch.object(sys, "stdin", TextIOWrapper(BytesIO())),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    check_printed(out.getvalue())
    return Outcome(code, out.getvalue(), err.getvalue(), errors[-1] if errors else None, tuple(notices))


def launch(*args: object, env: Mapping[str, str] | None = None) -> Outcome:
    """Run the command line as a user does, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "dflash_cli", *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, **IMPORT_PATHS, "NO_COLOR": "1", **(env or {})},
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
