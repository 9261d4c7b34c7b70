"""Files of a hub repository, and one commit to it. Each refusal of the hub has its id.

Large files go to the hub before the commit. A push that was interrupted sends only the large files that the hub lacks.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dflash_cli.checkpoints.hub import LOG_IN, bars, explained, how_to_connect
from dflash_cli.checkpoints.slow_answers import HubUnreachable
from dflash_cli.publishing.draft_folder import LocalFile
from dflash_cli.terminal import console
from dflash_runtime.errors import CheckpointNotFound, DFlashError, GateFailed, UsageError

MAIN = "main"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file on the hub: its size, and the hash by which the hub names its content."""

    num_bytes: int
    digest: str
    is_lfs: bool

    def holds(self, file: LocalFile) -> bool:
        """Whether the content is the local file's."""
        return self.num_bytes == file.num_bytes and self.digest == file.digest(is_lfs=self.is_lfs)


@dataclass(frozen=True, slots=True)
class HubState:
    """A repository at a branch. `commit` is None if the repository does not exist.

    Without the branch, `commit` and `files` are the default branch's, where a new branch starts.
    """

    repo: str
    revision: str
    commit: str | None = None
    has_branch: bool = False
    is_private: bool = False
    files: Mapping[str, StoredFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit on the hub, and the pull request that holds it."""

    commit: str
    url: str
    pull_request: str | None


def require_access() -> None:
    """Require a token, and that the hub is not turned off.

    Raises:
        HubUnreachable: offline mode is on.
        CheckpointNotFound: the token is absent.
    """
    from huggingface_hub import get_token
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        raise HubUnreachable("offline mode is on, and nothing can be uploaded", id="offline", hint=how_to_connect())
    if not get_token():
        raise CheckpointNotFound("an upload needs a token with the right to write", id="no-token", hint=LOG_IN)


def hub_address(repo: str) -> str:
    """The address of a repository's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


def read_state(repo: str, revision: str) -> HubState:
    """Ask the hub for a repository's files at a branch.

    Raises:
        CheckpointNotFound, HubUnreachable: the hub refuses or does not answer.
    """
    from huggingface_hub import HfApi, errors
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    with explained(repo, revision):
        try:
            info = api.repo_info(repo)
        except errors.RepositoryNotFoundError as error:
            if isinstance(error, errors.GatedRepoError):
                raise
            return HubState(repo, revision)
        has_branch = True
        try:
            info = api.repo_info(repo, revision=revision)
        except errors.RevisionNotFoundError:
            has_branch = False
        entries = api.list_repo_tree(repo, recursive=True, revision=info.sha)
        files = {item.path: _stored(item) for item in entries if isinstance(item, RepoFile)}
    return HubState(repo, revision, info.sha, has_branch, bool(info.private), files)


def _stored(item: object) -> StoredFile:
    """A file of the hub's list. A large file has its SHA-256 in `lfs`."""
    lfs = getattr(item, "lfs", None)
    digest = item.blob_id if lfs is None else lfs.sha256  # type: ignore[attr-defined]
    return StoredFile(item.size, digest, lfs is not None)  # type: ignore[attr-defined]


def make_room(state: HubState, *, is_private: bool) -> None:
    """Create the repository or the branch that is missing.

    Raises:
        CheckpointNotFound, HubUnreachable, UsageError: the hub refuses or does not answer.
    """
    from huggingface_hub import HfApi

    api, has_branch = HfApi(), state.has_branch
    with explained_upload(state.repo, state.revision):
        if state.commit is None:
            api.create_repo(state.repo, private=is_private, exist_ok=True)
            has_branch = state.revision == MAIN
        if not has_branch:
            api.create_branch(state.repo, branch=state.revision, exist_ok=True)


def commit(
    state: HubState, files: Sequence[LocalFile], removed: Sequence[str], *, message: str, is_pull_request: bool
) -> Committed:
    """Upload files and remove names in one commit on top of the commit that `state` has seen.

    Raises:
        GateFailed: the branch has a newer commit.
        CheckpointNotFound, HubUnreachable, UsageError: the hub refuses or does not answer.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    is_shown = sys.stderr.isatty() and not console.is_quiet()
    with explained_upload(state.repo, state.revision), bars(is_shown=is_shown):
        added = [CommitOperationAdd(item.name, item.content) for item in files]
        done = HfApi().create_commit(
            state.repo,
            [*added, *(CommitOperationDelete(name) for name in removed)],
            commit_message=message,
            revision=state.revision,
            create_pr=is_pull_request,
            parent_commit=state.commit,
        )
    return Committed(done.oid, done.commit_url, done.pr_url)


@contextmanager
def explained_upload(repo: str, revision: str) -> Iterator[None]:
    """Turn errors of an upload into our errors: of a lacking right, of a newer commit, of a card, and of `explained`.

    Raises:
        GateFailed: the branch has a newer commit.
        UsageError: the hub refuses the metadata of the card.
        CheckpointNotFound, HubUnreachable: the hub refuses or does not answer.
    """
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    with explained(repo, revision):
        try:
            yield
        except GatedRepoError:
            raise
        except HfHubHTTPError as error:
            refused = _refused_upload(repo, revision, error)
            if refused is None:
                raise
            raise refused from error
        except RuntimeError as error:  # the library's word for a large file that it could not send
            if not isinstance(error.__cause__, Exception):
                raise
            cause = error.__cause__
            refused = _refused_upload(repo, revision, cause) if isinstance(cause, HfHubHTTPError) else None
            raise refused or cause from error
        except ValueError as error:
            if not str(error).startswith("Invalid metadata"):
                raise
            lines = [line.strip(" -") for line in str(error).splitlines()[1:] if line.strip()]
            text = f"the hub refuses the metadata of the card: {'; '.join(lines)}"
            raise UsageError(text, id="card-metadata", path="README.md", hint="correct the head of the card") from error


def _refused_upload(repo: str, revision: str, error: Exception) -> DFlashError | None:
    """The error of an answer that only uploads get; None for other answers."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status == 403:
        return CheckpointNotFound(
            "the token may not write here", id="no-right-to-write", path=repo, found=status,
            hint="use a token with the right to write to this repository, or a name in your own namespace",
        )  # fmt: skip
    if status in (409, 412):
        return GateFailed(
            f"{revision} has a newer commit than the one that was compared", id="hub-conflict", path=repo,
            found=status, hint="push again: the new commit is compared first",
        )  # fmt: skip
    if status == 413:
        return UsageError("a file is larger than the hub accepts", id="too-large-for-hub", path=repo, found=status)
    return None
