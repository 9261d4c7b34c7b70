"""Choose the files of a draft's folder that go to the hub, and refuse pickles, secrets and files of unknown use."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dflash_cli.checkpoints.torch_zip import read_torch_zip
from dflash_cli.conversion.side_files import MANIFEST_FILE, MASK_PICKLE, PAPERS, SETTINGS, TOKENIZER
from dflash_cli.terminal.environment import SECRET_TEXT
from dflash_runtime.checkpoint.stored.files import INDEX_SUFFIX, MASK_FILE, PICKLE_SUFFIXES, refuse_escape
from dflash_runtime.checkpoint.stored.gguf_checkpoint import open_stored
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.phrases import plural
from dflash_runtime.read_files import read_all, reading

PROFILE = "speculation_profile.json"
CARD = "README.md"
READ = ("config.json", MANIFEST_FILE, MASK_PICKLE, MASK_FILE, PROFILE, *PAPERS, *SETTINGS, *TOKENIZER)
"""Patterns of the files that readers of a draft look for, besides its weights."""
KNOWN = (*READ, ".gitattributes", "*.png", "*.svg")
"""Patterns of the files that are published: files for readers, and pictures in a model card."""
SKIPPED = (".git", ".cache", "__pycache__", ".DS_Store")
"""Names that tools of this machine write. They are left out in silence."""
PICKLE_HEADS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
ARCHIVE_HEAD = b"PK\x03\x04"
VOCABULARIES = ("tokenizer.json", "vocab.*", "merges.txt", "added_tokens.json", "*.model", "*.tiktoken", "*.png")
"""Files in which any text may stand, so that a search for secrets would find texts of the vocabulary."""
MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Files up to this size are searched for secrets, unless they hold weights."""
MOST_LISTED = 8
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file to publish: its name on the hub, and its path here or its bytes."""

    name: str
    content: Path | bytes

    @property
    def num_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def digest(self, *, is_lfs: bool) -> str:
        """The hash by which the hub names the content: SHA-256 of a large file, the git hash of another file."""
        found = hashlib.sha256() if is_lfs else hashlib.sha1(b"blob %d\0" % self.num_bytes)  # git's own hash
        if isinstance(self.content, bytes):
            found.update(self.content)
        else:
            with reading(self.content) as stream:
                while part := stream.read(CHUNK_BYTES):
                    found.update(part)
        return found.hexdigest()


def choose_files(folder: Path, *, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[LocalFile]:
    """The files of a draft's folder to publish, by name. `include` and `exclude` are patterns of names.

    Raises:
        UsageError: a file is of unknown use, or holds a secret; or `exclude` leaves out weights or the config.
        UnsupportedError: a file is a pickle, other than a mask embedding that can be read without unpickling.
        CheckpointError: a link leaves the folder.
    """
    stored = open_stored(folder)
    weights = {item.name for item in stored.weight_files}
    names = [
        name
        for name in sorted(item.name for item in folder.iterdir())
        if name not in SKIPPED and not matches(name, exclude)
    ]
    left_out = sorted({*weights, stored.config_path.name} - {*names})
    if left_out:
        raise UsageError(
            f"leaves out {_listed(left_out)}, without which nobody can read the draft", id="draft-left-out",
            path=folder, field="--exclude", found=left_out,
        )  # fmt: skip
    _refuse_pickles(folder, names)
    known = (*KNOWN, *weights, f"*{INDEX_SUFFIX}", *include)
    other = [name for name in names if (folder / name).is_dir() or not matches(name, known)]
    if other:
        raise UsageError(
            f"contains {_listed(other)}, which readers of a draft do not look for", id="surprising-files", path=folder,
            found=other, hint=f"--exclude '{','.join(other[:MOST_LISTED])}' leaves them out; --include uploads files",
        )  # fmt: skip
    for name in names:
        refuse_escape(folder, folder / name)
        _refuse_secret(folder / name, is_text=name not in weights and not matches(name, VOCABULARIES))
    return [LocalFile(name, folder / name) for name in names]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file's name has one of these patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f" and {plural(rest, 'more file')}" if rest > 0 else "")


def _refuse_pickles(folder: Path, names: Sequence[str]) -> None:
    """Refuse pickles by suffix and by content."""
    found = [name for name in names if (folder / name).is_file() and _is_pickle(folder / name)]
    if MASK_PICKLE in found:
        read_torch_zip(folder / MASK_PICKLE)
        found.remove(MASK_PICKLE)
    if found:
        raise UnsupportedError(
            f"contains pickles, which run code when they are read: {_listed(found)}", id="pickle", path=folder,
            found=found, hint=f"--exclude '{','.join(found[:MOST_LISTED])}' leaves them out",
        )  # fmt: skip


def _is_pickle(file: Path) -> bool:
    with reading(file) as stream:
        head = stream.read(len(ARCHIVE_HEAD))
    return file.suffix in PICKLE_SUFFIXES or head.startswith((*PICKLE_HEADS, ARCHIVE_HEAD))


def _refuse_secret(file: Path, *, is_text: bool) -> None:
    """Refuse a text with a token of a hub or an API. The message does not repeat the token."""
    if not is_text or file.stat().st_size > MAX_TEXT_BYTES:
        return
    for number, line in enumerate(read_all(file).decode(errors="replace").splitlines(), start=1):
        if SECRET_TEXT.search(line):
            raise UsageError(
                "holds an access token or a password", id="secret-in-file", path=f"{file}:{number}",
                hint="remove it from the file, and revoke it if others could read it",
            )  # fmt: skip
