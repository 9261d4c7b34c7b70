"""Where a conversion's inputs came from, in words that mean the same on another machine: no path of this one."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.checkpoint_identity import name_and_commit, target_fingerprint
from dflash_cli.conversion.request import ConversionSpec
from dflash_cli.terminal.environment import redacted


def describe_origin(source: Path, request: ConversionSpec) -> dict[str, Any]:
    """Source, target, command and date, for the manifest."""
    target = request.target
    return {
        "source": name_of(source),
        "target": target and {**name_of(target.checkpoint.path), "fingerprint": target_fingerprint(target).to_json()},
        "argv": without_paths(redacted(request.argv)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def name_of(path: Path) -> dict[str, str | None]:
    """A checkpoint's repository and commit if it is in the hub's cache, otherwise its directory's name."""
    name, commit = name_and_commit(path)
    return {"name": name, "repo": None if commit is None else name, "commit": commit}


def without_paths(argv: Sequence[str]) -> list[str]:
    """Arguments with absolute paths cut to their last part."""
    return [_without_path(item) for item in argv]


def _without_path(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_without_path(value)}"
    return Path(argument).name if argument.startswith(("/", "~")) else argument
