"""Compute `t2d` from `d2t`, the map of a reduced draft.

`d2t` [D] holds offsets: row i of the reduced head proposes the target's id i + d2t[i]. `t2d` [V] is true for these ids.
"""

from array import array
from collections.abc import Iterator, Sequence
from sys import byteorder

from dflash_cli.checkpoints.byte_comparison import same_bytes
from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_cli.formats.dialect import Format
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, TARGET_TO_DRAFT
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import CheckpointError
from dflash_runtime.notices import Notice
from dflash_runtime.read_files import read_range

TYPE_CODES = {"I64": "q", "I32": "i", "I16": "h", "U64": "Q", "U32": "I", "U16": "H", "U8": "B", "I8": "b"}


def with_inverse(
    draft: DraftCheckpoint, tensors: Sequence[WrittenTensor], result: Format, *, keeps_stored: bool = False
) -> tuple[list[WrittenTensor], list[Notice]]:
    """The tensors with a `t2d` that follows from `d2t`, if the result's readers ask for `t2d`; and warnings.

    With `keeps_stored` a stored `t2d` stays even if it contradicts `d2t`.

    Raises:
        CheckpointError: see `read_ids`.
    """
    maps = {tensor.name: tensor for tensor in tensors if tensor.name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT)}
    forward, inverse = maps.get(DRAFT_TO_TARGET), maps.get(TARGET_TO_DRAFT)
    is_kept = keeps_stored and inverse is not None
    if not result.derives_inverse or not isinstance(forward, TensorInfo) or is_kept:
        return list(tensors), []
    made = _make_inverse(forward, draft.config.vocab_size)
    if isinstance(inverse, TensorInfo) and inverse.shape == made.shape and same_bytes(made, inverse):
        return list(tensors), []
    others = [tensor for tensor in tensors if tensor is not inverse]
    text = f"{TARGET_TO_DRAFT} contradicts {DRAFT_TO_TARGET}, which engines use, and is computed from it"
    return [*others, made], [] if inverse is None else [Notice(text, id="inverse-map-contradicts")]


def read_ids(forward: TensorInfo, vocab_size: int) -> list[int]:
    """The target's token id of each row of a reduced head.

    Raises:
        CheckpointError: `d2t` is not a list of integers, or names an id outside the vocabulary or twice.
    """
    code = TYPE_CODES.get(forward.dtype)
    if code is None or len(forward.shape) != 1:
        raise CheckpointError(
            id="id-map-form",
            path=forward.file,
            field=DRAFT_TO_TARGET,
            found=f"{forward.dtype} {list(forward.shape)}",
            expected="a list of integers",
        )
    offsets = array(code, read_range(forward.file, forward.begin, forward.end, DRAFT_TO_TARGET))
    if byteorder == "big":
        offsets.byteswap()
    ids = [row + offset for row, offset in enumerate(offsets)]
    if any(not 0 <= found < vocab_size for found in ids):
        raise CheckpointError(
            f"{DRAFT_TO_TARGET} names an id outside the vocabulary of {vocab_size}",
            id="id-map-outside",
            path=forward.file,
            field=DRAFT_TO_TARGET,
            expected=f"ids from 0 to {vocab_size - 1}",
        )
    if len(set(ids)) < len(ids):
        raise CheckpointError(
            f"{DRAFT_TO_TARGET} names an id twice",
            id="id-map-repeats",
            path=forward.file,
            field=DRAFT_TO_TARGET,
            expected="each id once",
        )
    return ids


def _make_inverse(forward: TensorInfo, vocab_size: int) -> MadeTensor:
    flags = bytearray(vocab_size)
    for found in read_ids(forward, vocab_size):
        flags[found] = 1

    def pieces() -> Iterator[bytes]:
        yield bytes(flags)

    return MadeTensor(TARGET_TO_DRAFT, "BOOL", (vocab_size,), forward.file, pieces)
