"""The Typer app: one line a command, and the one place that turns errors into messages."""

import errno
import logging
import os
import sys
from typing import Annotated

import typer

from dflash_cli import __version__, console
from dflash_cli.commands import convert, env, eval_acceptance, explain, generate, inspect, serve_command, validate
from dflash_runtime.errors import CapacityError, DFlashError

app = typer.Typer(
    name="dflash",
    help="Convert, validate, run and measure DFlash speculative decoding drafts.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("generate", short_help="Complete prompts with a pair.")(generate.generate)
app.command("eval-acceptance", short_help="Measure how many tokens a step it gives.")(eval_acceptance.eval_acceptance)
app.command("validate", short_help="Check a draft, alone or with its target.", epilog=validate.EPILOG)(
    validate.validate
)
app.command("inspect", short_help="Describe a draft or a target, or compare two.", epilog=inspect.EPILOG)(
    inspect.inspect
)
app.command("explain", short_help="Explain a validation rule.", epilog=explain.EPILOG)(explain.explain)
for name in ("serve-command", "launch"):
    app.command(
        name, short_help="Print the command that serves a pair.", epilog=serve_command.EPILOG, hidden=name == "launch"
    )(serve_command.serve_command)
app.command("env", short_help="Show versions, GPUs and settings.")(env.env)
app.command("convert", short_help="Write a draft in another dialect.", epilog=convert.EPILOG)(convert.convert)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        console.result(f"dflash {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Convert, validate, run and measure DFlash speculative decoding drafts."""


def main() -> None:
    """Run the command line; every foreseen error becomes one line and its documented exit code."""
    # What a library logs is for programs; what a user should know, commands say through the console.
    logging.getLogger("dflash_runtime").addHandler(logging.NullHandler())
    try:
        app()
    except DFlashError as error:
        _stop(error)
    except KeyboardInterrupt:
        console.error("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of stdout has gone, which is how `| head` ends; Python would complain while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _stop(CapacityError(f"{error.filename or 'output'}: no space left on the device"))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _stop(CapacityError(str(error).splitlines()[0], hint="lower --max-num-requests or --max-model-len"))


def _stop(error: DFlashError) -> None:
    console.error(error.message, error.hint)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
