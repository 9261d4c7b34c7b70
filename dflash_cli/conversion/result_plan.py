"""A plan of a result: the files that will be written, and the change of each part of the source."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import WrittenTensor
from dflash_cli.conversion.changes import Change
from dflash_cli.conversion.manifest import ConversionFacts, Origin, TargetOrigin, without_paths
from dflash_cli.conversion.side_files import KindDraft, file_changes
from dflash_cli.conversion.spec import ConversionSpec
from dflash_cli.formats.dialect import Format, Json
from dflash_cli.terminal.environment import redacted
from dflash_cli.version import __version__
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.notices import Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPlan(ABC):
    """The files of a result, and the reasons. `files` has the tensors of each weight file."""

    draft: DraftCheckpoint | KindDraft
    spec: ConversionSpec
    format: Format
    config_json: Json
    files: Mapping[str, tuple[WrittenTensor, ...]]
    side_files: tuple[Path, ...]
    warnings: tuple[Notice, ...] = ()

    @property
    @abstractmethod
    def key_changes(self) -> Sequence[Change]:
        """The change of every config key."""

    @property
    @abstractmethod
    def tensor_changes(self) -> Sequence[Change]:
        """The change of every tensor, by its stored name."""

    @property
    def file_changes(self) -> Sequence[Change]:
        """The change of every file other than config and weights."""
        return tuple(file_changes(self.draft, self.side_files))

    @property
    def target(self) -> TargetSource | None:
        """The target that was given."""
        return self.spec.target

    @property
    def kept(self) -> tuple[WrittenTensor, ...]:
        """The tensors that will be written."""
        return tuple(tensor for tensors in self.files.values() for tensor in tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that will be written."""
        return sum(info.num_bytes for info in self.kept)

    @property
    def facts(self) -> ConversionFacts:
        """The part of the manifest that is known before anything is written."""
        return ConversionFacts(
            version=__version__,
            source=Origin.of(self.draft.checkpoint.path),
            target=None if self.target is None else TargetOrigin.of(self.target),
            argv=tuple(without_paths(redacted(self.spec.argv))),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            source_dialect=self.draft.format.name,
            destination_dialect=self.format.name,
            num_bytes=self.num_bytes,
            warnings=self.warnings,
            config=tuple(self.key_changes),
            tensors=tuple(self.tensor_changes),
            files=tuple(self.file_changes),
        )
