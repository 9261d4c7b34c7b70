"""Write a file or folder so that it appears under its name complete, or not at all."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from dflash_runtime.errors import CapacityError

_SWAP = threading.Lock()
"""Held while a folder replaces another one."""


@contextmanager
def written_whole(path: Path, what: str, *, id: str) -> Iterator[Path]:
    """Give a hidden path beside `path` to write to, and rename it to `path` when the block succeeds.

    An older file or folder at `path` is replaced. `what` and `id` name the content in errors.

    Raises:
        CapacityError: it cannot be written, for example because the disk is full. `path` stays unchanged.
    """
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    replaced = partial.with_name(f"{partial.name}-replaced")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with _SWAP:
            if path.is_dir():  # renamed in one piece, so that nobody reads half of it
                path.replace(replaced)
            partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise CapacityError(f"{what} not written: {reason_of(error)}", id=id, path=path) from error
    finally:
        for remains in (partial, replaced):
            _remove(remains)


def reason_of(error: Exception) -> str:
    """The system's reason if there is one: `No space left on device`."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _remove(path: Path) -> None:
    with suppress(OSError):  # which would hide the error of the block
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
