"""`dflash env`: versions, devices and settings of this installation, for a bug report."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_cli.terminal import console
from dflash_cli.terminal.defaults import list_defaults
from dflash_cli.terminal.requests import Request, verb
from dflash_cli.version import __version__

if TYPE_CHECKING:
    from dflash_cli.terminal.environment import Environment


@dataclass(frozen=True, kw_only=True)
class EnvironmentRequest(Request):
    """Show versions, GPUs, hub settings and conflicts; never the value of a token."""


@verb(EnvironmentRequest)
def env(request: EnvironmentRequest) -> "Environment":
    """The versions, devices and settings of this installation.

    Raises:
        UsageError: a dflash.toml or a variable sets a wrong default.
    """
    from dflash_cli.terminal.command_line import all_commands, parameters_of_command
    from dflash_cli.terminal.environment import describe_environment

    return describe_environment(__version__, list_defaults(all_commands(), parameters_of_command))


def command(request: EnvironmentRequest) -> None:
    """Print the environment."""
    found = env(request)
    console.show(found, lambda: console.result(*found.summary()))
    for warning in found.warnings:
        console.warn(warning)
