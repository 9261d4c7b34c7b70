"""A folder of hand-offs: read from headers and file sizes, and emptied."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from dflash_runtime.checkpoint.strict_json import regular_size
from dflash_runtime.errors import CheckpointError, InvalidHandoff, naming_file
from dflash_runtime.kv_transfer.file_connector import read_header
from dflash_runtime.kv_transfer.handoff import Handoff, TensorSpec
from dflash_runtime.kv_transfer.handoff_folders import HEADER, TENSORS, list_handoffs
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, and ends with its last tensor."""


def empty_folder(place: str) -> None:
    """Remove the hand-offs and refusals in a folder. Other files stay."""
    folder = Path(place)
    for item in folder.iterdir() if folder.is_dir() else ():
        if item.is_symlink() and (item / HEADER).exists():
            item.unlink()  # the folder that it links to is not ours
        elif (item / HEADER).is_file():
            shutil.rmtree(item)
        elif item.name.endswith(".refused"):
            item.unlink()


def read_waiting(place: str) -> tuple[Handoff, ...]:
    """Every hand-off in a folder, in the order of the keys. Tensors have shapes only; loading reads their content.

    Raises:
        UsageError: the folder does not contain hand-offs.
        InvalidHandoff: a header is malformed, or the file of tensors has another size than the header states.
    """
    folder = Path(place)
    return tuple(_read(folder / key) for key in list_handoffs(folder))


def _read(path: Path) -> Handoff:
    header = read_header(path)
    with naming_file(path / HEADER):
        specs = header.tensors
        handoff = header.handoff.with_tensors({name: empty_like_spec(spec, "meta") for name, spec in specs.items()})
        if handoff.key != path.name:
            raise InvalidHandoff(field="key", found=handoff.key, expected=f"the folder's name, {path.name!r}")
        if not handoff.prompt_token_ids:
            raise InvalidHandoff(field="prompt_token_ids", found=[], expected="one token or more")
    _check_size(path / TENSORS, specs)
    return handoff


def _check_size(file: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Compare the size of a file with the tensors that its header lists."""
    if not specs:
        return
    try:
        found = regular_size(file)
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidHandoff(f"cannot be read: {reason}", id="unreadable-handoff", path=file) from error
    expected = LENGTH_BYTES + header_bytes + sum(spec.num_bytes for spec in specs.values())
    if found != expected:
        raise InvalidHandoff(
            id="truncated-handoff", path=file, field="size", found=found,
            expected=f"{expected} bytes, as {HEADER} says",
            hint="copy it again, or run its prompt again with --handoff-out",
        )  # fmt: skip
