"""`dflash lock`: pin a draft and its target by revision and hash."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ForceOptions, PairOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Option
from dflash_cli.terminal.progress import working
from dflash_cli.terminal.requests import verb
from dflash_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_cli.checkpoints.lock import LockDocument
    from dflash_cli.checkpoints.references import Location


@dataclass(frozen=True, kw_only=True)
class LockRequest(ForceOptions, PairOptions):
    """Pin a draft and its target by revision and SHA-256, for --lock of other commands.

    Reads every byte of the weights; hub repositories are downloaded.
    """

    output: Annotated[
        Path,
        Option(
            is_per_run=True,
            short="-o",
            metavar="FILE",
            group=ESSENTIALS,
            is_setting=False,
            help="File to write the lock to.",
        ),
    ] = Path("dflash.lock")


@verb(LockRequest)
def lock(request: LockRequest) -> "LockDocument":
    """Hash a pair and write the lock.

    Raises:
        CheckpointNotFound: the draft or the target is absent.
        UsageError: the output exists.
    """
    from dflash_cli.checkpoints.lock import LockDocument, lock_checkpoint
    from dflash_cli.checkpoints.pair_references import complete_pair
    from dflash_cli.checkpoints.references import fetch_directory
    from dflash_cli.documents.atomic_file import atomic_text, check_output

    check_output(request.output, force=request.force)
    pair = complete_pair(request.draft, request.target, find=fetch_directory)
    assert pair.draft_location is not None
    if pair.note is not None:
        console.note(pair.note)
    places = {"draft": (pair.draft_location, pair.draft), "target": (pair.find_target(fetch_directory), pair.target)}
    with working("hashing"):
        locked = {role: lock_checkpoint(path, reference or "") for role, (path, reference) in places.items()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    document = LockDocument(dflash=__version__, date=date, draft=locked["draft"], target=locked["target"])
    with atomic_text(request.output) as stream:
        stream.write(console.json_document(document, indent=2) + "\n")
    return document


def check_lock(path: Path | None, locations: "Mapping[str, Location | None]") -> str | None:
    """Require that the checkpoints by role are the locked ones. Returns the SHA-256 of the lock file.

    Raises:
        CheckpointNotFound, UsageError: the lock file is absent or malformed.
        GateFailed: a checkpoint differs from the lock.
    """
    if path is None:
        return None
    from dflash_cli.checkpoints.lock import read_lock

    found = read_lock(path)
    with working("hashing"):
        found.check({role: item for role, item in locations.items() if item is not None})
    return found.sha256


def command(request: LockRequest) -> None:
    """Write the lock and print its entries."""
    found = lock(request)
    console.show(found, lambda: console.result(*found.summary(), str(request.output)))
