"""Compare a draft's embedding or head with the target's, bit for bit in the draft's element type.

speculators 0.5 to 0.9 does not train them, so they are equal in a sound file. Rows are compared in pieces, so memory
does not grow with the vocabulary. torch is imported when a comparison runs.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.read_files import open_tensors, read_range

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 16 * 1024 * 1024


def find_difference(draft: DraftCheckpoint, name: str, target: TargetSource) -> str | None:
    """How the draft's `embed_tokens.weight` or `lm_head.weight` differs from the target's, None if they are equal."""
    mine = draft.checkpoint.tensors[name]
    theirs = target_tensor(target, name)
    if theirs is None:
        return f"the target has no {name} to compare with"
    ids = target_ids(draft, name)
    is_row_alike = len(mine.shape) == 2 and mine.shape[1:] == theirs.shape[1:]
    if not is_row_alike or (ids is None and mine.shape != theirs.shape):
        return f"{name} is {list(mine.shape)}, the target's is {list(theirs.shape)}"
    if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= theirs.shape[0]):
        return f"d2t maps outside the target's {theirs.shape[0]} ids"
    return next(_differences(replace(mine, name=draft.checkpoint.stored_rows(name).stored), theirs, ids), None)


def is_identity_map(checkpoint: Checkpoint, name: str) -> bool:
    """Whether d2t is all zeros, or t2d all ones, so that each id maps to itself."""
    info = checkpoint.tensors[name]
    data = read_range(info.file, info.begin, info.end, name)
    expected = b"\x00" if name == DRAFT_TO_TARGET else b"\x01"
    return data == expected * len(data)


def target_tensor(target: TargetSource, name: str) -> TensorInfo | None:
    """The target's embedding or head under any prefix, None if it is absent. A tied head is the embedding."""
    tensors = target.checkpoint.tensors
    for suffix in (name, EMBEDDING) if target.facts.tie_word_embeddings else (name,):
        found = [info for key, info in tensors.items() if key == suffix or key.endswith(f".{suffix}")]
        if found:
            return min(found, key=lambda info: len(info.name))
    return None


def target_ids(draft: DraftCheckpoint, name: str) -> "torch.Tensor | None":
    """The target's token id of each row of a reduced head, None for other tensors."""
    if name != HEAD or not draft.config.has_reduced_vocab:
        return None
    import torch

    offsets = draft.checkpoint.load(DRAFT_TO_TARGET).long()
    return torch.arange(len(offsets)) + offsets


def _differences(mine: TensorInfo, theirs: TensorInfo, ids: "torch.Tensor | None") -> Iterator[str]:
    """A sentence about the first row of each piece that differs. `ids` has the target's row of each row."""
    import torch

    with open_tensors(mine.file) as ours, open_tensors(theirs.file) as other:
        head, rows = ours.get_slice(mine.name), other.get_slice(theirs.name)
        for begin, end in _pieces(mine, theirs, ids):
            found = head[begin:end]
            if ids is None:
                expected = rows[begin:end]
            else:
                wanted = ids[begin:end]
                low = int(wanted.min())
                expected = rows[low : int(wanted.max()) + 1][wanted - low]
            same = found.contiguous().view(torch.uint8) == expected.to(found.dtype).contiguous().view(torch.uint8)
            bad = (~same.all(dim=1)).nonzero().flatten()
            if len(bad):
                row = begin + int(bad[0])
                at = row if ids is None else int(ids[row])
                yield f"row {row} of {mine.name} is not the target's row {at}"


def _pieces(mine: TensorInfo, theirs: TensorInfo, ids: "torch.Tensor | None") -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of the draft's rows. The target's rows with their ids span at most PIECE_BYTES."""
    count = mine.shape[0]
    row_bytes = max(1, theirs.num_bytes // max(1, theirs.shape[0]), mine.num_bytes // max(1, count))
    most = max(1, PIECE_BYTES // row_bytes)
    begin = 0
    while begin < count:
        end = min(count, begin + most)
        while ids is not None and end - begin > 1 and int(ids[begin:end].max() - ids[begin:end].min()) >= most:
            end = begin + (end - begin) // 2
        yield begin, end
        begin = end
