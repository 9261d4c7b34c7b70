"""Check the destination of a conversion. --force removes only files that conversions and checkpoints have."""

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from dflash_cli.conversion.result_plan import ResultPlan
from dflash_cli.conversion.side_files import MANIFEST_FILE, MASK_PICKLE, PAPERS, SETTINGS, TOKENIZER
from dflash_cli.documents.atomic_file import check_output
from dflash_cli.formats.detection import find_dialect
from dflash_runtime.checkpoint.stored.files import MASK_FILE, refuse_escape
from dflash_runtime.checkpoint.stored.gguf_checkpoint import open_stored
from dflash_runtime.checkpoint.stored.strict_json import read_json
from dflash_runtime.errors import DFlashError, UsageError

WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")
CHECKPOINT_FILES = frozenset({"config.json", MANIFEST_FILE, MASK_PICKLE, MASK_FILE, ".gitattributes"})
CHECKPOINT_PATTERNS = (*PAPERS, *TOKENIZER, *SETTINGS)
MOST_LISTED = 5


def check_destination(destination: Path, *, force: bool) -> None:
    """Refuse a destination before anything is read.

    Raises:
        UsageError: the parent folder is missing, the destination exists and `force` is not given, or it may not be
            replaced.
    """
    if destination.name == "..":
        text = "ends in .., expected the directory's own name"
        raise UsageError(text, id="destination-without-name", path=destination, expected="the directory's own name")
    check_output(destination, force=force, is_folder=True)
    if not os.path.lexists(destination):
        return
    if destination.is_symlink():
        text = "is a link, and --force does not replace links"
        raise UsageError(text, id="destination-is-link", path=destination, hint="name the directory itself")
    if destination.is_dir():
        _refuse_held(destination)
    refuse_foreign(destination, destination)


def refuse_foreign(directory: Path, named: Path) -> None:
    """Refuse to replace a directory that is not a draft, or a draft beside other files. Errors call it `named`.

    Raises:
        UsageError: the path is not a draft or an empty directory, or has other files, which the message lists.
    """
    if not directory.is_dir() or not (_is_marked(directory) or not any(directory.iterdir())):
        text = "is not a draft; --force replaces only drafts and empty directories"
        raise UsageError(text, id="destination-not-a-draft", path=named, expected="a draft or an empty directory")
    foreign = sorted(foreign_files(directory))
    if foreign:
        rest = len(foreign) - MOST_LISTED
        listed = ", ".join(foreign[:MOST_LISTED]) + (f" and {rest} more" if rest > 0 else "")
        raise UsageError(
            f"contains {listed}, which are not files of a checkpoint, and --force would remove them",
            id="destination-has-other-files",
            path=named,
            found=foreign,
            hint="move them elsewhere, or name another directory",
        )


def foreign_files(directory: Path) -> Iterator[str]:
    """The names of folders in a directory, and of files that neither a conversion nor a checkpoint has."""
    weights = _weight_names(directory)
    for item in directory.iterdir():
        is_known = item.name in CHECKPOINT_FILES or item.name in weights or WEIGHTS.fullmatch(item.name)
        if item.is_dir() or not (is_known or any(fnmatchcase(item.name, pattern) for pattern in CHECKPOINT_PATTERNS)):
            yield item.name


def remove_checkpoint(directory: Path, *, more: frozenset[str] = frozenset()) -> None:
    """Remove the files of a checkpoint and the files named in `more`, then the directory.

    Raises:
        OSError: other files are in the directory. They stay.
    """
    foreign = set(foreign_files(directory)) - more
    for item in list(directory.iterdir()):
        if item.name not in foreign:
            item.unlink()
    directory.rmdir()


def protect_inputs(destination: Path, plan: ResultPlan) -> None:
    """Refuse to replace the source or the target of a conversion, and to write into its source.

    Raises:
        UsageError: the destination is or contains the source or the target, or is inside the source.
    """
    inputs = {"source": plan.draft.checkpoint} | ({"target": plan.target.checkpoint} if plan.target else {})
    for noun, checkpoint in inputs.items():
        folders = {item.resolve().parent for item in (checkpoint.config_path, *checkpoint.weight_files)}
        if any(_contains(destination, folder) for folder in (checkpoint.path, *folders)):
            raise UsageError(
                f"is or contains the {noun}, which the conversion would delete",
                id=f"destination-holds-{noun}",
                path=destination,
            )
    if _contains(plan.draft.checkpoint.path, destination):
        text = "is inside the source, where readers would find two checkpoints"
        raise UsageError(text, id="destination-in-source", path=destination, hint="name a directory outside the source")


def _contains(outer: Path, inner: Path) -> bool:
    """Whether two paths are the same directory, or the first contains the second, by name or by the system's ids."""
    resolved, home = inner.resolve(), outer.resolve()
    if resolved.is_relative_to(home):
        return True
    if not home.exists():
        return False
    return any(item.exists() and item.samefile(home) for item in (resolved, *resolved.parents))


def _refuse_held(directory: Path) -> None:
    """Refuse a directory that the system does not allow to rename."""
    if Path.cwd().is_relative_to(directory.resolve()):
        raise UsageError(
            "is or contains the working directory, which cannot be replaced",
            id="destination-is-working-directory",
            path=directory,
        )
    if directory.is_mount():
        raise UsageError(
            "is a mount point, which cannot be replaced",
            id="destination-is-mount-point",
            path=directory,
            hint=f"name a directory in it: {directory}/NAME",
        )


def _is_marked(directory: Path) -> bool:
    """Whether a directory has a manifest of this tool, or a config that some dialect recognises."""
    manifest, config = (_read(directory, name) for name in (MANIFEST_FILE, "config.json"))
    return manifest.get("tool") == "dflash" or find_dialect(config, frozenset()) is not None


def _read(directory: Path, name: str) -> dict[str, object]:
    """A JSON object in a directory, {} if it cannot be read. Links that lead outside are not followed."""
    try:
        refuse_escape(directory, directory / name)
        return read_json(directory / name)
    except DFlashError:
        return {}


def _weight_names(directory: Path) -> frozenset[str]:
    """The names of a checkpoint's weight files."""
    try:
        return frozenset(file.name for file in open_stored(directory).weight_files)
    except (DFlashError, OSError):
        return frozenset()
