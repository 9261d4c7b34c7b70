"""Name the inputs of a conversion without paths of this machine."""

from collections.abc import Sequence
from pathlib import Path

from dflash_cli.checkpoints.checkpoint_identity import name_and_commit, target_fingerprint
from dflash_cli.conversion.manifest import Origin, TargetOrigin
from dflash_runtime.checkpoint.pair import TargetSource


def origin_of_target(target: TargetSource | None) -> TargetOrigin | None:
    """The origin of a target and its fingerprint, None without a target."""
    return None if target is None else TargetOrigin(name_of(target.checkpoint.path), target_fingerprint(target))


def name_of(path: Path) -> Origin:
    """The repository and commit of a checkpoint in the hub's cache, else the name of its directory."""
    name, commit = name_and_commit(path)
    return Origin(name=name, repo=None if commit is None else name, commit=commit)


def without_paths(argv: Sequence[str]) -> list[str]:
    """Arguments of a command. Absolute paths are cut to their last part."""
    return [_without_path(item) for item in argv]


def _without_path(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_without_path(value)}"
    return Path(argument).name if argument.startswith(("/", "~")) else argument
