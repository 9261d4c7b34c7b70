"""Files that are read: an error of the system names the file, and never an output that is written meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dflash_runtime.errors import CheckpointError, out_of_memory, unreadable
from dflash_runtime.whole_files import NotWritten


@contextmanager
def reading(file: Path) -> Iterator[BinaryIO]:
    """Open a file, and name it if the system refuses to open or to read it in the block.

    Raises:
        FileUnreadable: the system does not give the file.
        CapacityError: out of memory.
        NotWritten: the block writes another file, and the system refuses.
    """
    try:
        with file.open("rb") as stream:
            yield stream
    except NotWritten:
        raise
    except OSError as error:
        raise unreadable(file, error) from error


def read_all(file: Path) -> bytes:
    """Return the bytes of a file; see `reading` for errors."""
    with reading(file) as stream:
        return stream.read()


def read_range(file: Path, begin: int, end: int, what: str) -> bytes:
    """Return the bytes [begin, end) of a file, which hold `what`.

    Raises:
        CheckpointError: the file has become shorter.
        FileUnreadable, CapacityError: see `reading`.
    """
    with reading(file) as stream:
        stream.seek(begin)
        data = stream.read(end - begin)
    if len(data) < end - begin:
        raise CheckpointError(f"ended while {what} was read", id="source-shrank", path=file, field=what)
    return data


@contextmanager
def open_tensors(file: Path, device: str = "cpu") -> Iterator[Any]:
    """Map a safetensors file into memory, to read its tensors to a device.

    Raises:
        CheckpointError: the file is malformed.
        FileUnreadable, CapacityError: see `reading`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device=device) as reader:
            yield reader
    except SafetensorError as error:
        raise CheckpointError(str(error), id="safetensors-unreadable", path=file) from error
    except OSError as error:
        raise unreadable(file, error) from error
    except MemoryError as error:
        raise out_of_memory(file) from error
