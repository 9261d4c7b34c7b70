"""Where a conversion's inputs came from, in words that mean the same on another machine: no path of this one."""

from collections.abc import Sequence
from pathlib import Path

from dflash_cli.checkpoints.checkpoint_identity import name_and_commit, target_fingerprint
from dflash_cli.conversion.manifest import Origin, TargetOrigin
from dflash_runtime.checkpoint.pair import TargetSource


def origin_of_target(target: TargetSource | None) -> TargetOrigin | None:
    """Where a target came from, and its fingerprint."""
    return None if target is None else TargetOrigin(name_of(target.checkpoint.path), target_fingerprint(target))


def name_of(path: Path) -> Origin:
    """A checkpoint's repository and commit where the hub's cache holds it, otherwise its directory's name."""
    name, commit = name_and_commit(path)
    return Origin(name=name, repo=None if commit is None else name, commit=commit)


def without_paths(argv: Sequence[str]) -> list[str]:
    """Arguments with absolute paths cut to their last part."""
    return [_without_path(item) for item in argv]


def _without_path(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_without_path(value)}"
    return Path(argument).name if argument.startswith(("/", "~")) else argument
