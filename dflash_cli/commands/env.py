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
    if console.is_json():
        console.result_json(found)
    else:
        console.result(f"{'python':16} {found.python} ({found.interpreter}), {found.platform}")
        for name, version in found.packages.items():
            console.result(f"{name:16} {version or 'not installed'}")
        gpus = "unknown: nvidia-smi not found" if found.gpus is None else "; ".join(found.gpus) or "none"
        console.result(f"{'gpu':16} {gpus}")
        free = f", {found.cache_bytes_free / 2**30:.0f} GiB free" if found.cache_bytes_free is not None else ""
        console.result(f"{'hub cache':16} {found.cache}{free}")
        for name, value in found.variables.items():
            console.result(f"{name:16} {value}")
        console.result(f"{'script':16} {found.script or 'dflash is not on PATH'}")
    for warning in found.warnings:
        console.warn(warning)
