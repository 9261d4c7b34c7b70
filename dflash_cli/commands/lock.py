"""`dflash lock`: pin a draft and its target by revision and hash."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dflash_cli.terminal import console
from dflash_cli.terminal.options import DRAFT_HELP, ForceOptions, TargetOptions
from dflash_cli.terminal.requests import ESSENTIALS, Argument, Option, verb
from dflash_cli.version import __version__

if TYPE_CHECKING:
    from dflash_cli.checkpoints.lock import LockedCheckpoint


@dataclass(frozen=True, kw_only=True)
class LockRequest(ForceOptions, TargetOptions):
    """Pin a draft and its target by revision and SHA-256, for --lock of other commands.

    Reads every byte of the weights; hub repositories are downloaded.
    """

    draft: Annotated[
        str | None, Argument(flag="--draft", short="-d", metavar="DRAFT", help=f"{DRAFT_HELP} Default: tiny.")
    ] = None
    output: Annotated[
        Path,
        Option(short="-o", metavar="FILE", group=ESSENTIALS, is_setting=False, help="File to write the lock to."),
    ] = Path("dflash.lock")


@dataclass(frozen=True, kw_only=True)
class WrittenLock:
    """The pinned checkpoints by role, and the document that the file holds."""

    locked: "dict[str, LockedCheckpoint]"
    document: dict[str, Any]

    def __repr__(self) -> str:
        return "Lock(" + ", ".join(f"{role} {item.name}" for role, item in self.locked.items()) + ")"


@verb(LockRequest)
def lock(request: LockRequest) -> WrittenLock:
    """Hash a pair and write the lock.

    Raises:
        CheckpointNotFound: the draft or the target is absent.
        UsageError: the output exists.
    """
    from dflash_cli.checkpoints.lock import lock_checkpoint, to_json
    from dflash_cli.checkpoints.pair_references import complete_pair
    from dflash_cli.checkpoints.references import fetch_directory
    from dflash_cli.documents.atomic_file import atomic_text, check_output

    check_output(request.output, force=request.force)
    pair = complete_pair(request.draft, request.target, find=fetch_directory)
    assert pair.draft_location is not None
    if pair.note is not None:
        console.note(pair.note)
    places = {"draft": (pair.draft_location, pair.draft), "target": (pair.find_target(fetch_directory), pair.target)}
    with console.working("hashing"):
        locked = {role: lock_checkpoint(path, reference or "") for role, (path, reference) in places.items()}
    document: dict[str, Any] = {
        "dflash": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **to_json(locked),
    }
    with atomic_text(request.output) as stream:
        stream.write(console.json_document(document, indent=2, kind="lock") + "\n")
    return WrittenLock(locked=locked, document=document)


def command(request: LockRequest) -> None:
    """Write the lock and print its entries."""
    found = lock(request)
    if console.is_json():
        console.result_json(found.document)
        return
    for role, item in found.locked.items():
        where = f"commit {item.commit}" if item.commit is not None else "no commit"
        console.result(f"{role:7} {item.name}: {where}, {len(item.sha256)} files")
    console.result(str(request.output))
