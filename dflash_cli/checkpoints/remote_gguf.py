"""A GGUF file on the hub: which file of a repository is meant, and its header without its weights."""

import re
from pathlib import PurePosixPath

from dflash_cli.checkpoints.remote_headers import RemoteRepo
from dflash_runtime.checkpoint.stored.gguf import CHUNK_BYTES, SUFFIX, TYPE_NUMBERS, GgufHeader, read_gguf_stream
from dflash_runtime.checkpoint.stored.gguf_checkpoint import GgufCheckpoint, draft_in_gguf
from dflash_runtime.checkpoint.stored.gguf_files import first_names, join_parts, missing_part, part_names
from dflash_runtime.errors import UsageError

BETWEEN = re.compile(r"[-.\s/]+")
"""Separates the words of a file's name, and of its folders. An underscore is inside a word, as in Q4_K_M."""


def choose_gguf(repo: RemoteRepo, wanted: str | None) -> str | None:
    """Return the GGUF file that is meant, None for a repository of safetensors if `wanted` is None.

    `wanted` is the name of a file, or a word of one name, such as the quantisation. A file in a folder has a path as
    its name. Of a split draft the first file is meant, by the name of any of its files.

    Raises:
        UsageError: no file, or several files.
    """
    names = first_names(name for name in repo.files if ".." not in PurePosixPath(name).parts)
    if wanted is None:
        found = [] if "config.json" in repo.files else names
    else:
        found = [name for name in names if wanted in part_names(name)] or [
            name for name in names if _has_word(name, wanted)
        ]
    if len(found) > 1:
        raise UsageError(
            f"{repo.path} has several GGUF files{'' if wanted is None else f' for {wanted}'}: {', '.join(found)}",
            id="several-gguf-files", field="--gguf", found=found, expected="one file",
            hint=" or ".join(f"--gguf {_short_name(name, names)}" for name in found),
        )  # fmt: skip
    if wanted is not None and not found:
        there = ", ".join(names) or "no GGUF file"
        raise UsageError(
            f"{repo.path} has no GGUF file {wanted}", id="gguf-not-in-repo", field="--gguf", found=wanted,
            expected=f"a name, or a word of one name, of: {there}" if names else "a repository with GGUF files",
            hint=f"--gguf {_short_name(names[0], names)}" if names else "leave out --gguf",
        )  # fmt: skip
    return found[0] if found else None


def open_remote_gguf(repo: RemoteRepo, name: str) -> GgufCheckpoint:
    """Read the header of a GGUF file on the hub, of a split draft of all its files. Its tensors cannot be loaded.

    Raises:
        CheckpointError: the header is damaged, or a file of a split draft is absent.
        UnknownFormat: the file is not a draft.
        CheckpointNotFound: see `RemoteRepo.fetch`.
    """
    for part in part_names(name):
        if part not in repo.files:
            raise missing_part(repo.path / part)
    folder = PurePosixPath(name).parent
    header = join_parts(_read_part(repo, name), lambda part: _read_part(repo, str(folder / part)))
    return draft_in_gguf(repo.path, header)


def _read_part(repo: RemoteRepo, name: str) -> GgufHeader:
    first, size = repo.fetch(name, 0, CHUNK_BYTES)
    repo.traffic.whole_bytes += size
    return read_gguf_stream(repo.path / name, _RemoteFile(repo, name, first, size), size)


class _RemoteFile:
    """Reads a file on the hub from its first byte on. `first` are the bytes that were fetched already."""

    def __init__(self, repo: RemoteRepo, name: str, first: bytes, size: int) -> None:
        self._repo, self._name, self._first, self._size = repo, name, first, size
        self._at = 0

    def read(self, count: int) -> bytes:
        begin, end = self._at, min(self._at + count, self._size)
        data = self._first[begin:end]
        if begin + len(data) < end:
            data += self._repo.fetch(self._name, begin + len(data), end)[0]
        self._at += len(data)
        return data


def _has_word(name: str, wanted: str) -> bool:
    """Whether a file's name has this word, or words, between its separators."""
    words, others = (BETWEEN.split(text.removesuffix(SUFFIX).lower()) for text in (name, wanted))
    return any(words[at : at + len(others)] == others for at in range(len(words)))


def _short_name(name: str, names: list[str]) -> str:
    """Return the quantisation in a file's name if it names no other file, otherwise the name."""
    words = [word for word in BETWEEN.split(name.removesuffix(SUFFIX)) if _is_type(word)]
    return next((word for word in words if sum(_has_word(other, word) for other in names) == 1), name)


def _is_type(word: str) -> bool:
    """Whether a word is an element type of GGUF, or begins with one, as Q4_K_M does."""
    return any(word.upper() == kind or word.upper().startswith(f"{kind}_") for kind in TYPE_NUMBERS)
