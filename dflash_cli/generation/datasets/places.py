"""Which files of a folder or of a hub repository hold the rows that are asked for."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.download import download_snapshot
from dflash_cli.checkpoints.hub import HubUnreachable, explained
from dflash_cli.checkpoints.references import HUB_ID
from dflash_cli.generation.datasets.table_files import READERS
from dflash_runtime.checkpoint.digests import hash_files
from dflash_runtime.errors import CheckpointNotFound

NO_ROWS = frozenset(("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json", "config.json"))
"""Files beside the rows that are JSON as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The files that were chosen, and of a repository the commit they are of."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    commit: str | None = None

    @property
    def sha256(self) -> str:
        """A hash of all their bytes, in order."""
        return hash_files(self.paths)


def find_files(place: str, *, subset: str | None, split: str, is_subset_asked: bool) -> FoundFiles:
    """The files of a folder, a file, or `org/repo[@revision]` on the hub.

    Raises:
        CheckpointNotFound: nothing there, or the hub says no; or no file is of the subset that was asked for.
    """
    path = Path(place).expanduser()
    if not path.exists() and HUB_ID.match(place):
        return _from_hub(place, subset, split, is_subset_asked=is_subset_asked)
    if path.is_file() and path.suffix in READERS:
        return FoundFiles(paths=(path,), names=(path.name,))
    if not path.is_dir():
        raise CheckpointNotFound(
            f"{place}: no folder, no file of rows ({', '.join(READERS)}), and not a hub repository",
            hint="--dataset NAME=PLACE takes a folder, a file, or org/repo[@revision]",
        )
    names = sorted(item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file())
    chosen = choose_files(names, place, subset=subset, split=split, is_subset_asked=is_subset_asked)
    return FoundFiles(paths=tuple(path / name for name in chosen), names=chosen)


def choose_files(
    names: Sequence[str], place: str, *, subset: str | None, split: str, is_subset_asked: bool
) -> tuple[str, ...]:
    """Those that a subset and a split are kept in, as far as names say, all shards of one kind of file.

    Raises:
        CheckpointNotFound: no file of rows, or none of a subset that was asked for.
    """
    found = [name for name in names if Path(name).suffix in READERS and Path(name).name not in NO_ROWS]
    if not found:
        raise CheckpointNotFound(f"{place}: holds no file of rows ({', '.join(READERS)})")
    if subset is not None:
        alone = [name for name in found if Path(name).stem == subset]
        of_subset = alone or [name for name in found if subset in _words(name)]
        if is_subset_asked and not of_subset:
            raise CheckpointNotFound(f"{place}: no file of {subset}; found {', '.join(found[:8])}")
        found = of_subset or found
    found = [name for name in found if split in _words(name)] or found
    kind = min((Path(name).suffix for name in found), key=list(READERS).index)
    return tuple(sorted(name for name in found if Path(name).suffix == kind))


def _words(name: str) -> set[str]:
    """`main/test-00000-of-00001.parquet` -> main, test, ..."""
    return set(re.split(r"[^\w]+", name))


def _from_hub(place: str, subset: str | None, split: str, *, is_subset_asked: bool) -> FoundFiles:
    """List a repository, choose, and download what was chosen; where the hub is not reached, look in its cache."""
    repo, _, revision = place.partition("@")
    wanted: dict[str, Any] = {"subset": subset, "split": split, "is_subset_asked": is_subset_asked}
    try:
        chosen = choose_files(_list_repo(repo, revision or None), place, **wanted)
        patterns = [glob.escape(name) for name in chosen]
        # Not by the listed commit: the cache would not know then which commit a branch is at.
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
    """The names of a repository's files."""
    from huggingface_hub import HfApi

    with explained(repo, revision):
        info = HfApi().dataset_info(repo, revision=revision)
    return [item.rfilename for item in info.siblings or ()]


def _cached(repo: str, revision: str | None, patterns: list[str], error: HubUnreachable) -> Path:
    """The copy in the hub's cache, which has to have all files of these patterns, as far as the cache knows them."""
    try:
        with explained(repo, revision):
            return download_snapshot(repo, revision, patterns, repo_type="dataset", is_local=True)
    except CheckpointNotFound:
        hint = f"{error.hint}; or give a folder that holds it: --dataset NAME=DIR"
        raise HubUnreachable(error.message, hint=hint) from error
