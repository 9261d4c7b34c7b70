"""Which checkpoint a result is of: its name without a path of this machine, its commit on the hub, and a digest.

The digest is over what decides a result: config, tokenizer and template files, the headers of the weights, and the
weights themselves; of large ones a sample of every tensor, which a further step of training changes.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dflash_cli.checkpoints.references import TINY, is_bundled
from dflash_runtime.checkpoint.files import Checkpoint

TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".pt")
NOT_DECIDING = ("conversion.json", "requirements.txt")
WHOLE_BYTES = 512 * 2**20
"""Weights up to this size are read to the end."""
SAMPLE_BYTES = 16 * 2**10
SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One checkpoint: its name, and a digest that tells it from every other."""

    name: Annotated[str, "without a path of the machine"]
    digest: Annotated[str, "of config, tokenizer, template and weights; large weights are sampled"]
    commit: Annotated[str | None, "on the hub"] = None
    modified_ns: Annotated[int | None, "time of the weights, if they were sampled and no commit names them"] = None


def identify(checkpoint: Checkpoint, reference: str) -> Identity:
    """The identity of a checkpoint in a directory, as `reference` names it."""
    name, commit = name_and_commit(checkpoint.path, reference)
    weights = checkpoint.weight_files
    is_whole = sum(file.stat().st_size for file in weights) <= WHOLE_BYTES
    hashed = hashlib.sha256()
    for label, part in _parts(checkpoint, is_whole=is_whole):
        hashed.update(f"{label}\0{len(part)}\0".encode())
        hashed.update(part)
    return Identity(
        name=name,
        commit=commit,
        digest=hashed.hexdigest()[:16],
        modified_ns=None if is_whole or commit else max(file.stat().st_mtime_ns for file in weights),
    )


def name_and_commit(directory: Path, reference: str) -> tuple[str, str | None]:
    """What a checkpoint is called without a path of this machine, and its commit where the hub's cache holds it."""
    path = directory.resolve()
    snapshot = SNAPSHOT.search(str(path))
    if snapshot is not None:
        return snapshot["repo"].replace("--", "/", 1), snapshot["commit"]
    return reference if is_bundled(reference) else path.name, None


def deciding_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that decide a result: config, tokenizer, template and weights."""
    return [*_text_files(checkpoint.path), *checkpoint.weight_files]


def is_tiny(identity: Identity) -> bool:
    """Whether it is of the bundled pair."""
    return identity.name.partition(":")[0] == TINY


def _text_files(path: Path) -> list[Path]:
    return [
        file
        for file in sorted(path.iterdir())
        if file.suffix in TEXT_SUFFIXES and file.name not in NOT_DECIDING and file.is_file()
    ]


def _parts(checkpoint: Checkpoint, *, is_whole: bool) -> Iterator[tuple[str, bytes]]:
    for file in _text_files(checkpoint.path.resolve()):
        yield file.name, file.read_bytes()
    for file in checkpoint.weight_files:
        yield file.name, str(file.stat().st_size).encode()
        with file.open("rb") as stream:
            yield "header", stream.read(min(info.begin for info in checkpoint.tensors.values() if info.file == file))
            if is_whole:
                while block := stream.read(2**20):
                    yield "data", block
                continue
            for name, info in sorted(checkpoint.tensors.items()):
                if info.file == file:
                    stream.seek(info.begin)
                    yield name, stream.read(min(SAMPLE_BYTES, info.num_bytes))
