"""Hand-offs in a folder, read from their headers. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path

from dflash_runtime.checkpoint.stored.safetensors_header import read_header
from dflash_runtime.errors import MISSING, CheckpointError, InvalidHandoff, naming_file
from dflash_runtime.kv_transfer.handoff import HandoffHeader, TensorSpec
from dflash_runtime.kv_transfer.handoff_folders import HEADER, TENSORS, header_document

COPY_AGAIN = "copy it again, or run its prompt again with --handoff-out"


def read_handoff_header(path: Path) -> HandoffHeader:
    """The header of the hand-off in a folder.

    Raises:
        InvalidHandoff: the header cannot be read or is malformed.
        UnsupportedError: a later release wrote it.
    """
    document = header_document(path)
    with naming_file(path / HEADER):
        return HandoffHeader.read(document)


def check_tensors(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Compare the tensors in the folder of a hand-off with the tensors that its header lists.

    Raises:
        InvalidHandoff: the file cannot be read, is cut short, or has other tensors.
    """
    if not specs:
        return
    file = path / TENSORS
    try:
        found = read_header(file)
    except CheckpointError as error:
        text = error.message.removeprefix(f"{file}: ")
        raise InvalidHandoff(
            text, id="unreadable-handoff", path=file, field=error.field, found=error.found, expected=error.expected,
            hint=COPY_AGAIN,
        ) from error  # fmt: skip
    for name, spec in specs.items():
        info, expected = found.get(name), f"{spec.stored_dtype} {list(spec.shape)}, as {HEADER} says"
        if info is None:
            raise InvalidHandoff(
                id="missing-tensor", path=file, field=f"tensors.{name}", found=MISSING, expected=expected,
                hint=COPY_AGAIN,
            )  # fmt: skip
        if (info.dtype, info.shape) != (spec.stored_dtype, spec.shape):
            raise InvalidHandoff(
                id="misshapen-tensor", path=file, field=f"tensors.{name}", found=f"{info.dtype} {list(info.shape)}",
                expected=expected, hint=COPY_AGAIN,
            )  # fmt: skip
