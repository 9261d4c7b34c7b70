"""Commands in this process whose errors are raised, so that a test can read their fields."""

from typing import Any

from typer.testing import CliRunner

from dflash_cli.main import app


def run_or_raise(*arguments: object, stdin: str | None = None) -> Any:
    """The result of a command, with `stdout`, `stderr` and `exit_code`."""
    result = CliRunner().invoke(app, [*map(str, arguments)], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
