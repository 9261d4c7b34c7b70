"""Find the files with the requested rows in a folder or a hub repository."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.hub import download_snapshot, explained
from dflash_cli.checkpoints.references import HUB_ID
from dflash_cli.checkpoints.slow_answers import HubUnreachable
from dflash_cli.documents.reading import unpacked_name
from dflash_cli.generation.datasets.table_files import READERS
from dflash_runtime.checkpoint.stored.digests import hash_files
from dflash_runtime.errors import CheckpointNotFound

NO_ROWS = frozenset(("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json", "config.json"))
"""JSON files that hold metadata instead of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The chosen files, and the commit if they are from a repository."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    commit: str | None = None

    @property
    def sha256(self) -> str:
        """Hash of the bytes of all files, in order."""
        return hash_files(self.paths)


def find_files(place: str, *, subset: str | None, split: str, is_subset_asked: bool) -> FoundFiles:
    """Return the files of a folder, a file, or `org/repo[@revision]` on the hub.

    Raises:
        CheckpointNotFound: the location does not exist, the hub refuses access, or files of the subset are missing.
    """
    path = Path(place).expanduser()
    if not path.exists() and HUB_ID.match(place):
        return _from_hub(place, subset, split, is_subset_asked=is_subset_asked)
    if path.is_file() and unpacked_name(path.name).suffix in READERS:
        return FoundFiles(paths=(path,), names=(path.name,))
    if not path.is_dir():
        raise CheckpointNotFound(
            f"{place}: found neither a folder, a file of rows ({', '.join(READERS)}) nor a hub repository",
            id="no-such-dataset-location",
            field="--dataset",
            found=place,
            hint="--dataset NAME=PLACE takes a folder, a file, or org/repo[@revision]",
        )
    names = sorted(item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file())
    chosen = choose_files(names, place, subset=subset, split=split, is_subset_asked=is_subset_asked)
    return FoundFiles(paths=tuple(path / name for name in chosen), names=chosen)


def choose_files(
    names: Sequence[str], place: str, *, subset: str | None, split: str, is_subset_asked: bool
) -> tuple[str, ...]:
    """Return the files of a subset and a split, judged by their names. All have the same suffix.

    Raises:
        CheckpointNotFound: files of rows are missing, at all or for the requested subset.
    """
    plain = {name: unpacked_name(name) for name in names}
    found = [name for name, path in plain.items() if path.suffix in READERS and path.name not in NO_ROWS]
    found = [name for name in found if name == str(plain[name]) or str(plain[name]) not in names]
    if not found:
        raise CheckpointNotFound(
            f"{place}: found no file of rows ({', '.join(READERS)})", id="no-row-files", found=place
        )
    if subset is not None:
        alone = [name for name in found if plain[name].stem == subset]
        of_subset = alone or [name for name in found if subset in _words(name)]
        if is_subset_asked and not of_subset:
            text = f"{place}: no file of {subset}; found {', '.join(found[:8])}"
            raise CheckpointNotFound(text, id="no-such-subset", field="--dataset", found=subset)
        found = of_subset or found
    found = [name for name in found if split in _words(name)] or found
    kind = min((plain[name].suffix for name in found), key=list(READERS).index)
    return tuple(sorted(name for name in found if plain[name].suffix == kind))


def _words(name: str) -> set[str]:
    """Return the words of a name: `main/test-00000-of-00001.parquet` -> main, test, ..."""
    return set(re.split(r"[^\w]+", name))


def _from_hub(place: str, subset: str | None, split: str, *, is_subset_asked: bool) -> FoundFiles:
    """List a repository, choose files and download them. If the hub is unreachable, use its cache."""
    repo, _, revision = place.partition("@")
    wanted: dict[str, Any] = {"subset": subset, "split": split, "is_subset_asked": is_subset_asked}
    try:
        chosen = choose_files(_list_repo(repo, revision or None), place, **wanted)
        patterns = [glob.escape(name) for name in chosen]
        # Download by revision, not by commit, so that the cache records the branch's commit.
        with explained(repo, revision or None):
            folder = download_snapshot(repo, revision or None, patterns, repo_type="dataset")
    except HubUnreachable as error:
        folder = _cached(repo, revision or None, [], error)
        names = sorted(item.relative_to(folder).as_posix() for item in folder.rglob("*") if item.is_file())
        chosen = choose_files(names, place, **wanted)
        shards = [re.sub(r"\d+", "*", glob.escape(name)) for name in chosen]
        _cached(repo, revision or None, shards, error)
    return FoundFiles(paths=tuple(folder / name for name in chosen), names=chosen, commit=folder.name)


def _list_repo(repo: str, revision: str | None) -> list[str]:
    """Return the names of a repository's files."""
    from huggingface_hub import HfApi

    with explained(repo, revision):
        info = HfApi().dataset_info(repo, revision=revision)
    return [item.rfilename for item in info.siblings or ()]


def _cached(repo: str, revision: str | None, patterns: list[str], error: HubUnreachable) -> Path:
    """Return the cached copy, if the cache has all files of these patterns that it knows of."""
    try:
        with explained(repo, revision):
            return download_snapshot(repo, revision, patterns, repo_type="dataset", is_local=True)
    except CheckpointNotFound:
        hint = f"{error.hint}; or give a folder with the dataset: --dataset NAME=DIR"
        raise HubUnreachable(error.message, id=error.id, found=error.found, hint=hint) from error
