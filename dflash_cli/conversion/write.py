"""Write a planned checkpoint into a directory that appears whole or not at all."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.safetensors_writer import write_tensors
from dflash_cli.conversion.byte_progress import Progress
from dflash_cli.conversion.plan import ConversionPlan
from dflash_cli.conversion.side_files import MANIFEST_FILE, SideFile, provenance
from dflash_cli.generation.atomic_file import check_output
from dflash_runtime.checkpoint.files import INDEX_FILE
from dflash_runtime.errors import CapacityError, UsageError

HASH_BYTES = 4 * 1024 * 1024


def check_destination(destination: Path, *, force: bool) -> None:
    """Refuse a destination before anything is read.

    Raises:
        UsageError: its parent folder is missing, it exists and is not to be replaced, or it is no checkpoint.
    """
    check_output(destination, force=force)
    if not os.path.lexists(destination):
        return
    is_checkpoint = destination.is_dir() and any(
        (destination / name).exists() for name in ("config.json", MANIFEST_FILE)
    )
    if not is_checkpoint and not (destination.is_dir() and not any(destination.iterdir())):
        raise UsageError(f"{destination}: is not a checkpoint, and --force replaces only checkpoints")


def protect_inputs(destination: Path, plan: ConversionPlan) -> None:
    """Refuse to replace what the conversion reads.

    Raises:
        UsageError: the destination is or holds the source or the target.
    """
    inputs = {"source": plan.draft.checkpoint} | ({"target": plan.target.checkpoint} if plan.target else {})
    for noun, checkpoint in inputs.items():
        if checkpoint.path.resolve().is_relative_to(destination.resolve()):
            raise UsageError(f"{destination}: is or contains the {noun}, which the conversion would delete")


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Turn a request to end into an interruption, so that what is half written is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def staged(destination: Path, num_bytes: int) -> Iterator[Path]:
    """A hidden directory beside the destination, renamed to it on success and removed on anything else.

    Raises:
        CapacityError: the disk has less room than is needed.
        UsageError: the parent folder is missing or cannot be written, or the destination has appeared meanwhile.
    """
    parent = destination.absolute().parent
    stage = parent / f".{destination.name}.tmp-{secrets.token_hex(4)}"
    try:
        free = shutil.disk_usage(parent).free
        if free < num_bytes:
            raise CapacityError(f"{parent}: {free} bytes are free, but {num_bytes} are needed")
        stage.mkdir()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(f"{parent}: cannot be written: {error.strerror}") from error
    try:
        yield stage
        _rename_to_destination(stage, destination)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"{parent}: the disk is full; nothing was left behind") from error
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_plan(plan: ConversionPlan, stage: Path, progress: Progress) -> None:
    """Write weights, side files and config; the config comes last."""
    total = plan.num_bytes
    for name, tensors in plan.files.items():
        write_tensors(stage / name, tensors, lambda count: progress("copy", count, total))
    if len(plan.files) > 1:
        weight_map = {info.name: name for name, tensors in plan.files.items() for info in tensors}
        write_json(stage / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for side_file in plan.side_files:
        _write_side_file(side_file, plan, stage / side_file.name)
    write_json(stage / "config.json", plan.config_json)


def _write_side_file(side_file: SideFile, plan: ConversionPlan, path: Path) -> None:
    if side_file.tensor is not None:
        write_tensors(path, [side_file.tensor], lambda count: None)
        return
    shutil.copyfile(side_file.source, path)
    if side_file.how == "card":
        with path.open("a", encoding="utf-8") as card:
            card.write(provenance(plan.draft, plan.format))


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON document for people and machines."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def hash_files(files: list[Path], progress: Progress) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file."""
    total = sum(file.stat().st_size for file in files)
    return {file.name: _hash(file, total, progress) for file in files}


def _hash(file: Path, total: int, progress: Progress) -> dict[str, Any]:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(HASH_BYTES):
            digest.update(piece)
            progress("hash", len(piece), total)
    return {"num_bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _rename_to_destination(stage: Path, destination: Path) -> None:
    """Rename the stage to the destination; what stands there, and may be replaced, is put back if that fails.

    At every moment the old checkpoint or the new one is whole: at the destination, or beside it under the hidden name
    that ends what stands here.

    | after           | destination | `.NAME.old-*` | `.NAME.tmp-*` |
    |-----------------|-------------|---------------|---------------|
    | moving aside    | -           | old           | new           |
    | renaming        | new         | old           | -             |
    | removing        | new         | -             | -             |
    """
    aside = None
    if os.path.lexists(destination):
        aside = stage.with_name(f".{destination.name}.old-{secrets.token_hex(4)}")
        destination.rename(aside)
    try:
        stage.rename(destination)
    except BaseException as error:
        if aside is not None:
            aside.rename(destination)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UsageError(f"{destination}: appeared while the conversion ran") from error
        raise
    if aside is not None:
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()
