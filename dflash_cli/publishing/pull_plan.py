"""Which files of a draft on the hub a folder lacks: the plan of a pull, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from dflash_cli.checkpoints.hub import download_snapshot, explained, size_text
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.remote_gguf import choose_gguf, open_remote_gguf
from dflash_cli.checkpoints.remote_headers import RemoteCheckpoint, list_repo
from dflash_cli.conversion.side_files import PAPERS
from dflash_cli.documents.atomic_file import make_folder, naming_output
from dflash_cli.publishing.compared_files import Change, ComparedFile, ComparedFiles, change_of
from dflash_cli.publishing.draft_folder import READ, LocalFile, matches
from dflash_cli.publishing.hub_upload import HubState, StoredFile, read_state
from dflash_runtime.checkpoint.stored.files import INDEX_SUFFIX
from dflash_runtime.checkpoint.stored.gguf import SUFFIX
from dflash_runtime.checkpoint.stored.gguf_files import part_names
from dflash_runtime.errors import CheckpointError, UsageError
from dflash_runtime.phrases import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PullResult(ComparedFiles):
    """A pull, as planned or as done."""

    KIND: ClassVar[str] = "pull"

    repo: str
    commit: str
    folder: str
    target: Annotated[str | None, "the target that the draft names"]
    files: tuple[ComparedFile, ...]
    is_verified: Annotated[bool, "whether every file is here, with the hash that the hub states"] = False

    @property
    def draft(self) -> Path:
        """The folder that commands read: the folder of the weights, which may lie in a folder of the repository."""
        nested = next((item.name for item in self.files if "/" in item.name), "")
        return (Path(self.folder) / nested).parent if nested else Path(self.folder)

    def summary(self) -> list[str]:
        num_new = sum(item.change != "same" for item in self.files)
        here = f"; {len(self.files) - num_new} already here" if num_new < len(self.files) else ""
        done = "downloaded and verified" if self.is_verified else "to download"
        size = size_text(self.num_bytes)
        return [f"{self.repo}@{self.commit[:12]} -> {self.folder}: {plural(num_new, 'file')} {done}, {size}{here}"]


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
        make_folder(self.folder)
        missing = [item for item in self.result.files if item.change != "same"]
        with naming_output(self.folder):
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


def plan_pull(reference: str, folder: Path, *, gguf: str | None = None, force: bool = False) -> PullPlan:
    """Read the headers of a draft on the hub, and compare its files with a folder.

    `gguf` chooses a GGUF file of the repository, by its name or its quantisation. It need not be given if GGUF is all
    that the repository has, in one file.

    Raises:
        CheckpointError, UnsupportedError: the repository is not a draft that dflash reads.
        CheckpointNotFound, HubUnreachable: the hub refuses or does not answer.
        UsageError: the folder has another version of a file, and `force` is false; or `gguf` does not name one file.
    """
    repo = list_repo(reference)
    file = choose_gguf(repo, gguf)
    checkpoint = RemoteCheckpoint(repo) if file is None else open_remote_gguf(repo, file)
    verifier = open_draft(checkpoint).config.verifier
    state = read_state(repo.repo, repo.commit)
    parts = () if file is None else part_names(file)
    weights = (*(item.name for item in checkpoint.weight_files), f"*{INDEX_SUFFIX}")
    known = (*READ, *weights) if file is None else PAPERS
    names = sorted(name for name in state.files if name in parts or ("/" not in name and matches(name, known)))
    files = tuple(
        ComparedFile(
            name=name, change=_compare(state.files[name], folder / name), num_bytes=state.files[name].num_bytes
        )
        for name in names
    )  # fmt: skip
    _refuse_changes(files, folder, force=force)
    if file is not None:
        _refuse_other_weights([folder / name for name in parts])
    result = PullResult(
        repo=repo.repo, commit=repo.commit, folder=str(folder), files=files,
        target=verifier.name_or_path or None if verifier is not None else None,
    )  # fmt: skip
    return PullPlan(state, folder, result)


def _compare(stored: StoredFile, file: Path) -> Change:
    return change_of(stored, LocalFile(file.name, file) if file.exists() else None)


def _refuse_changes(files: Sequence[ComparedFile], folder: Path, *, force: bool) -> None:
    """Refuse to replace files that the folder has in another version."""
    changed = [item.name for item in files if item.change == "changed"]
    if changed and not force:
        raise UsageError(
            f"has other versions of {', '.join(changed)}", id="output-exists", path=folder, found=changed,
            hint="name another folder with --output, or pass --force to replace these files",
        )  # fmt: skip


def _refuse_other_weights(files: Sequence[Path]) -> None:
    """Refuse a folder with other weights, which readers of the folder would take instead of the GGUF files."""
    folder = files[0].parent
    others = [item for pattern in ("*.safetensors", f"*{SUFFIX}") for item in sorted(folder.glob(pattern))]
    found = [item.name for item in others if item not in files]
    if found:
        raise UsageError(
            f"has other weights: {', '.join(found)}", id="other-weights-here", path=folder, found=found,
            expected=", ".join(item.name for item in files), hint="name another folder with --output",
        )  # fmt: skip
