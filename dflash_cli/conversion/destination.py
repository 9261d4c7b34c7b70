"""Which directory a conversion may write or replace: nothing is ever removed that no conversion or checkpoint has."""

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from dflash_cli.conversion.plan import ConversionPlan
from dflash_cli.conversion.side_files import MANIFEST_FILE, MASK_PICKLE, PAPERS, SETTINGS, TOKENIZER
from dflash_cli.documents.atomic_file import check_output
from dflash_cli.formats.dialect import find_dialect
from dflash_runtime.checkpoint.files import MASK_FILE, Checkpoint, refuse_escape
from dflash_runtime.checkpoint.strict_json import read_json
from dflash_runtime.errors import DFlashError, UsageError

WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
CHECKPOINT_FILES = frozenset({"config.json", MANIFEST_FILE, MASK_PICKLE, MASK_FILE, ".gitattributes"})
CHECKPOINT_PATTERNS = (*PAPERS, *TOKENIZER, *SETTINGS)
MOST_LISTED = 5


def check_destination(destination: Path, *, force: bool) -> None:
    """Refuse a destination before anything is read.

    Raises:
        UsageError: its parent folder is missing, it exists and is not to be replaced, or it may not be replaced.
    """
    if destination.name == "..":
        raise UsageError(f"{destination}: ends in .., expected the directory's own name")
    check_output(destination, force=force)
    if not os.path.lexists(destination):
        return
    if destination.is_symlink():
        raise UsageError(f"{destination}: is a link, and --force replaces no links", hint="name the directory itself")
    if destination.is_dir():
        _refuse_held(destination)
    refuse_foreign(destination, destination)


def refuse_foreign(directory: Path, named: Path) -> None:
    """Refuse to remove what is no draft, or a draft with files beside it; `named` is what the message calls it.

    Raises:
        UsageError: naming the files.
    """
    if not directory.is_dir() or not (_is_marked(directory) or not any(directory.iterdir())):
        raise UsageError(f"{named}: is no draft, and --force replaces nothing else")
    foreign = sorted(foreign_files(directory))
    if foreign:
        rest = len(foreign) - MOST_LISTED
        listed = ", ".join(foreign[:MOST_LISTED]) + (f" and {rest} more" if rest > 0 else "")
        raise UsageError(
            f"{named}: holds {listed}, which no checkpoint has and --force would remove",
            hint="move them elsewhere, or name another directory",
        )


def foreign_files(directory: Path) -> Iterator[str]:
    """The names in a directory that neither a conversion nor a checkpoint has; a folder is one of them."""
    weights = _weight_names(directory)
    for item in directory.iterdir():
        is_known = item.name in CHECKPOINT_FILES or item.name in weights or WEIGHTS.fullmatch(item.name)
        if item.is_dir() or not (is_known or any(fnmatchcase(item.name, pattern) for pattern in CHECKPOINT_PATTERNS)):
            yield item.name


def remove_checkpoint(directory: Path, *, more: frozenset[str] = frozenset()) -> None:
    """Remove the files that a checkpoint has, and the directory if nothing else is in it.

    Raises:
        OSError: something else is in it, which stays.
    """
    foreign = set(foreign_files(directory)) - more
    for item in list(directory.iterdir()):
        if item.name not in foreign:
            item.unlink()
    directory.rmdir()


def protect_inputs(destination: Path, plan: ConversionPlan) -> None:
    """Refuse to replace what the conversion reads, and to write into its source.

    Raises:
        UsageError: the destination is or contains the source or the target, or lies in the source.
    """
    inputs = {"source": plan.draft.checkpoint} | ({"target": plan.target.checkpoint} if plan.target else {})
    for noun, checkpoint in inputs.items():
        places = {item.resolve().parent for item in (checkpoint.config_path, *checkpoint.weight_files)}
        if any(_holds(destination, place) for place in (checkpoint.path, *places)):
            raise UsageError(f"{destination}: is or contains the {noun}, which the conversion would delete")
    if _holds(plan.draft.checkpoint.path, destination):
        raise UsageError(f"{destination}: lies in the source, where readers would find two checkpoints")


def _holds(outer: Path, inner: Path) -> bool:
    """Whether one path is another or lies in it: by name, and by what the system says is the same directory."""
    resolved, home = inner.resolve(), outer.resolve()
    if resolved.is_relative_to(home):
        return True
    if not home.exists():
        return False
    return any(place.exists() and place.samefile(home) for place in (resolved, *resolved.parents))


def _refuse_held(directory: Path) -> None:
    """Refuse a directory that the system does not let anyone rename."""
    if Path.cwd().is_relative_to(directory.resolve()):
        raise UsageError(f"{directory}: is or contains the working directory, which cannot be replaced")
    if directory.is_mount():
        raise UsageError(
            f"{directory}: is a mount point, which cannot be replaced", hint=f"name a directory in it: {directory}/NAME"
        )


def _is_marked(directory: Path) -> bool:
    """Whether a manifest of ours or a config that some dialect recognises says that a directory is a draft."""
    manifest, config = (_read(directory, name) for name in (MANIFEST_FILE, "config.json"))
    return manifest.get("tool") == "dflash" or find_dialect(config, frozenset()) is not None


def _read(directory: Path, name: str) -> dict[str, object]:
    """A JSON object, or an empty one where there is none to read; links that lead outside are not followed."""
    try:
        refuse_escape(directory, directory / name)
        return read_json(directory / name)
    except DFlashError:
        return {}


def _weight_names(directory: Path) -> frozenset[str]:
    """The files that the checkpoint reads its weights from, whatever they are called."""
    try:
        return frozenset(file.name for file in Checkpoint(directory).weight_files)
    except (DFlashError, OSError):
        return frozenset()
