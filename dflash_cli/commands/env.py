"""`dflash env`: versions, devices and settings of this installation, for a bug report."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_cli.terminal import console
from dflash_cli.terminal.requests import Request, verb
from dflash_cli.version import __version__

if TYPE_CHECKING:
    from dflash_cli.terminal.environment import Environment


@dataclass(frozen=True, kw_only=True)
class EnvironmentRequest(Request):
    """Show versions, GPUs, hub settings and conflicts; never the value of a token."""


@verb(EnvironmentRequest)
def env(request: EnvironmentRequest) -> "Environment":
    """The versions, devices and settings of this installation."""
    from dflash_cli.terminal.environment import describe_environment

    return describe_environment(__version__)


def command(request: EnvironmentRequest) -> None:
    """Print the environment."""
    found = env(request)
    console.show(found, lambda: _print(found))
    for warning in found.warnings:
        console.warn(warning)


def _print(found: "Environment") -> None:
    free = f", {found.cache_bytes_free / 2**30:.0f} GiB free" if found.cache_bytes_free is not None else ""
    lines = {
        "python": f"{found.python} ({found.interpreter}), {found.platform}",
        **{name: version or "not installed" for name, version in found.packages.items()},
        "gpu": "unknown: nvidia-smi not found" if found.gpus is None else "; ".join(found.gpus) or "none",
        "hub cache": f"{found.cache}{free}",
        **found.variables,
        "script": found.script or "dflash is not on PATH",
    }
    for name, text in lines.items():
        console.result(f"{name:16} {text}")
