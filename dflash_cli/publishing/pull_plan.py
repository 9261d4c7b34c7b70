"""Which files of a draft on the hub a folder lacks: the plan of a pull, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from dflash_cli.checkpoints.hub import download_snapshot, explained, size_text
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.remote_headers import RemoteCheckpoint, list_repo
from dflash_cli.publishing.draft_folder import READ, LocalFile, matches
from dflash_cli.publishing.hub_upload import HubState, StoredFile, read_state
from dflash_cli.terminal.shown import Shown, Table
from dflash_runtime.checkpoint.files import INDEX_SUFFIX
from dflash_runtime.documents import computed_key
from dflash_runtime.errors import CheckpointError, UsageError
from dflash_runtime.phrases import plural

Arrival = Literal["new", "changed", "same"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledFile:
    """A file of a pull."""

    name: str
    change: Annotated[Arrival, "same files are not downloaded; a changed file replaces a file of the folder"]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PullResult(Shown):
    """A pull, as planned or as done."""

    KIND: ClassVar[str] = "pull"

    repo: str
    commit: str
    folder: str
    target: Annotated[str | None, "the target that the draft names"]
    files: tuple[PulledFile, ...]
    is_verified: Annotated[bool, "whether every file is here, with the hash that the hub states"] = False

    @property
    @computed_key
    def num_bytes(self) -> int:
        """Bytes of the new and changed files."""
        return sum(item.num_bytes for item in self.files if item.change != "same")

    def summary(self) -> list[str]:
        num_new = sum(item.change != "same" for item in self.files)
        here = f"; {len(self.files) - num_new} already here" if num_new < len(self.files) else ""
        done = "downloaded and verified" if self.is_verified else "to download"
        size = size_text(self.num_bytes)
        return [f"{self.repo}@{self.commit[:12]} -> {self.folder}: {plural(num_new, 'file')} {done}, {size}{here}"]

    def shown_tables(self) -> dict[str, Table]:
        rows = [(item.change, size_text(item.num_bytes), item.name) for item in self.files]
        return {"": (("change", "size", "file"), rows)}


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The files of a repository that readers of a draft look for, and the folder that receives them."""

    state: HubState
    folder: Path
    result: PullResult

    def run(self) -> PullResult:
        """Download the new and changed files, and compare each file with the hash that the hub states.

        An interrupted download continues when it is run again.

        Raises:
            CheckpointError: a file differs from the hub's.
            CheckpointNotFound, HubUnreachable: the hub refuses or does not answer.
        """
        missing = [item for item in self.result.files if item.change != "same"]
        for item in missing:
            if item.change == "changed":
                (self.folder / item.name).unlink()
        if missing:
            with explained(self.state.repo, self.result.commit):
                names = [item.name for item in missing]
                download_snapshot(self.state.repo, self.result.commit, names, folder=self.folder)
        for item in missing:
            if _compare(self.state.files[item.name], self.folder / item.name) != "same":
                raise CheckpointError(
                    "differs from the file on the hub", id="download-damaged", path=self.folder / item.name,
                    hint="run the same command with --force to download it again",
                )  # fmt: skip
        return replace(self.result, is_verified=True)


def plan_pull(reference: str, folder: Path, *, force: bool = False) -> PullPlan:
    """Read the headers of a draft on the hub, and compare its files with a folder.

    Raises:
        CheckpointError, UnsupportedError: the repository is not a draft that dflash reads.
        CheckpointNotFound, HubUnreachable: the hub refuses or does not answer.
        UsageError: the folder has another version of a file, and `force` is false.
    """
    repo = list_repo(reference)
    checkpoint = RemoteCheckpoint(repo)
    verifier = open_draft(checkpoint).config.verifier
    state = read_state(repo.repo, repo.commit)
    known = (*READ, *(item.name for item in checkpoint.weight_files), f"*{INDEX_SUFFIX}")
    names = sorted(name for name in state.files if "/" not in name and matches(name, known))
    files = tuple(
        PulledFile(
            name=name, change=_compare(state.files[name], folder / name), num_bytes=state.files[name].num_bytes
        )
        for name in names
    )  # fmt: skip
    _refuse_changes(files, folder, force=force)
    result = PullResult(
        repo=repo.repo, commit=repo.commit, folder=str(folder), files=files,
        target=verifier.name_or_path or None if verifier is not None else None,
    )  # fmt: skip
    return PullPlan(state, folder, result)


def _compare(stored: StoredFile, file: Path) -> Arrival:
    if not file.exists():
        return "new"
    return "same" if stored.holds(LocalFile(file.name, file)) else "changed"


def _refuse_changes(files: Sequence[PulledFile], folder: Path, *, force: bool) -> None:
    """Refuse to replace files that the folder has in another version."""
    changed = [item.name for item in files if item.change == "changed"]
    if changed and not force:
        raise UsageError(
            f"has other versions of {', '.join(changed)}", id="output-exists", path=folder, found=changed,
            hint="name another folder with --output, or pass --force to replace these files",
        )  # fmt: skip
