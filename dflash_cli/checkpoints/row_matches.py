"""Find copies of the target's rows in the wrong places of a draft's head or embedding.

torch is imported when a comparison runs.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.target_copies import target_ids, target_tensor
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.read_files import open_tensors

if TYPE_CHECKING:
    import torch

PIECE_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Misplaced:
    """Rows of a draft that equal the target's rows of other ids.

    `count` of `num_rows` rows are misplaced. The first one is `row`, which holds `found_id` instead of `expected_id`.
    """

    count: int
    num_rows: int
    row: int
    expected_id: int
    found_id: int


def find_misplaced(draft: DraftCheckpoint, name: str, target: TargetSource) -> Misplaced | None:
    """The misplaced rows of the draft's `embed_tokens.weight` or `lm_head.weight`, or None."""
    mine, theirs = draft.checkpoint.tensors[name], target_tensor(target, name)
    if theirs is None or len(mine.shape) != 2 or mine.shape[1:] != theirs.shape[1:]:
        return None
    ours = draft.checkpoint.load(name)
    kept = target_ids(draft, name)
    ids = range(len(ours)) if kept is None else kept.tolist()
    by_digest: dict[bytes, int] = {}
    expected: dict[int, bytes] = {}
    wanted = set(ids)
    for token, digest in _digests(theirs, ours.dtype):
        by_digest.setdefault(digest, token)
        if token in wanted:
            expected[token] = digest
    bad = []
    for row, digest in enumerate(map(_digest, ours)):
        if digest != expected.get(ids[row]) and digest in by_digest:
            bad.append((row, ids[row], by_digest[digest]))
    return Misplaced(len(bad), len(ours), *bad[0]) if bad else None


def _digests(info: TensorInfo, dtype: "torch.dtype") -> Iterator[tuple[int, bytes]]:
    """Number and digest of each row of a stored tensor, converted to `dtype`."""
    with open_tensors(info.file) as stream:
        rows = stream.get_slice(info.name)
        for begin in range(0, info.shape[0], PIECE_ROWS):
            piece = rows[begin : begin + PIECE_ROWS].to(dtype)
            yield from enumerate(map(_digest, piece), start=begin)


def _digest(row: "torch.Tensor") -> bytes:
    import torch

    return hashlib.blake2b(row.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
