"""A lock: by revision and hash, which draft and which target were meant, so that a later run is of those or of none.

A digest of large weights samples them (`checkpoint_identity.py`); a lock reads every byte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from dflash_cli.checkpoints.checkpoint_identity import name_and_commit
from dflash_cli.checkpoints.references import Location
from dflash_cli.documents.reading import read_document
from dflash_cli.terminal.shown import Shown
from dflash_runtime.checkpoint.digests import deciding_files, hash_file
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.errors import CheckpointNotFound, GateFailed

SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedCheckpoint:
    """A locked draft or target."""

    name: str
    commit: Annotated[str | None, "on the hub"]
    sha256: Annotated[Mapping[str, str], "of each file that decides a result"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LockDocument(Shown):
    """A lock file: a draft and a target by revision and hash."""

    KIND: ClassVar[str] = "lock"

    dflash: Annotated[str, "release that wrote the lock"]
    date: str
    draft: LockedCheckpoint
    target: LockedCheckpoint

    @property
    def checkpoints(self) -> dict[str, LockedCheckpoint]:
        """The locked checkpoints by role."""
        return {"draft": self.draft, "target": self.target}

    def summary(self) -> list[str]:
        return [
            f"{role:7} {item.name}: {'no commit' if item.commit is None else f'commit {item.commit}'}, "
            f"{len(item.sha256)} files"
            for role, item in self.checkpoints.items()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """Checkpoints by role, as a lock file has them; `sha256` is that of the file itself."""

    path: Path
    sha256: str
    checkpoints: Mapping[str, LockedCheckpoint]

    def check(self, locations: Mapping[str, Location]) -> None:
        """Require that the checkpoints at these places are the locked ones; all of a directory's bytes are read.

        Raises:
            GateFailed: naming the file that is another one, with both hashes, or the commit.
        """
        moved = [f"{role}: {text}" for role, location in locations.items() for text in self._moved(role, location)]
        if moved:
            more = f"; {len(moved) - 1} more moved" if len(moved) > 1 else ""
            hint = "give the checkpoints that were locked, or write the lock anew with dflash lock --force"
            raise GateFailed(f"{self.path}: {moved[0]}{more}", hint=hint)

    def _moved(self, role: str, location: Location) -> Iterator[str]:
        locked = self.checkpoints.get(role)
        if locked is None:
            yield "not locked"
        elif isinstance(location, Path):
            yield from _differences(locked.sha256, lock_checkpoint(location, locked.name).sha256)
        elif locked.commit != location.commit:
            yield f"commit {location.commit} of {location.repo}, expected {locked.commit or 'a local directory'}"


def lock_checkpoint(path: Path, reference: str) -> LockedCheckpoint:
    """The lock of a checkpoint in a directory, as `reference` names it."""
    name, commit = name_and_commit(path, reference)
    return LockedCheckpoint(
        name=name, commit=commit, sha256={file.name: hash_file(file) for file in deciding_files(Checkpoint(path))}
    )


def read_lock(path: Path) -> Lock:
    """Read a file of `dflash lock`.

    Raises:
        CheckpointNotFound: the file does not exist.
        UsageError: the file is not a lock.
    """
    if not path.is_file():
        raise CheckpointNotFound(f"{path}: no such file", hint="write it with dflash lock DRAFT --target TARGET")
    data = path.read_bytes()
    document = read_document(LockDocument, data, path, hint="write it again with dflash lock --force")
    return Lock(path=path, sha256=hash_file(path), checkpoints=document.checkpoints)


def _differences(locked: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*locked, *found}):
        was, is_now = locked.get(name), found.get(name)
        if was != is_now:
            yield f"{name}: found {_short(is_now)}, expected {_short(was)}"


def _short(digest: str | None) -> str:
    return f"sha256 {digest[:SHOWN_DIGITS]}..." if digest is not None else "no such file"
