"""Whether two tensors hold the same bytes, read in pieces so that memory does not grow with them."""

from dflash_cli.checkpoints.safetensors_writer import Advance, MadeTensor
from dflash_runtime.checkpoint.files import TensorInfo

PIECE_BYTES = 4 * 1024 * 1024


def same_bytes(one: TensorInfo, other: TensorInfo, advance: Advance | None = None) -> bool:
    """Whether two stored tensors hold the same bytes."""
    if one.num_bytes != other.num_bytes:
        return False
    with one.file.open("rb", buffering=0) as left, other.file.open("rb", buffering=0) as right:
        left.seek(one.begin)
        right.seek(other.begin)
        remaining = one.num_bytes
        while remaining:
            count = min(PIECE_BYTES, remaining)
            mine, theirs = left.read(count), right.read(count)
            if not mine or mine != theirs:
                return False
            remaining -= len(mine)
            if advance is not None:
                advance(len(mine))
    return True


def same_as_made(made: MadeTensor, other: TensorInfo, advance: Advance | None = None) -> bool:
    """Whether a stored tensor holds the bytes that `made` yields when it is made again."""
    if made.num_bytes != other.num_bytes:
        return False
    with other.file.open("rb") as stream:
        stream.seek(other.begin)
        for piece in made.pieces():
            if stream.read(len(piece)) != piece:
                return False
            if advance is not None:
                advance(len(piece))
    return True
