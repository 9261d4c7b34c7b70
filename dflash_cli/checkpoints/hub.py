"""Download repositories into the hub's cache, and turn errors of the hub into our errors.

The size of a download is printed first, and the hub's own bars show progress.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.slow_answers import HubUnreachable, limit_answers
from dflash_cli.terminal import console
from dflash_runtime.errors import CheckpointNotFound
from dflash_runtime.phrases import plural

TEMPORARY = (500, 502, 503, 504)
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
LOG_IN = "log in with hf auth login or set HF_TOKEN"
HINTS = {
    401: (LOG_IN, "the hub does not accept the token: correct HF_TOKEN, or log in again with hf auth login"),
    403: (LOG_IN, "the token may not read this repository: give the token access, or use another one"),
    404: ("check the name and HF_ENDPOINT",) * 2,
    407: ("the proxy asks for a login: give it in HTTPS_PROXY, as http://NAME:PASSWORD@HOST:PORT",) * 2,
}
"""Status -> hint without a token, and with one."""


MISREAD = (UnicodeError, RecursionError, OverflowError, AttributeError, KeyError, TypeError)
"""Errors of huggingface_hub at answers of another form than the hub's, such as a redirect to port 99999999999."""


class NotFromAHub(ValueError):
    """An answer that no hub gives, such as the page of a network that asks for a login."""


@contextmanager
def explained(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn errors of huggingface_hub in the block into our errors, and limit the time of its answers.

    Raises:
        CheckpointNotFound: names the reason.
        HubUnreachable: the hub does not answer or is too slow, or offline mode is on.
    """
    from huggingface_hub import errors

    limit_answers()
    answers = _answers(revision)
    connection_errors = _library_errors("HTTPError")
    misread: tuple[type[Exception], ...] = (NotFromAHub, JSONDecodeError, *MISREAD, *_library_errors("InvalidURL"))
    try:
        yield
    except tuple(answers) as error:
        id, text, hint = next(answer for kind, answer in answers.items() if isinstance(error, kind))
        raise CheckpointNotFound(text, id=id, path=repo, found=revision, hint=hint) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _refusal(repo, error.__cause__) from error
        raise HubUnreachable(
            "not in the local cache, and the hub cannot be reached", id="not-cached", path=repo, hint=how_to_connect()
        ) from error
    except (errors.EntryNotFoundError, errors.HfHubHTTPError) as error:
        raise _refusal(repo, error) from error
    except misread as error:
        raise HubUnreachable(
            "the answer is not from a hub", id="not-a-hub", path=repo,
            hint="a network may ask for a login in a browser; otherwise check HF_ENDPOINT and the proxy",
        ) from error  # fmt: skip
    except connection_errors as error:
        raise _unreachable(repo, error) from error


def _answers(revision: str | None) -> dict[type[Exception], tuple[str, str, str]]:
    """Error of huggingface_hub about a repository -> our id, text and hint."""
    from huggingface_hub import errors

    terms = "accept its terms on the hub, then"
    return {
        errors.GatedRepoError: (
            "hub-gated",
            "access is gated",
            f"{terms} give the token access to gated repositories" if _has_token() else f"{terms} {LOG_IN}",
        ),
        errors.RevisionNotFoundError: (
            "no-revision",
            f"no revision {revision!r}",
            "name a branch, a tag or a commit after @; org/repo alone is the default branch",
        ),
        errors.RepositoryNotFoundError: (
            "not-on-the-hub",
            "not found on the hub",
            "check the name, and whether the token may read it"
            if _has_token()
            else "check the name; a private repository needs HF_TOKEN",
        ),
        errors.HFValidationError: (
            "not-a-reference",
            "no such directory, and not a name of a hub repository",
            "pass a directory, org/repo, or org/repo@revision",
        ),
    }


def _unreachable(repo: str, error: Exception) -> HubUnreachable:
    """The error for a connection that fails: at the proxy, at the certificate, or at the hub."""
    id, hint = "hub-unreachable", how_to_connect()
    if type(error).__name__ == "ProxyError":
        id, hint = "proxy-unreachable", "check HTTPS_PROXY; NO_PROXY lists hosts that need no proxy"
    elif "CERTIFICATE_VERIFY_FAILED" in str(error):
        id, hint = "certificate-refused", "SSL_CERT_FILE names a file with the certificate of your proxy or hub"
    return HubUnreachable(f"the hub cannot be reached ({type(error).__name__})", id=id, path=repo, hint=hint)


def how_to_connect() -> str:
    """The hint for an unreachable hub: names the variable that turned offline mode on, or proxies that are set."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if not HF_HUB_OFFLINE:
        proxies = [name for name in PROXIES if os.environ.get(name) or os.environ.get(name.lower())]
        return f"check {', '.join(['the network', *proxies])} and HF_ENDPOINT"
    name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return f"{name} turns the hub off: unset it"


def _has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _refusal(repo: str, error: Exception) -> CheckpointNotFound:
    """The error with the hub's answer on one line, and a hint by its status."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    answer = " ".join(lines[: 2 if lines[0].endswith(":") else 1]).removesuffix(":")
    status = getattr(getattr(error, "response", None), "status_code", 0)
    id, hint = "hub-refused", HINTS.get(status, HINTS[404])[_has_token()]
    if status == 429:
        id, hint = "hub-rate-limit", "wait some minutes" + ("" if _has_token() else f"; for a higher limit {LOG_IN}")
    elif status in TEMPORARY:
        hint = "the hub has a temporary problem: try again later"
    elif status >= 500:
        hint = "HF_ENDPOINT does not answer like a hub: check it"
    return CheckpointNotFound(f"the hub answered: {answer}", id=id, path=repo, found=status, hint=hint)


def _library_errors(kind: str) -> tuple[type[Exception], ...]:
    """A kind of error of the HTTP library that huggingface_hub has imported: httpx, or httpx2."""
    libraries: list[Any] = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return tuple(getattr(library, kind) for library in libraries)


def download_snapshot(
    repo: str,
    revision: str | None,
    patterns: list[str],
    *,
    repo_type: str = "model",
    is_local: bool = False,
    folder: Path | None = None,
) -> Path:
    """The snapshot with the files of a repository that match the patterns. With `is_local` only the cache is read.

    With `folder`, the files go there instead of the cache.

    Raises:
        OSError, ValueError: errors of huggingface_hub, which `explained` turns into our errors.
    """
    from huggingface_hub import snapshot_download

    if not is_local:
        _announce(repo, revision, patterns, repo_type, folder)
    with bars(is_shown=sys.stderr.isatty() and not console.is_quiet()):
        try:
            snapshot = snapshot_download(
                repo, repo_type=repo_type, revision=revision, allow_patterns=patterns, local_files_only=is_local,
                local_dir=folder,
            )  # fmt: skip
        except TypeError as error:  # the library takes any JSON for a description of the repository
            raise NotFromAHub(str(error)) from error
        return Path(snapshot)


def _announce(repo: str, revision: str | None, patterns: list[str], repo_type: str, folder: Path | None) -> None:
    """Print the size of a download, if there is anything to download. Errors are left to the download itself."""
    from huggingface_hub import snapshot_download

    try:
        with bars(is_shown=False):
            files = snapshot_download(
                repo, repo_type=repo_type, revision=revision, allow_patterns=patterns, dry_run=True, local_dir=folder
            )
    except (OSError, ValueError, TypeError):
        return
    missing = [item for item in files if item.will_download]
    if missing:
        size = sum(item.file_size or 0 for item in missing)
        console.status(f"downloading {repo}: {size_text(size)} in {plural(len(missing), 'file')}")


@contextmanager
def bars(*, is_shown: bool) -> Iterator[None]:
    """Show or hide the hub's progress bars in the block, unless HF_HUB_DISABLE_PROGRESS_BARS decides."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if is_shown or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def size_text(num_bytes: int) -> str:
    """`16.4 GB`, in units of 1,000 as the hub counts."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
