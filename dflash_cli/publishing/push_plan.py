"""Which files of a draft the hub lacks: the plan of a push, and its result."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

from dflash_cli.checkpoints.hub import size_text
from dflash_cli.publishing.compared_files import SENT, ComparedFile, ComparedFiles, change_of
from dflash_cli.publishing.draft_folder import LocalFile
from dflash_cli.publishing.hub_upload import Committed, HubState, commit, hub_address, make_room
from dflash_runtime.checkpoint.stored.files import INDEX_SUFFIX, PICKLE_SUFFIXES
from dflash_runtime.errors import CheckpointNotFound, GateFailed, UsageError
from dflash_runtime.phrases import plural

WEIGHTS = ("*.safetensors", f"*{INDEX_SUFFIX}", *(f"*{suffix}" for suffix in PICKLE_SUFFIXES))
"""Patterns of files that a loader of the repository would read as weights."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PushResult(ComparedFiles):
    """A push, as planned or as done."""

    KIND: ClassVar[str] = "push"

    repo: str
    revision: str
    url: Annotated[str, "of the repository; after a commit, of the commit or its pull request"]
    is_new_repo: bool
    is_private: bool
    files: tuple[ComparedFile, ...]
    commit: Annotated[str | None, "null if nothing was uploaded"] = None
    pull_request: str | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the hub lacks a file, or has one to remove."""
        return any(item.change != "same" for item in self.files)

    def summary(self) -> list[str]:
        counts = Counter(item.change for item in self.files)
        sent = counts["new"] + counts["changed"]
        parts = [f"{plural(sent, 'file')} to upload, {size_text(self.num_bytes)}"]
        parts += [f"{counts['removed']} to remove"] if counts["removed"] else []
        parts += [f"{counts['same']} already on the hub"] if counts["same"] else []
        kind = "new " if self.is_new_repo else ""
        place = f"{self.repo}, {kind}{'private' if self.is_private else 'public'} repository, branch {self.revision}"
        return [f"{place}: {'; '.join(parts)}", *([self.url] if self.commit else [])]


@dataclass(frozen=True, slots=True)
class PushPlan:
    """The files to send and the names to remove, on top of the state of the hub."""

    state: HubState
    sent: tuple[LocalFile, ...]
    removed: tuple[str, ...]
    result: PushResult

    def run(self, message: str, *, is_pull_request: bool) -> PushResult:
        """Create the repository and the branch if they are missing, and commit. Without changes, nothing is sent.

        Raises:
            GateFailed: the branch has a newer commit.
            CheckpointNotFound, HubUnreachable, UsageError: the hub refuses or does not answer.
        """
        make_room(self.state, is_private=self.result.is_private)
        if not self.result.is_needed:
            return self.result
        done: Committed = commit(self.state, self.sent, self.removed, message=message, is_pull_request=is_pull_request)
        return replace(
            self.result, commit=done.commit, pull_request=done.pull_request, url=done.pull_request or done.url
        )


def plan_push(
    state: HubState,
    files: Sequence[LocalFile],
    *,
    is_private: bool = False,
    is_pull_request: bool = False,
    prunes: bool = False,
) -> PushPlan:
    """Compare local files with the hub.

    Raises:
        UsageError: the repository is public, but a private one is asked for.
        CheckpointNotFound: a pull request to a branch that does not exist.
        GateFailed: weights on the hub would stay beside the uploaded ones.
    """
    exists = state.commit is not None
    if exists and is_private and not state.is_private:
        raise UsageError(
            "the repository is public, and --private holds for new repositories only", id="repository-is-public",
            path=state.repo, field="--private", hint="make it private in its settings on the hub, or name another one",
        )  # fmt: skip
    if exists and is_pull_request and not state.has_branch:
        raise CheckpointNotFound(
            f"no branch {state.revision!r} for a pull request", id="no-revision", path=state.repo,
            found=state.revision, hint="leave out --create-pr to make the branch, or --revision to use main",
        )  # fmt: skip
    stale = _find_stale(state, files)
    if stale and not prunes:
        raise GateFailed(
            f"the hub has weights that the folder lacks: {', '.join(stale)}; a loader may read them instead of "
            "the uploaded ones", id="stale-weights", path=state.repo, found=list(stale),
            hint="--prune removes them in the same commit",
        )  # fmt: skip
    changes = {item.name: change_of(state.files.get(item.name), item) for item in files}
    listed = [ComparedFile(name=item.name, change=changes[item.name], num_bytes=item.num_bytes) for item in files]
    listed += [ComparedFile(name=name, change="removed", num_bytes=state.files[name].num_bytes) for name in stale]
    result = PushResult(
        repo=state.repo, revision=state.revision, url=hub_address(state.repo), is_new_repo=not exists,
        is_private=state.is_private if exists else is_private, files=tuple(listed),
    )  # fmt: skip
    return PushPlan(state, tuple(item for item in files if changes[item.name] in SENT), stale, result)


def _find_stale(state: HubState, files: Sequence[LocalFile]) -> tuple[str, ...]:
    """Files on the hub that a loader would read as weights, and that the folder lacks."""
    kept = {item.name for item in files}
    here = [name for name in sorted(state.files) if "/" not in name and name not in kept]
    return tuple(name for name in here if any(fnmatchcase(name, pattern) for pattern in WEIGHTS))
