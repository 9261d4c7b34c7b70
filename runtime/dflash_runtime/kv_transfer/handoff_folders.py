"""The files of folders with hand-offs, listed and read as far as this needs no torch."""

from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.stored.strict_json import read_json
from dflash_runtime.errors import CheckpointError, InvalidHandoff, UsageError
from dflash_runtime.kv_transfer.transfer_outputs import reason_of

HEADER, TENSORS = "handoff.json", "kv.safetensors"

HASHES = {32: "md5", 64: "sha256"}
"""Hash by the length of the name of vLLM's folders. vLLM uses sha256 on machines where FIPS forbids md5."""


def list_handoffs(folder: Path) -> list[str]:
    """The keys of the complete hand-offs in a folder, in order.

    Raises:
        UsageError: the folder does not exist, or lacks hand-offs.
    """
    if not folder.is_dir():
        raise UsageError("no such directory, expected one with hand-offs", id="no-handoff-folder", path=folder)
    keys = sorted(item.name for item in folder.iterdir() if not item.name.startswith(".") and (item / HEADER).is_file())
    if not keys:
        hint = "dflash generate --handoff-out writes them"
        raise UsageError("no hand-offs in it", id="no-handoffs", path=folder, hint=hint)
    return keys


def header_document(path: Path) -> dict[str, Any]:
    """The JSON document of the hand-off in a folder.

    Raises:
        InvalidHandoff: the file cannot be read or is not JSON.
    """
    file = path / HEADER
    try:
        document = read_json(file)
    except OSError as error:
        raise unreadable_handoff(file, error) from error
    except CheckpointError as error:
        text = error.message.removeprefix(f"{file}: ")
        raise InvalidHandoff(text, id="malformed-header", path=file, hint=error.hint) from error
    return document


def unreadable_handoff(path: Path, error: Exception) -> InvalidHandoff:
    """The error for a file or folder of a hand-off that cannot be read."""
    return InvalidHandoff(f"cannot be read: {reason_of(error)}", id="unreadable-handoff", path=path)


def has_vllm_prefills(folder: Path) -> bool:
    """Whether vLLM's ExampleConnector has written to a folder."""
    return bool(prefill_folders(folder))


def prefill_folders(folder: Path) -> dict[str, Path]:
    """The prefill folders by name: named by a hash, with at least one layer file."""
    if not folder.is_dir():
        return {}
    return {
        item.name: item
        for item in folder.iterdir()
        if len(item.name) in HASHES and set(item.name) <= set("0123456789abcdef") and any(item.glob("*.safetensors"))
    }
