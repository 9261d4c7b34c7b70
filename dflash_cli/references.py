"""Turn what a user typed into a directory: an existing path, `org/repo[@revision]`, or the bundled pair.

tiny            the bundled target, or the bundled draft, as the place asks for
tiny:reduced    the bundled draft with a reduced output vocabulary
"""

import os
import re
import sys
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_runtime.errors import CheckpointNotFound, UsageError

TINY = "tiny"
TINY_REDUCED = "tiny:reduced"
TINY_TARGET_NAME = "dflash/tiny-python-target"
"""What checkpoints call the bundled target."""
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?$")

HEADER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
WEIGHT_FILES = [*HEADER_FILES, "*.safetensors", "mask_embedding.pt"]


class Role(StrEnum):
    """What a reference stands for in a pair."""

    DRAFT = "draft"
    TARGET = "target"


def resolve(reference: str, role: Role) -> Path:
    """The directory a reference names, downloading from the hub where it is not local.

    Raises:
        CheckpointNotFound: nothing of that name, or the hub says no.
        UsageError: the text is no reference.
    """
    path = _local(reference)
    if reference and path.exists():
        return path
    bundled = _bundled(reference, role)
    if bundled is not None:
        return bundled
    if not HUB_ID.match(reference):
        raise CheckpointNotFound(
            f"{reference}: no such directory, and not a hub reference",
            hint="pass a directory, org/repo, org/repo@revision, or tiny",
        )
    return _download(reference)


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


def _download(reference: str) -> Path:
    """Fetch a repository into the hub cache and return its snapshot, explaining each way that can fail."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    connection_errors: tuple[type[Exception], ...] = (HfHubHTTPError, *_connection_errors())
    repo, _, revision = reference.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=WEIGHT_FILES))
    except GatedRepoError as error:
        raise CheckpointNotFound(
            f"{repo}: gated", hint="accept its terms on the hub, then log in (hf auth login) or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointNotFound(f"{repo}: no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointNotFound(
            f"{repo}: not found on the hub", hint="check the name; a private repository needs HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise CheckpointNotFound(f"{reference}: no such directory, and not a name the hub allows") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise CheckpointNotFound(f"{repo}: {_first_line(error.__cause__)}") from error
        raise CheckpointNotFound(
            f"{repo}: not in the local cache, and the hub cannot be reached",
            hint="check the network, or unset HF_HUB_OFFLINE",
        ) from error
    except connection_errors as error:
        raise CheckpointNotFound(f"{repo}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return f"the hub answered: {(str(error) or type(error).__name__).splitlines()[0]}"


def _connection_errors() -> tuple[type[Exception], ...]:
    """The errors of the HTTP library that the hub's client has imported: httpx, or httpx2 from its release 2."""
    libraries: list[Any] = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return tuple(library.HTTPError for library in libraries)
