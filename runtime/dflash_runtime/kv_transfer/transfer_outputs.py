"""Files and folders of hand-offs: written complete, or not at all, with the error of a full disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dflash_runtime.errors import CapacityError
from dflash_runtime.whole_files import written_whole


@contextmanager
def transfer_output(path: Path, what: str, *, id: str) -> Iterator[Path]:
    """Give a hidden path beside `path` to write to, and rename it to `path` when the block succeeds.

    An older file or folder at `path` is replaced. `what` and `id` name the content in errors.

    Raises:
        CapacityError: it cannot be written, for example because the disk is full. `path` stays unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        reason = reason_of(error)
        raise CapacityError(f"{what} not written: {reason}", id=id, path=path, found=reason) from error


def reason_of(error: Exception) -> str:
    """The system's reason if there is one: `No space left on device`."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
