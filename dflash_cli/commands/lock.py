"""`dflash lock`: write down which draft and target are meant, by revision and hash."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ForceOption, JsonOption, OptionalDraftArg, TargetOption
from dflash_cli.version import __version__

OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the lock.")]


def lock(
    draft: OptionalDraftArg = None,
    target: TargetOption = None,
    output: OutputOption = Path("dflash.lock"),
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the revisions of a draft and its target and the SHA-256 of their files, for --lock of other commands.

    Every byte of the weights is read; what is on the hub is downloaded.
    """
    from dflash_cli.checkpoints.lock import lock_checkpoint, to_json
    from dflash_cli.checkpoints.pair_references import complete_pair
    from dflash_cli.checkpoints.references import fetch_directory
    from dflash_cli.documents.atomic_file import atomic_text, check_output

    check_output(output, force=force)
    pair = complete_pair(draft, target, find=fetch_directory)
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
    with atomic_text(output) as stream:
        stream.write(console.json_document(document, indent=2) + "\n")
    if as_json:
        console.result_json(document)
        return
    for role, item in locked.items():
        where = f"commit {item.commit}" if item.commit is not None else "no commit"
        console.result(f"{role:7} {item.name}: {where}, {len(item.sha256)} files")
    console.result(str(output))
