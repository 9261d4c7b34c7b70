"""A folder of hand-offs: read from headers, without torch, and emptied."""

import shutil
from pathlib import Path

from dflash_runtime.errors import InvalidHandoff, naming_file
from dflash_runtime.kv_transfer.handoff import HandoffHeader
from dflash_runtime.kv_transfer.handoff_folders import HEADER, list_handoffs
from dflash_runtime.kv_transfer.handoff_headers import check_tensors, read_handoff_header


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


def read_waiting(place: str) -> tuple[HandoffHeader, ...]:
    """The header of every hand-off in a folder, in the order of the keys. Loading reads the tensors' content.

    Raises:
        UsageError: the folder does not contain hand-offs.
        InvalidHandoff: a header is malformed, or the file of tensors differs from it.
    """
    folder = Path(place)
    return tuple(_read(folder / key) for key in list_handoffs(folder))


def _read(path: Path) -> HandoffHeader:
    header = read_handoff_header(path)
    handoff = header.handoff
    with naming_file(path / HEADER):
        if handoff.key != path.name:
            raise InvalidHandoff(field="key", found=handoff.key, expected=f"the folder's name, {path.name!r}")
        if not handoff.prompt_token_ids:
            raise InvalidHandoff(field="prompt_token_ids", found=[], expected="one token or more")
    check_tensors(path, header.tensors)
    return header
