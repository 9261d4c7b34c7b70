"""The manifest of a conversion, `conversion.json`, and the documents of `dflash convert --json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from dflash_cli.checkpoints.checkpoint_identity import TargetFingerprint, name_and_commit, target_fingerprint
from dflash_cli.conversion.changes import Change
from dflash_cli.conversion.logits import LogitComparison
from dflash_cli.conversion.spec import Verification
from dflash_cli.terminal.shown import Shown
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.documents import INLINE, OPTIONAL


@dataclass(frozen=True, slots=True)
class Origin:
    """The name of a checkpoint without a path of the machine, and its repository and commit on the hub."""

    name: str | None
    repo: str | None = None
    commit: str | None = None

    @classmethod
    def of(cls, path: Path) -> "Origin":
        """The origin of a checkpoint in the hub's cache, else the name of its directory."""
        name, commit = name_and_commit(path)
        return cls(name=name, repo=None if commit is None else name, commit=commit)


@dataclass(frozen=True, slots=True)
class TargetOrigin:
    """The origin of the target, and its fingerprint."""

    origin: Annotated[Origin, INLINE]
    fingerprint: TargetFingerprint

    @classmethod
    def of(cls, target: TargetSource) -> "TargetOrigin":
        return cls(Origin.of(target.checkpoint.path), target_fingerprint(target))


@dataclass(frozen=True, slots=True)
class HashedFile:
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HashedWeights:
    """Weight files of the source and the result, by file name."""

    source: Mapping[str, HashedFile]
    result: Mapping[str, HashedFile]


@dataclass(frozen=True, slots=True)
class HashedConfigs:
    """`config.json` of the source and the result."""

    source: HashedFile
    result: HashedFile


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConversionFacts(Shown):
    """The part of a manifest that is known before anything is written."""

    tool: Literal["dflash"] = "dflash"
    version: str
    source: Origin
    target: TargetOrigin | None
    argv: tuple[str, ...]
    date: str
    source_dialect: str
    destination_dialect: str
    num_bytes: Annotated[int, "of the result's weights"]
    warnings: tuple[str, ...]
    config: Annotated[tuple[Change, ...], "the change of each config key"]
    tensors: Annotated[tuple[Change, ...], "the change of each tensor"]
    files: Annotated[tuple[Change, ...], "the change of each other file"]

    def summary(self) -> list[str]:
        dialects = f"{self.source_dialect} -> {self.destination_dialect}"
        return [f"{dialects}: {self.num_bytes} bytes of weights", *self.warnings]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DryRun(ConversionFacts):
    """Result of `dflash convert --dry-run`."""

    KIND: ClassVar[str] = "convert"

    dry_run: Literal[True] = True


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Manifest(ConversionFacts):
    """`conversion.json` beside a converted draft."""

    KIND: ClassVar[str] = "conversion"

    verified: Verification
    logits: Annotated[LogitComparison | None, OPTIONAL] = None
    weights: HashedWeights
    configs: HashedConfigs
    timings: Annotated[Mapping[str, float], "seconds by stage"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Converted(Manifest):
    """Result of `dflash convert`."""

    KIND: ClassVar[str] = "convert"

    destination: str


def without_paths(argv: Sequence[str]) -> list[str]:
    """Arguments of a command. Absolute paths are cut to their last part."""
    return [_without_path(item) for item in argv]


def _without_path(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_without_path(value)}"
    return Path(argument).name if argument.startswith(("/", "~")) else argument
