"""What tells one target from another, and one revision from the next, without reading all of it.

    headers    names, element types and shapes of all tensors
    rows       some rows of the embedding and the whole final norm, as they are stored

A target that is known by its headers alone has no rows. How the tensors are spread over files does not matter.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from dflash_cli.checkpoints.target_copies import target_tensor
from dflash_runtime.checkpoint.files import TensorInfo
from dflash_runtime.checkpoint.layout import EMBEDDING, HEAD
from dflash_runtime.checkpoint.pair import TargetSource

NUM_ROWS = 8
FINAL_NORM = "norm.weight"
MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TargetFingerprint:
    """SHA-256 digests that tell a target from others."""

    headers: Annotated[str, "of the tensors' names, types and shapes"]
    rows: Annotated[str | None, "of some of the weights; null if only headers were read"] = None

    def difference(self, other: "TargetFingerprint") -> str | None:
        """What says that two targets differ, None where nothing does."""
        if self.headers != other.headers:
            return "other tensors"
        if None not in (self.rows, other.rows) and self.rows != other.rows:
            return "other weights in tensors of the same names and shapes"
        return None


def target_fingerprint(target: TargetSource) -> TargetFingerprint:
    """Digest a target: headers, and at most a few MB of weights where they are on this machine.

    Raises:
        CheckpointError: its headers cannot be read.
    """
    tensors = target.checkpoint.tensors
    entries = sorted([name, info.dtype, list(info.shape)] for name, info in tensors.items())
    headers = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    embedding = target_tensor(target, EMBEDDING)
    if embedding is None or not embedding.file.is_file():
        return TargetFingerprint(headers)
    rows = hashlib.sha256()
    for piece in _pieces(embedding, tensors):
        rows.update(piece)
    return TargetFingerprint(headers, rows.hexdigest())


def digest_ends(target: TargetSource) -> str | None:
    """Digest rows of a target's embedding and of its head, all that drafts borrow of it; None where it has neither."""
    found = [info for info in (target_tensor(target, name) for name in (EMBEDDING, HEAD)) if info is not None]
    hashed = hashlib.sha256()
    for info in found:
        hashed.update(json.dumps([info.dtype, list(info.shape)]).encode())
        for piece in _spread_rows(info):
            hashed.update(piece)
    return hashed.hexdigest()[:16] if found else None


def _pieces(embedding: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Iterator[bytes]:
    """Rows of the embedding and the final norm."""
    yield from _spread_rows(embedding)
    norms = [info for name, info in tensors.items() if name == FINAL_NORM or name.endswith(f"model.{FINAL_NORM}")]
    if norms:
        norm = min(norms, key=lambda info: len(info.name))
        yield _read(norm, 0, norm.num_bytes)


def _spread_rows(info: TensorInfo) -> Iterator[bytes]:
    """Rows spread over a tensor, the first and the last among them."""
    count = info.shape[0] if info.shape else 0
    row_bytes = info.num_bytes // count if count else 0
    for row in sorted({at * (count - 1) // (NUM_ROWS - 1) for at in range(NUM_ROWS)}) if count else ():
        yield _read(info, row * row_bytes, row_bytes)


def _read(info: TensorInfo, begin: int, count: int) -> bytes:
    with info.file.open("rb") as stream:
        stream.seek(info.begin + begin)
        return stream.read(min(count, MOST_BYTES))
