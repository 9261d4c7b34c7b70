"""Write a directory under a hidden name beside its destination, and rename it when it is complete.

`.NAME.tmp-*` is the unfinished result, and `.NAME.old-*` the replaced checkpoint. A killed conversion leaves them. The
next conversion to the same destination finds and names them.
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

from dflash_cli.checkpoints.safetensors_writer import FULL
from dflash_cli.conversion.destination import check_destination, refuse_foreign, remove_checkpoint
from dflash_runtime.errors import CapacityError, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.whole_files import hidden_path, hidden_stem

MARKER = ".writing"
"""A file in an unfinished directory that its writer has locked. It is removed when the directory is complete."""

RAISE_LIMIT = "raise the limit (ulimit -f), or pass --max-shard-size"

AT_FDCWD = -100
RENAME_NOREPLACE = 1
NOT_SUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


@contextmanager
def staged(destination: Path, num_bytes: int, *, largest_file_bytes: int = 0, force: bool = False) -> Iterator[Path]:
    """A hidden directory beside the destination. It is renamed to the destination on success, and otherwise removed.

    Without `force` no destination is replaced, even one that appears while the block runs.

    Raises:
        CapacityError: the disk has not enough space, or the largest file exceeds the limit on files.
        UsageError: the folder cannot be written, or the destination may not be replaced.
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
        raise _explained(error, parent) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def clear_remains(destination: Path, *, is_dry: bool = False) -> list[Notice]:
    """Remove the unfinished results of killed conversions to a destination. Return a warning for each directory found.

    A marked directory without a lock is removed, because a lock ends with the process of its writer. Every other
    directory is only named. With `is_dry` nothing is removed.
    """
    parent = destination.absolute().parent
    pattern = re.compile(rf"{re.escape(hidden_stem(destination.name))}\.(tmp|old)-[0-9a-f]{{8}}")
    if not parent.is_dir():
        return []
    found = sorted(item for item in parent.iterdir() if pattern.fullmatch(item.name) and item.is_dir())
    return [_clear(item, destination, is_dry=is_dry) for item in found]


def move_new(source: Path, destination: Path) -> None:
    """Rename a directory to an unused name.

    Raises:
        FileExistsError: the name is used.
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
    taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    if os.path.lexists(destination):
        raise taken
    try:
        source.rename(destination)  # this could replace an empty directory that appears at this moment
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY):
            raise
        raise taken from error


def _place(stage: Path, destination: Path, *, force: bool) -> None:
    """Rename the stage to the destination. A replaced checkpoint is put back if that fails.

    At every moment the old or the new checkpoint is complete, at the destination or under a hidden name:

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
            refuse_foreign(aside, destination)  # another directory may have appeared since the first check
        move_new(stage, destination)
    except BaseException as error:
        if os.path.lexists(aside) and stage.exists():
            move_new(aside, destination)
        if isinstance(error, FileExistsError):
            raise UsageError(
                "appeared while the conversion ran, and is left as it is",
                id="destination-appeared",
                path=destination,
                hint="name another directory, or remove it and convert again",
            ) from error
        raise
    if os.path.lexists(aside):
        remove_checkpoint(aside)


def _check_room(parent: Path, num_bytes: int, largest_file_bytes: int) -> None:
    """Refuse a folder on a disk without enough space, or with a limit on files below the largest file."""
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        text = f"{free} bytes free, {num_bytes} needed"
        raise CapacityError(text, id="disk-full", path=parent, found=free, expected=f"{num_bytes} bytes")
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and largest_file_bytes > limit:
        text = f"the largest file needs {largest_file_bytes} bytes, but the limit on files is {limit} bytes"
        raise CapacityError(text, id="file-limit", path=parent, found=largest_file_bytes, hint=RAISE_LIMIT)


def _explained(error: OSError, parent: Path) -> CapacityError | UsageError:
    """An error of the system as our error."""
    if error.errno == errno.EFBIG:
        text = "a file has reached the limit on its size; nothing was left behind"
        return CapacityError(text, id="file-limit", path=parent, hint=RAISE_LIMIT)
    if error.errno in FULL:
        return CapacityError("the disk is full; nothing was left behind", id="disk-full", path=parent)
    if error.errno == errno.EIO:
        return CapacityError("the device does not read or write", id="device-fails", path=error.filename or parent)
    where = f" ({error.filename})" if error.filename is not None else ""
    return UsageError(f"cannot be written: {error.strerror}{where}", id="output-not-writable", path=parent)


@contextmanager
def _marked(stage: Path) -> Iterator[None]:
    """Lock and mark a directory in the block. It is not marked if the file system does not support locks."""
    handle = os.open(stage, os.O_RDONLY)
    try:
        if _lock(handle):
            (stage / MARKER).touch()
        yield
        (stage / MARKER).unlink(missing_ok=True)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock an open directory. False if another process has locked it, or the file system does not support locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _clear(item: Path, destination: Path, *, is_dry: bool) -> Notice:
    """Remove a directory that a killed conversion left, or only name it."""
    if ".old-" in item.name.removeprefix(hidden_stem(destination.name)):
        if os.path.lexists(destination):
            text = f"{item} is the previous {destination}; a conversion was killed before it removed it: remove it"
            return Notice(text, id="replaced-checkpoint-left")
        text = f"{item} is the previous {destination}; a conversion was killed: mv {item} {destination}"
        return Notice(text, id="replaced-checkpoint-aside")
    handle = os.open(item, os.O_RDONLY)
    left = f"{item} is left from a conversion that was killed"
    try:
        if not _lock(handle):
            return Notice(f"another conversion to {destination} is running; it writes {item}", id="conversion-running")
        if not (item / MARKER).exists():
            return Notice(f"{left}: remove it if no other conversion is running", id="unfinished-result-left")
        if is_dry:
            return Notice(f"{left}; the next conversion removes it", id="unfinished-result-left")
        try:
            remove_checkpoint(item, more=frozenset({MARKER}))
        except OSError:
            return Notice(f"{left}: remove it", id="unfinished-result-left")
        return Notice(f"removed {item}, left from a conversion that was killed", id="unfinished-result-removed")
    finally:
        os.close(handle)
