"""The manifest of a conversion, `conversion.json`, and the documents of `dflash convert --json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from dflash_cli.checkpoints.checkpoint_identity import TargetFingerprint
from dflash_cli.conversion.changes import Change
from dflash_cli.conversion.logits import LogitComparison
from dflash_cli.conversion.spec import Verification
from dflash_cli.terminal.shown import Shown
from dflash_runtime.documents import INLINE, OPTIONAL


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint came from, without a path of the machine."""

    name: str | None
    repo: str | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class TargetOrigin:
    """Where the target came from, and what tells it from other targets."""

    origin: Annotated[Origin, INLINE]
    fingerprint: TargetFingerprint


@dataclass(frozen=True, slots=True)
class HashedFile:
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HashedWeights:
    """Weight files on both sides, by file name."""

    source: Mapping[str, HashedFile]
    result: Mapping[str, HashedFile]


@dataclass(frozen=True, slots=True)
class HashedConfigs:
    """`config.json` on both sides."""

    source: HashedFile
    result: HashedFile


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConversionFacts(Shown):
    """Everything about a conversion that is known before anything is written."""

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
    config: Annotated[tuple[Change, ...], "what becomes of each config key"]
    tensors: Annotated[tuple[Change, ...], "what becomes of each tensor"]
    files: Annotated[tuple[Change, ...], "what becomes of each other file"]

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
