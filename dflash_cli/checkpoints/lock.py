"""A lock: by revision and hash, which draft and which target were meant, so that a later run is of those or of none.

A digest of large weights samples them (`checkpoint_identity.py`); a lock reads every byte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.checkpoint_identity import name_and_commit
from dflash_cli.checkpoints.references import Location
from dflash_runtime.checkpoint.digests import deciding_files, hash_file
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.strict_json import parse_json
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, GateFailed, UsageError

SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedCheckpoint:
    """Name, commit where it is of the hub, and the SHA-256 of each file that decides a result."""

    name: str
    commit: str | None
    sha256: Mapping[str, str]


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


def to_json(checkpoints: Mapping[str, LockedCheckpoint]) -> dict[str, Any]:
    """Checkpoints by role, for a lock file."""
    return {role: asdict(item) for role, item in checkpoints.items()}


def read_lock(path: Path) -> Lock:
    """Read what `dflash lock` wrote.

    Raises:
        CheckpointNotFound: no such file; UsageError: it is no lock.
    """
    if not path.is_file():
        raise CheckpointNotFound(f"{path}: no such file", hint="write it with dflash lock DRAFT --target TARGET")
    data = path.read_bytes()
    try:
        document = parse_json(data, path)
        if document.get("kind") != "lock":
            raise UsageError(f"{path}: kind: found {document.get('kind')!r}, expected 'lock'")
        roles: dict[str, LockedCheckpoint] = {
            role: _read_entry(document[role]) for role in ("draft", "target") if role in document
        }
    except (CheckpointError, TypeError) as error:
        raise UsageError(f"{path}: is no lock file of this version: {error}") from error
    return Lock(path=path, sha256=hash_file(path), checkpoints=roles)


def _read_entry(entry: Any) -> LockedCheckpoint:
    """A checkpoint of a lock file; a TypeError where it is none."""
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), dict):
        raise TypeError("no checkpoint")
    return LockedCheckpoint(**entry)


def _differences(locked: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*locked, *found}):
        was, is_now = locked.get(name), found.get(name)
        if was != is_now:
            yield f"{name}: found {_short(is_now)}, expected {_short(was)}"


def _short(digest: str | None) -> str:
    return f"sha256 {digest[:SHOWN_DIGITS]}..." if digest is not None else "no such file"
