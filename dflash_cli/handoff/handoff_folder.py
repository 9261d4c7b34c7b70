"""A folder of hand-offs: whether one may be written, and what waits in it, known from headers and sizes of files."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from dflash_cli.documents.atomic_file import check_output
from dflash_runtime.errors import CheckpointNotFound, InvalidHandoff, UsageError
from dflash_runtime.kv_transfer.file_connector import HEADER, TENSORS, list_handoffs, read_header
from dflash_runtime.kv_transfer.handoff import Handoff, TensorSpec, tensor_specs
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec

LENGTH_BYTES = 8
"""A file of safetensors begins with the length of its own header, and ends with the last tensor."""


def check_folder(place: str, *, force: bool) -> None:
    """Refuse a folder that hand-offs may not be written to: one that has something in it, without `force`.

    Raises:
        UsageError: the same, its parent does not exist, or it is a file.
    """
    folder = Path(place)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file, expected a folder, new or empty")
    check_output(folder, force=force or (folder.is_dir() and not any(folder.iterdir())))


def empty_folder(place: str) -> None:
    """Remove the hand-offs that lie in a folder; whatever else is in it stays."""
    folder = Path(place)
    for item in folder.iterdir() if folder.is_dir() else ():
        if (item / HEADER).is_file():
            shutil.rmtree(item)
        elif item.name.endswith(".refused"):
            item.unlink()


def read_waiting(place: str) -> tuple[Handoff, ...]:
    """Every hand-off in a folder, in order. Their tensors have shapes and no content, which is read when it is loaded.

    Raises:
        CheckpointNotFound: there is no such folder.
        UsageError: no hand-off is in it.
        InvalidHandoff: one is malformed, or its tensors' file is not as long as its header says.
    """
    folder = Path(place)
    if not folder.exists():
        raise CheckpointNotFound(f"{folder}: no such directory", hint="dflash generate --handoff-out writes one")
    return tuple(_read(folder / key) for key in list_handoffs(folder))


def _read(path: Path) -> Handoff:
    header = read_header(path)
    try:
        specs = tensor_specs(header)
        handoff = Handoff.read(header, {name: empty_like_spec(spec, "meta") for name, spec in specs.items()})
        if handoff.key != path.name:
            raise InvalidHandoff(f"key: found {handoff.key!r}, expected {path.name!r}")
        if not handoff.prompt_token_ids:
            raise InvalidHandoff("prompt_token_ids: empty, expected one token or more")
    except InvalidHandoff as error:
        raise InvalidHandoff(error.message, path=path / HEADER, hint=error.hint) from error
    _check_size(path / TENSORS, specs)
    return handoff


def _check_size(file: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Hold the length of a file against the tensors that its header announces."""
    if not specs:
        return
    try:
        with file.open("rb") as stream:
            own = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        found = file.stat().st_size
    except OSError as error:
        raise InvalidHandoff(f"cannot be read: {error.strerror or error}", path=file) from error
    expected = LENGTH_BYTES + own + sum(spec.num_bytes for spec in specs.values())
    if found != expected:
        raise InvalidHandoff(
            f"found {found} bytes, expected {expected}, as {HEADER} says",
            path=file,
            hint="it was cut short on its way; copy it again, or run its prompt again with --handoff-out",
        )
