"""Versions, devices and hub settings of this installation, and other packages that use the name `dflash`."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from dflash_cli.terminal.defaults import SetDefault
from dflash_cli.terminal.shown import Shown

DISTRIBUTION = "dflash-cli"
PACKAGES = ("torch", "transformers", "safetensors", "huggingface-hub", "triton", "accelerate", "typer", "rich")
SECRETS = ("TOKEN", "PASSWORD", "SECRET", "KEY")
REDACTED = "***"
SECRET_OPTION = re.compile(r"--?(?:[\w-]*[-_])?(?:token|password|secret|key)", re.IGNORECASE)
SECRET_TEXT = re.compile(r"\b(?:hf|sk|ghp|gho|nvapi)[_-][\w-]{16,}|(?<=://)[^/@\s]+(?=@)")
"""Tokens in the forms of hubs and APIs, and the user and password of a URL."""
NAMES = ("dflash", "dflash_cli", "dflash_runtime", "dflash_kernels")
INSTALLED = ("entry_points.txt", "RECORD", "installed-files.txt", "SOURCES.txt")
"""Files that list the scripts and modules of a distribution, in the order in which importlib.metadata reads them."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Environment(Shown):
    """This installation. Warnings name other packages whose `dflash` command may start instead."""

    KIND: ClassVar[str] = "env"

    interpreter: str
    python: str
    platform: str
    packages: dict[str, str | None]
    gpus: list[str] | None
    cache: str
    cache_bytes_free: int | None
    variables: dict[str, str]
    script: str | None
    defaults: tuple[SetDefault, ...] = ()
    warnings: list[str] = field(default_factory=list)

    def summary(self) -> list[str]:
        gpus = "unknown: nvidia-smi not found" if self.gpus is None else "; ".join(self.gpus) or "none"
        free = f", {self.cache_bytes_free / 2**30:.0f} GiB free" if self.cache_bytes_free is not None else ""
        rows = {
            "python": f"{self.python} ({self.interpreter}), {self.platform}",
            **{name: version or "not installed" for name, version in self.packages.items()},
            "gpu": gpus,
            "hub cache": f"{self.cache}{free}",
            **self.variables,
            "script": self.script or "dflash is not on PATH",
        }
        lines = [f"{name:16} {value}" for name, value in rows.items()]
        for item in self.defaults:
            value = json.dumps(item.value, ensure_ascii=False)
            lines.append(f"{'default':16} {item.option} = {value} ({item.origin}) for {', '.join(item.commands)}")
        return lines


def describe_environment(version: str, defaults: Sequence[SetDefault] = ()) -> Environment:
    """Describe this installation without slow imports and without the value of any secret."""
    cache = _cache()
    return Environment(
        interpreter=interpreter(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={DISTRIBUTION: version, **{name: _version(name) for name in PACKAGES}},
        gpus=_gpus(),
        cache=str(cache),
        cache_bytes_free=_free(cache),
        variables=_variables(),
        script=shutil.which("dflash"),
        defaults=tuple(defaults),
        warnings=find_conflicts(),
    )


def redacted(argv: Sequence[str]) -> list[str]:
    """The arguments of a command with secrets replaced, for a result."""
    found: list[str] = []
    for argument in argv:
        option, equals, value = argument.partition("=")
        if found and SECRET_OPTION.fullmatch(found[-1]):
            found.append(REDACTED)
        elif equals and value and SECRET_OPTION.fullmatch(option):
            found.append(f"{option}={REDACTED}")
        else:
            found.append(SECRET_TEXT.sub(REDACTED, argument))
    return found


def find_conflicts() -> list[str]:
    """Other distributions that own the `dflash` script or one of our modules."""
    found = []
    for distribution in metadata.distributions():
        if not any(NAMES[0] in (distribution.read_text(file) or "") for file in INSTALLED):
            continue  # to parse the lists of every package takes seconds
        name = distribution.metadata["Name"] or ""
        if name.lower().replace("_", "-") == DISTRIBUTION:
            continue
        scripts = [item.name for item in distribution.entry_points if item.group == "console_scripts"]
        modules = {Path(str(file)).parts[0] for file in distribution.files or ()}
        if "dflash" in scripts:
            found.append(f"{name} {distribution.version} also installs a script named dflash; use dflash-cli")
        for module in sorted(modules & set(NAMES[1:])):
            found.append(
                f"{name} {distribution.version} has a module named {module}, which may hide the one of dflash-cli"
            )
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str] | None:
    """Name, memory and driver of each GPU from nvidia-smi, which is faster than torch. None if it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else None


def _cache() -> Path:
    """The folder of the hub's downloads. Source: huggingface_hub/constants.py, which takes long to import."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(named)).expanduser()


OTHERS_SHOWN = ("CUDA_VISIBLE_DEVICES", "NO_COLOR", "FORCE_COLOR")
SET_BY_MAIN = ("TRANSFORMERS_VERBOSITY", "error")
"""The variable that `main` sets if the user has not set it. It says nothing about the machine."""


def _free(path: Path) -> int | None:
    there = next((item for item in (path, *path.parents) if item.exists()), None)
    return shutil.disk_usage(there).free if there is not None else None


def _variables() -> dict[str, str]:
    """Environment variables of the hub and of dflash. The value of a secret is `set` or `empty`."""
    shown = {}
    for name, value in sorted(os.environ.items()):
        is_shown = name.startswith(("HF_", "DFLASH_", "HUGGING_FACE_", "TRANSFORMERS_")) or name in OTHERS_SHOWN
        if not is_shown or (name, value) == SET_BY_MAIN:
            continue
        is_secret = any(part in name for part in SECRETS) and not name.endswith("_PATH")
        shown[name] = ("set" if value else "empty") if is_secret else value
    shown.setdefault("HF_TOKEN", "not set")
    return shown


def interpreter() -> str:
    """The path of the running Python."""
    return sys.executable
