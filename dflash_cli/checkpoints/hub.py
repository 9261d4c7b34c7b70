"""The hub's errors in our words: gated, missing, wrong revision, offline and unreachable read differently."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflash_runtime.errors import CheckpointNotFound


class HubUnreachable(CheckpointNotFound):
    """The hub does not answer, or offline mode is on; a copy in the local cache may still be used."""


@contextmanager
def explained(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises inside into one line.

    Raises:
        CheckpointNotFound: naming the reason.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    connection_errors = _connection_errors()
    try:
        yield
    except GatedRepoError as error:
        raise CheckpointNotFound(
            f"{repo}: access is gated",
            hint="accept its terms on the hub, then log in with hf auth login or set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointNotFound(f"{repo}: no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointNotFound(
            f"{repo}: not found on the hub", hint="check the name; a private repository needs HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise CheckpointNotFound(f"{repo}: no such directory, and not a valid name of a hub repository") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _refusal(repo, error.__cause__) from error
        raise HubUnreachable(
            f"{repo}: not in the local cache, and the hub cannot be reached", hint=_how_to_reach_it()
        ) from error
    except (EntryNotFoundError, HfHubHTTPError) as error:
        raise _refusal(repo, error) from error
    except connection_errors as error:
        raise HubUnreachable(
            f"{repo}: the hub cannot be reached ({type(error).__name__})", hint=_how_to_reach_it()
        ) from error


def _how_to_reach_it() -> str:
    """Which variable turned offline mode on, where one did."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if not HF_HUB_OFFLINE:
        return "check the network and HF_ENDPOINT"
    name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return f"{name} turns the hub off: unset it"


def _refusal(repo: str, error: Exception) -> CheckpointNotFound:
    """What the hub said, on one line; its own troubles and its limits pass."""
    said = (str(error) or type(error).__name__).splitlines()[0]
    status = getattr(getattr(error, "response", None), "status_code", 0)
    hint = "that is the hub's own trouble: try again later" if status >= 500 or status == 429 else None
    return CheckpointNotFound(f"{repo}: the hub answered: {said}", hint=hint)


def _connection_errors() -> tuple[type[Exception], ...]:
    """The errors of the HTTP library that the hub's client has imported: httpx, or httpx2 from its release 2."""
    libraries: list[Any] = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return tuple(library.HTTPError for library in libraries)
