"""Identify checkpoints in results and conversions: names without a path of this machine, and digests."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dflash_cli.checkpoints.references import TINY_TARGET_NAME, is_bundled, is_hub_id, tiny_directory
from dflash_cli.checkpoints.target_copies import target_tensor
from dflash_runtime.checkpoint.layout import EMBEDDING, HEAD
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.stored.digests import digest_files, digest_headers, digest_rows, is_read_whole
from dflash_runtime.checkpoint.stored.files import Checkpoint

FINAL_NORM = "norm.weight"
SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The name of a checkpoint, and a digest that differs from the digest of any other checkpoint."""

    name: Annotated[str, "without a path of the machine"]
    digest: Annotated[str, "of config, tokenizer, template and weights; large weights are sampled"]
    commit: Annotated[str | None, "on the hub"] = None
    modified_ns: Annotated[int | None, "time of the weights, if they were sampled and no commit names them"] = None


def identify(checkpoint: Checkpoint, reference: str) -> Identity:
    """The identity of a checkpoint in a directory, which `reference` names if the checkpoint is bundled."""
    name, commit = name_and_commit(checkpoint.path, reference)
    is_dated = commit is None and not is_read_whole(checkpoint)
    return Identity(
        name=name,
        commit=commit,
        digest=digest_files(checkpoint),
        modified_ns=max(file.stat().st_mtime_ns for file in checkpoint.weight_files) if is_dated else None,
    )


def name_and_commit(directory: Path, reference: str = "") -> tuple[str, str | None]:
    """A checkpoint's name without a path of this machine, and its commit if it is in the hub's cache."""
    path = directory.resolve()
    snapshot = SNAPSHOT.search(str(path))
    if snapshot is not None:
        return snapshot["repo"].replace("--", "/", 1), snapshot["commit"]
    return reference if is_bundled(reference) else path.name, None


def published_name(reference: str) -> str | None:
    """The name by which others know a target: its hub id without a revision, None for a directory of the user.

    A folder of the hub's cache, here or on another machine, stands for its hub id. The bundled target has a name too.
    """
    path = Path(reference)
    folder = path.resolve() if path.exists() else path
    snapshot = SNAPSHOT.search(folder.as_posix())
    if is_bundled(reference) or folder == (tiny_directory() / "target").resolve():
        return TINY_TARGET_NAME
    if snapshot is not None:
        return snapshot["repo"].replace("--", "/", 1)
    return reference.partition("@")[0] if is_hub_id(reference) else None


def may_name_one_target(first: str, second: str) -> bool:
    """Whether two names may stand for one target: they are published under one name, or their last parts are equal."""
    names = [(published_name(item) or item.rstrip("/")).casefold() for item in (first, second)]
    return len({name.rpartition("/")[2] for name in names}) == 1


@dataclass(frozen=True, slots=True)
class TargetFingerprint:
    """Digests of a target's headers and of some of its weights. They do not depend on how files hold the tensors.

    `rows` is None if only the headers are on this machine.
    """

    headers: Annotated[str, "of the tensors' names, types and shapes"]
    rows: Annotated[str | None, "of some of the weights; null if only headers were read"] = None

    def difference(self, other: "TargetFingerprint") -> str | None:
        """How two targets differ, None if no difference is known."""
        if self.headers != other.headers:
            return "other tensors"
        if None not in (self.rows, other.rows) and self.rows != other.rows:
            return "other weights in tensors of the same names and shapes"
        return None


def target_fingerprint(target: TargetSource) -> TargetFingerprint:
    """The digests of a target's headers and, if its weights are local, of its final norm and rows of its embedding.

    Raises:
        CheckpointError: the headers cannot be read.
    """
    tensors = target.checkpoint.tensors
    embedding = target_tensor(target, EMBEDDING)
    if embedding is None or not embedding.file.is_file():
        return TargetFingerprint(digest_headers(tensors))
    norms = [info for name, info in tensors.items() if name == FINAL_NORM or name.endswith(f"model.{FINAL_NORM}")]
    norms.sort(key=lambda info: len(info.name))
    return TargetFingerprint(digest_headers(tensors), digest_rows([embedding, *norms[:1]]))


def digest_ends(target: TargetSource) -> str | None:
    """The digest of rows of a target's embedding and head, which drafts borrow. None if the target has neither."""
    found = [info for info in (target_tensor(target, name) for name in (EMBEDDING, HEAD)) if info is not None]
    return digest_rows(found, with_shapes=True)[:16] if found else None
