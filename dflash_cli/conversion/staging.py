"""A directory that appears whole or not at all: written under a hidden name beside it, and renamed into its place.

`.NAME.tmp-*` is what is being written, `.NAME.old-*` what stood at NAME and is about to be removed. A run that was
killed leaves them; the next one to the same destination finds and names them.
"""

import ctypes
import errno
import fcntl
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_cli.conversion.destination import check_destination, refuse_foreign, remove_checkpoint
from dflash_runtime.errors import CapacityError, UsageError
from dflash_runtime.whole_files import hidden_path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that say that there is no room: on the disk, for the user, or in one file."""

UNWRITABLE = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EBUSY, errno.EXDEV, errno.ENAMETOOLONG, errno.ENOENT,
        errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EMLINK,
    }
)  # fmt: skip
"""Error numbers by which a file system says that it cannot be written here."""

MARKER = ".writing"
"""In a directory that is being written, from when its lock is held until it is whole."""

AT_FDCWD = -100
RENAME_NOREPLACE = 1
NOT_SUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


@contextmanager
def staged(destination: Path, num_bytes: int, *, largest_file_bytes: int = 0, force: bool = False) -> Iterator[Path]:
    """A hidden directory beside the destination, renamed to it on success and removed on anything else.

    Without `force` nothing that stands at the destination, or appears there meanwhile, is replaced.

    Raises:
        CapacityError: less room than is needed, on the disk or in one file.
        UsageError: the folder cannot be written, or something is at the destination that may not be replaced.
    """
    check_destination(destination, force=force)
    parent = destination.absolute().parent
    try:
        _check_room(parent, num_bytes, largest_file_bytes)
        stage = hidden_path(destination.absolute(), "tmp")
        stage.mkdir()
    except OSError as error:
        raise _explained(error, parent) from error
    try:
        with _marked(stage):
            yield stage
        _place(stage, destination, force=force)
    except OSError as error:
        if error.errno not in FULL | UNWRITABLE:
            raise
        raise _explained(error, parent) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def clear_remains(destination: Path, *, is_dry: bool = False) -> list[str]:
    """What earlier runs to a destination have left, a sentence each.

    What a run was writing is removed where that run is certainly dead: it had locked the directory, which ends with
    its process, and nobody holds the lock now. Everything else is only named, and so is everything if `is_dry`.
    """
    parent = destination.absolute().parent
    pattern = re.compile(rf"\.{re.escape(destination.name)}\.(tmp|old)-[0-9a-f]{{8}}")
    if not parent.is_dir():
        return []
    found = sorted(item for item in parent.iterdir() if pattern.fullmatch(item.name) and item.is_dir())
    return [_clear(item, destination, is_dry=is_dry) for item in found]


def move_new(source: Path, destination: Path) -> None:
    """Rename a directory to a name that nothing has.

    Raises:
        FileExistsError: something has it.
        OSError: the system refuses.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        names = os.fsencode(source), os.fsencode(destination)
        if rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in NOT_SUPPORTED:
            raise OSError(number, os.strerror(number), str(destination))
    if os.path.lexists(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    try:
        source.rename(destination)  # which replaces nothing that appears in between but an empty directory
    except (FileExistsError, NotADirectoryError) as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination)) from error
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination)) from error


def _place(stage: Path, destination: Path, *, force: bool) -> None:
    """Rename the stage to the destination; what stands there, and may be replaced, is put back if that fails.

    At every moment the old checkpoint or the new one is whole: at the destination, or beside it under the hidden name
    that ends what stands here.

    | after           | destination | `.NAME.old-*` | `.NAME.tmp-*` |
    |-----------------|-------------|---------------|---------------|
    | moving aside    | -           | old           | new           |
    | renaming        | new         | old           | -             |
    | removing        | new         | -             | -             |
    """
    aside = hidden_path(destination.absolute(), "old")
    try:
        if force and os.path.lexists(destination):
            move_new(destination, aside)
            refuse_foreign(aside, destination)  # what stands there may be another than the one that was looked at
        move_new(stage, destination)
    except BaseException as error:
        if os.path.lexists(aside) and stage.exists():
            move_new(aside, destination)
        if isinstance(error, FileExistsError):
            raise UsageError(
                f"{destination}: appeared while the conversion ran, and is left as it is",
                hint="name another directory, or remove it and convert again",
            ) from error
        raise
    if os.path.lexists(aside):
        remove_checkpoint(aside)


def _check_room(parent: Path, num_bytes: int, largest_file_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise CapacityError(f"{parent}: {free} bytes free, {num_bytes} needed")
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and largest_file_bytes > limit:
        raise CapacityError(
            f"{parent}: the largest file takes {largest_file_bytes} bytes, and a file may have {limit} here",
            hint="raise the limit (ulimit -f), or pass --max-shard-size",
        )


def _explained(error: OSError, parent: Path) -> CapacityError | UsageError:
    """What the system says, in one line."""
    if error.errno == errno.EFBIG:
        return CapacityError(
            f"{parent}: a file has reached the limit on its size; nothing was left behind",
            hint="raise the limit (ulimit -f), or pass --max-shard-size",
        )
    if error.errno in FULL:
        return CapacityError(f"{parent}: the disk is full; nothing was left behind")
    where = f" ({error.filename})" if error.filename is not None else ""
    return UsageError(f"{parent}: cannot be written: {error.strerror}{where}")


@contextmanager
def _marked(stage: Path) -> Iterator[None]:
    """Hold the lock of a directory while it is written; where the file system has no locks there is no marker."""
    handle = os.open(stage, os.O_RDONLY)
    try:
        if _lock(handle):
            (stage / MARKER).touch()
        yield
        (stage / MARKER).unlink(missing_ok=True)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _clear(item: Path, destination: Path, *, is_dry: bool) -> str:
    """One remain: removed or named."""
    if ".old-" in item.name.removeprefix(f".{destination.name}"):
        if os.path.lexists(destination):
            return f"{item} is what stood at {destination} before a conversion replaced it and was killed: remove it"
        return f"{item} is what stood at {destination} before a conversion was killed: mv {item} {destination}"
    handle = os.open(item, os.O_RDONLY)
    try:
        if not _lock(handle):
            return f"another conversion to {destination} is running; it writes {item}"
        if not (item / MARKER).exists():
            return f"{item} is left from a conversion that was killed: remove it if no other is running"
        if is_dry:
            return f"{item} is left from a conversion that was killed; the next one removes it"
        try:
            remove_checkpoint(item, more=frozenset({MARKER}))
        except OSError:
            return f"{item} is left from a conversion that was killed: remove it"
        return f"removed {item}, left from a conversion that was killed"
    finally:
        os.close(handle)
