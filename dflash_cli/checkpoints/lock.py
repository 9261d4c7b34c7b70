"""Lock files, which pin a draft and a target by revision and hash. A run with a lock refuses other checkpoints.

A lock reads every byte. The digests of `checkpoint_identity.py` sample large weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from dflash_cli.checkpoints.checkpoint_identity import name_and_commit
from dflash_cli.checkpoints.references import Location
from dflash_cli.documents.reading import read_document, read_input
from dflash_cli.terminal.shown import Shown
from dflash_runtime.checkpoint.stored.digests import deciding_files, hash_file
from dflash_runtime.checkpoint.stored.gguf_checkpoint import open_stored
from dflash_runtime.errors import CheckpointNotFound, GateFailed
from dflash_runtime.phrases import plural

SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedCheckpoint:
    """A locked draft or target."""

    name: str
    commit: Annotated[str | None, "on the hub"]
    sha256: Annotated[Mapping[str, str], "of each file that decides a result"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LockDocument(Shown):
    """The content of a lock file: a draft and a target, each with its revision and hashes."""

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
    """A lock file that was read: its path, the SHA-256 of the file, and the locked checkpoints by role."""

    path: Path
    sha256: str
    checkpoints: Mapping[str, LockedCheckpoint]

    def check(self, locations: Mapping[str, Location]) -> None:
        """Require that checkpoints are the locked ones. Every byte of a checkpoint directory is read.

        Raises:
            GateFailed: names the first file with another hash, with both hashes, or the commit.
        """
        changes = [(role, text) for role, location in locations.items() for text in self._changes(role, location)]
        if changes:
            (role, text), num_more = changes[0], len(changes) - 1
            more = f"; {plural(num_more, 'more difference')}" if num_more else ""
            raise GateFailed(
                f"{role}: {text}{more}",
                id="not-the-locked-checkpoint",
                path=self.path,
                field=role,
                hint="pass the checkpoints that were locked, or write the lock again with dflash lock --force",
            )

    def _changes(self, role: str, location: Location) -> Iterator[str]:
        locked = self.checkpoints.get(role)
        if locked is None:
            yield "not locked"
        elif isinstance(location, Path):
            yield from _differences(locked.sha256, lock_checkpoint(location, locked.name).sha256)
        elif locked.commit != location.commit:
            yield f"commit {location.commit} of {location.repo}, expected {locked.commit or 'a local directory'}"


def lock_checkpoint(path: Path, reference: str) -> LockedCheckpoint:
    """The name, commit and hashes of a checkpoint in a directory. `reference` names it if it is bundled."""
    name, commit = name_and_commit(path, reference)
    return LockedCheckpoint(
        name=name, commit=commit, sha256={file.name: hash_file(file) for file in deciding_files(open_stored(path))}
    )


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        CheckpointNotFound: the file does not exist.
        UsageError: the file is not a lock.
    """
    if not path.exists():
        raise CheckpointNotFound(
            "no such file", id="no-lock", path=path, hint="write it with dflash lock DRAFT --target TARGET"
        )
    data = read_input(path)
    document = read_document(LockDocument, data, path, hint="write it again with dflash lock --force")
    return Lock(path=path, sha256=hash_file(path), checkpoints=document.checkpoints)


def _differences(locked: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*locked, *found}):
        if locked.get(name) != found.get(name):
            yield f"{name}: found {_short(found.get(name))}, expected {_short(locked.get(name))}"


def _short(digest: str | None) -> str:
    return f"sha256 {digest[:SHOWN_DIGITS]}..." if digest is not None else "no such file"
