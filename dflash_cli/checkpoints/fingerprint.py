"""What tells one target from another, and one revision from the next, without reading all of it.

    headers    names, element types and shapes of all tensors
    rows       some rows of the embedding and the whole final norm, as they are stored

A target that is known by its headers alone has no rows. How the tensors are spread over files does not matter.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dflash_cli.checkpoints.target_copies import target_tensor
from dflash_runtime.checkpoint.files import TensorInfo
from dflash_runtime.checkpoint.layout import EMBEDDING
from dflash_runtime.checkpoint.pair import TargetSource

NUM_ROWS = 8
FINAL_NORM = "norm.weight"
MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TargetFingerprint:
    """SHA-256 digests of a target's headers and of some of its weights, None where only headers are at hand."""

    headers: str
    rows: str | None = None

    def difference(self, other: "TargetFingerprint") -> str | None:
        """What says that two targets differ, None where nothing does."""
        if self.headers != other.headers:
            return "other tensors"
        if None not in (self.rows, other.rows) and self.rows != other.rows:
            return "other weights in tensors of the same names and shapes"
        return None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "TargetFingerprint | None":
        """The fingerprint that a manifest holds, None where it holds none."""
        if not isinstance(value, Mapping) or not isinstance(value.get("headers"), str):
            return None
        rows = value.get("rows")
        return cls(value["headers"], rows if isinstance(rows, str) else None)


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


def _pieces(embedding: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Iterator[bytes]:
    """Rows spread over the embedding, the first and the last among them, and the final norm."""
    count = embedding.shape[0] if embedding.shape else 0
    row_bytes = embedding.num_bytes // count if count else 0
    for row in sorted({at * (count - 1) // (NUM_ROWS - 1) for at in range(NUM_ROWS)}) if count else ():
        yield _read(embedding, row * row_bytes, row_bytes)
    norms = [info for name, info in tensors.items() if name == FINAL_NORM or name.endswith(f"model.{FINAL_NORM}")]
    if norms:
        norm = min(norms, key=lambda info: len(info.name))
        yield _read(norm, 0, norm.num_bytes)


def _read(info: TensorInfo, begin: int, count: int) -> bytes:
    with info.file.open("rb") as stream:
        stream.seek(info.begin + begin)
        return stream.read(min(count, MOST_BYTES))
