"""Find the checkpoint of a reference: an existing directory, `org/repo[@revision]` on the hub, or the bundled pair.

tiny            the bundled target or the bundled draft, depending on the role
tiny:reduced    the bundled draft with a reduced output vocabulary
tiny:dflash2    the bundled DFlash 2 draft
tiny:dspark     the bundled DSpark draft
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dflash_cli.checkpoints.hub import download_snapshot, explained
from dflash_cli.checkpoints.slow_answers import HubUnreachable
from dflash_cli.terminal import console
from dflash_runtime.checkpoint.stored.adapters import instead_of_model
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.gguf_checkpoint import open_stored
from dflash_runtime.checkpoint.stored.gguf_files import find_gguf
from dflash_runtime.errors import CheckpointNotFound, UsageError, unreadable
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import closest

if TYPE_CHECKING:
    from dflash_cli.checkpoints.remote_headers import RemoteRepo

logger = logging.getLogger(__name__)

TINY = "tiny"
TINY_REDUCED = "tiny:reduced"
BUNDLED_DRAFTS = {
    TINY: "draft",
    TINY_REDUCED: "draft-reduced",
    "tiny:dflash2": "draft-dflash2",
    "tiny:dspark": "draft-dspark",
}
"""References of the bundled drafts, and their folders."""
TINY_TARGET_NAME = "dflash/tiny-python-target"
"""The name of the bundled target in checkpoints."""
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
"""The name of a repository. The names of a few old ones are a single word."""
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?$")


HUB_ADDRESS = re.compile(
    r"^(?:https?://[^/]+|hf:/)/(?!datasets/|spaces/)([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/([\w.-]+))?"
)
"""The address of a repository, as a browser or a file system of the hub shows it."""


def bundled_names() -> list[str]:
    """The references of the bundled drafts; `tiny` is also the bundled target."""
    return [*BUNDLED_DRAFTS]


def bundled_targets() -> list[str]:
    """The references of the bundled targets."""
    return [TINY]


Location: TypeAlias = "Path | RemoteRepo"
"""The place of a checkpoint: a directory, or a listed repository on the hub."""

DOWNLOADED = [
    "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "README*", "*.tiktoken", "*.safetensors",
    "mask_embedding.pt",
]  # fmt: skip
"""Patterns of the files that are downloaded from a repository."""


class Role(StrEnum):
    """The role of a checkpoint in a pair."""

    DRAFT = "draft"
    TARGET = "target"


def fetch_directory(reference: str, role: Role) -> Path:
    """The directory of a reference. A hub repository is downloaded.

    Raises:
        CheckpointNotFound: neither a checkpoint directory nor a hub repository, or the hub refuses the download.
        UsageError: the reference names a bundled draft, but the role is a target.
    """
    path = _local(reference)
    if reference and _is_here(reference):
        check_is_checkpoint(path)
        logger.info("%s %s: a directory", role, path)
        return path
    bundled = _bundled(reference, role)
    if bundled is not None:
        logger.info("%s %s: bundled, in %s", role, reference, bundled)
        return bundled
    if not HUB_ID.match(reference):
        is_bundled_name = reference.startswith(f"{TINY}:")
        expected = ", ".join(BUNDLED_DRAFTS) if is_bundled_name else "a directory, org/repo, org/repo@revision, or tiny"
        known = [name for name in BUNDLED_DRAFTS if (name != TINY) == is_bundled_name]
        close = _named_by_address(reference) or closest(reference, known) or _close_directory(path)
        raise CheckpointNotFound(
            "no such directory, and not a hub repository",
            id="not-a-reference",
            path=reference or "''",
            expected=expected,
            hint=f"did you mean {close}?" if close else f"pass {'one of ' if is_bundled_name else ''}{expected}",
        )
    with _guessing(reference):
        return _download(reference)


def check_is_checkpoint(path: Path) -> None:
    """Refuse an existing path that is neither a checkpoint directory nor GGUF.

    Raises:
        CheckpointNotFound: a file, or a directory without config.json. The hint names checkpoints in its folders.
        FileUnreadable: the system does not give the directory to this user.
    """
    if find_gguf(path) is not None:
        return
    if not path.is_dir():
        expected = "a checkpoint directory with config.json"
        raise CheckpointNotFound(
            f"not a directory, expected {expected}",
            id="not-a-directory",
            path=path,
            expected=expected,
            hint=f"pass its folder: {path.parent}",
        )
    try:
        names = frozenset(item.name for item in path.iterdir())
    except OSError as error:
        raise unreadable(path, error) from error
    if "config.json" not in names:
        found = sorted(path.glob("*/config.json")) or sorted(path.glob("*/*/config.json"))
        below = ", ".join(str(item.parent) for item in found[:8])
        hint = f"checkpoints beneath it: {below}" if below else "pass a directory with config.json and weights"
        raise CheckpointNotFound(
            "not found, expected a checkpoint's config", id="config-missing", path=path / "config.json",
            expected="a checkpoint's config", hint=instead_of_model(names) or hint,
        )  # fmt: skip


def find_checkpoint(reference: str, role: Role, *, needs_weights: bool = False) -> "Location":
    """The place of a reference's checkpoint.

    A hub repository is downloaded if its weights are needed. Otherwise it is only listed, and its headers are read from
    the hub. If the hub cannot be reached, a copy in the local cache is used.

    Raises:
        CheckpointNotFound, UsageError: see `fetch_directory`.
    """
    if needs_weights or not is_hub_id(reference):
        return fetch_directory(reference, role)
    with _guessing(reference):
        return _find_remote(reference, role)


def _find_remote(reference: str, role: Role) -> "Location":
    """The listed repository, or its copy in the local cache if the hub cannot be reached."""
    from dflash_cli.checkpoints.remote_headers import list_repo

    try:
        found = list_repo(reference)
        logger.info("%s %s: on the hub; only headers are read", role, reference)
        return found
    except HubUnreachable as error:
        logger.info("%s %s: %s; the local cache is used instead", role, reference, error.message)
        try:
            return _download(reference, is_local=True)
        except CheckpointNotFound:
            raise error from None


def open_checkpoint(location: "Location") -> Checkpoint:
    """The checkpoint at a location. Its headers are read when first used.

    Raises:
        CheckpointNotFound, CheckpointError: see `Checkpoint`.
    """
    if isinstance(location, Path):
        return open_stored(location)
    from dflash_cli.checkpoints.remote_headers import RemoteCheckpoint

    return RemoteCheckpoint(location)


def list_files(location: "Location") -> frozenset[str]:
    """The names of the files beside config.json."""
    if isinstance(location, Path):
        return frozenset(item.name for item in location.iterdir()) if location.is_dir() else frozenset()
    return frozenset(name for name in location.files if "/" not in name)


def is_bundled(reference: str) -> bool:
    """Whether a reference names the bundled pair. A checkpoint of the same name hides the bundled pair."""
    return reference in BUNDLED_DRAFTS and not _is_here(reference)


def warn_if_hiding(folder: Path) -> None:
    """Print a warning if a new folder has the name of a bundled checkpoint, which it hides."""
    if str(folder) in BUNDLED_DRAFTS:
        text = f"in this directory, {folder} now means the new folder instead of the bundled pair; rename the folder"
        console.warn(Notice(text, id="hides-bundled-pair"))


def is_hub_id(reference: str) -> bool:
    """Whether a reference names a hub repository."""
    return reference not in BUNDLED_DRAFTS and not _local(reference).exists() and bool(HUB_ID.match(reference))


def check_hub_names(names: Mapping[str, str | None]) -> None:
    """Require that the values of these options, if given, can be names of repositories.

    Raises:
        UsageError: naming the option.
    """
    for option, name in names.items():
        if name is not None and not HUB_NAME.fullmatch(name):
            raise UsageError(field=option, found=name, expected="a name on the hub, such as my-org/model")


def tiny_directory() -> Path:
    """The directory of the bundled pair."""
    return Path(str(files("dflash_cli") / "tiny"))


def _local(reference: str) -> Path:
    """A reference as a path. An unknown `~user` is not expanded."""
    return Path(os.path.expanduser(reference))  # noqa: PTH111  (Path.expanduser raises on an unknown user)


def _is_here(reference: str) -> bool:
    """Whether a reference is a path that exists. With the name of a bundled pair, the path must be a checkpoint."""
    path = _local(reference)
    if reference not in BUNDLED_DRAFTS:
        return path.exists()
    return os.path.lexists(path / "config.json") or find_gguf(path) is not None


@contextmanager
def _guessing(reference: str) -> Iterator[None]:
    """Ask whether a directory was meant, if the hub does not give a repository that is named like a directory here."""
    try:
        yield
    except CheckpointNotFound as error:
        close = _close_directory(_local(reference))
        if close is not None:
            error.hint = f"did you mean the directory {close}?"
        raise


def _named_by_address(reference: str) -> str | None:
    """`org/repo` or `org/repo@revision` of the address of a repository."""
    found = HUB_ADDRESS.match(reference)
    return "@".join(filter(None, found.groups())) if found is not None else None


def _close_directory(path: Path) -> Path | None:
    """Return the directory with the most similar name in the folder of a missing path."""
    try:
        names = [item.name for item in path.absolute().parent.iterdir() if item.is_dir()]
    except OSError:
        return None
    close = closest(path.name, names)
    return None if close is None else path.parent / close


def _bundled(reference: str, role: Role) -> Path | None:
    if reference == TINY and role is Role.TARGET:
        return tiny_directory() / "target"
    folder = BUNDLED_DRAFTS.get(reference)
    if folder is not None and role is Role.TARGET:
        text = f"{reference} names a draft; its target is {TINY}"
        raise UsageError(text, id="draft-as-target", field="--target", found=reference, expected=TINY)
    return None if folder is None else tiny_directory() / folder


def _download(reference: str, *, is_local: bool = False) -> Path:
    """The snapshot of a repository in the hub's cache. It is downloaded unless `is_local`.

    Raises:
        CheckpointNotFound, HubUnreachable: see `hub.explained`.
        CheckpointError: the repository lacks config.json.
    """
    repo, _, revision = reference.partition("@")
    with explained(repo, revision or None):
        found = download_snapshot(repo, revision or None, DOWNLOADED, is_local=is_local)
    logger.info("%s: in the cache, %s", reference, found)
    if not is_local and not os.path.lexists(found / "config.json"):
        from dflash_cli.checkpoints.remote_headers import RemoteCheckpoint, list_repo

        RemoteCheckpoint(list_repo(reference))  # says what the repository has instead
    return found
