"""Turn what a user typed into a directory: an existing path, `org/repo[@revision]`, or the bundled pair.

tiny            the bundled target, or the bundled draft, as its role asks for
tiny:reduced    the bundled draft with a reduced output vocabulary
"""

import os
import re
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dflash_cli.checkpoints.hub import HubUnreachable, explained
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.gguf import refuse_gguf
from dflash_runtime.errors import CheckpointNotFound, UsageError

if TYPE_CHECKING:
    from dflash_cli.checkpoints.remote_headers import RemoteRepo

TINY = "tiny"
TINY_REDUCED = "tiny:reduced"
TINY_TARGET_NAME = "dflash/tiny-python-target"
"""What checkpoints call the bundled target."""
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?$")

Location: TypeAlias = "Path | RemoteRepo"
"""Where a checkpoint is: a directory, or a repository on the hub that was listed."""

HEADER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
SIDE_FILES = ["LICENSE*", "NOTICE*", "README*", "*.tiktoken"]
WEIGHT_FILES = [*HEADER_FILES, *SIDE_FILES, "*.safetensors", "mask_embedding.pt"]


class Role(StrEnum):
    """What a reference stands for in a pair."""

    DRAFT = "draft"
    TARGET = "target"


def fetch_directory(reference: str, role: Role) -> Path:
    """The directory a reference names, downloaded from the hub where it is not local.

    Raises:
        CheckpointNotFound: nothing of that name, nothing there that is a checkpoint, or the hub says no.
        UsageError: the text is no reference.
        UnknownFormat: a GGUF file.
    """
    path = _local(reference)
    if reference and path.exists():
        check_is_checkpoint(path)
        return path
    bundled = _bundled(reference, role)
    if bundled is not None:
        return bundled
    if not HUB_ID.match(reference):
        raise CheckpointNotFound(
            f"{reference}: no such directory, and not a hub repository",
            hint="pass a directory, org/repo, org/repo@revision, or tiny",
        )
    return _download(reference)


def check_is_checkpoint(path: Path) -> None:
    """Refuse what is there and can be no checkpoint: what is looked for is absent, not malformed.

    Raises:
        CheckpointNotFound: a file, or a directory without config.json; the hint names the checkpoints beneath it.
        UnknownFormat: a GGUF file.
    """
    refuse_gguf(path)
    if not path.is_dir():
        message = f"{path}: not a directory, expected a checkpoint directory with config.json"
        raise CheckpointNotFound(message, hint=f"pass its folder: {path.parent}")
    if not os.path.lexists(path / "config.json"):
        found = sorted(path.glob("*/config.json")) or sorted(path.glob("*/*/config.json"))
        below = [item.parent for item in found[:8]]
        hint = f"checkpoints beneath it: {', '.join(map(str, below))}" if below else None
        raise CheckpointNotFound(f"{path / 'config.json'}: not found", hint=hint)


def find_checkpoint(reference: str, role: Role, *, needs_weights: bool = False) -> "Location":
    """Where the checkpoint of a reference is.

    A repository on the hub is downloaded where its weights are needed, and otherwise only listed: its headers are read
    from the hub. Where the hub cannot be reached, what the local cache has is taken.

    Raises:
        CheckpointNotFound, UsageError: as `fetch_directory`.
    """
    if needs_weights or not is_hub_id(reference):
        return fetch_directory(reference, role)
    from dflash_cli.checkpoints.remote_headers import list_repo

    try:
        return list_repo(reference)
    except HubUnreachable:
        return _download(reference, is_local=True)


def open_checkpoint(location: "Location") -> Checkpoint:
    """The checkpoint at a location, with its headers read when they are asked for.

    Raises:
        CheckpointNotFound, CheckpointError: see `Checkpoint`.
    """
    if isinstance(location, Path):
        return Checkpoint(location)
    from dflash_cli.checkpoints.remote_headers import RemoteCheckpoint

    return RemoteCheckpoint(location)


def list_files(location: "Location") -> frozenset[str]:
    """The names of the files beside config.json."""
    if isinstance(location, Path):
        return frozenset(item.name for item in location.iterdir()) if location.is_dir() else frozenset()
    return frozenset(name for name in location.files if "/" not in name)


def is_bundled(reference: str) -> bool:
    """Whether a reference names the bundled pair; a directory of that name hides it."""
    return reference in (TINY, TINY_REDUCED) and not Path(reference).exists()


def is_hub_id(reference: str) -> bool:
    """Whether a reference would be looked up on the hub."""
    return reference not in (TINY, TINY_REDUCED) and not _local(reference).exists() and bool(HUB_ID.match(reference))


def tiny_directory() -> Path:
    """Where the bundled pair lies."""
    return Path(str(files("dflash_cli") / "tiny"))


def _local(reference: str) -> Path:
    """The path a reference would be; an unknown `~user` stays as it is."""
    return Path(os.path.expanduser(reference))  # noqa: PTH111  (Path.expanduser raises on an unknown user)


def _bundled(reference: str, role: Role) -> Path | None:
    if reference == TINY:
        return tiny_directory() / ("target" if role is Role.TARGET else "draft")
    if reference == TINY_REDUCED:
        if role is Role.TARGET:
            raise UsageError(f"{TINY_REDUCED} names a draft; its target is {TINY}")
        return tiny_directory() / "draft-reduced"
    return None


def _download(reference: str, *, is_local: bool = False) -> Path:
    """Fetch a repository into the hub cache and return its snapshot, or only look there."""
    from dflash_cli.checkpoints.download import download_snapshot

    repo, _, revision = reference.partition("@")
    with explained(repo, revision or None):
        return download_snapshot(repo, revision or None, WEIGHT_FILES, is_local=is_local)
