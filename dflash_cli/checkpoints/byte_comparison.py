"""Compare the bytes of two tensors in pieces, so that memory does not grow with the tensors."""

from collections.abc import Iterator

from dflash_cli.checkpoints.safetensors_writer import Advance, MadeTensor, WrittenTensor
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.read_files import reading

PIECE_BYTES = 4 * 1024 * 1024


def same_bytes(one: WrittenTensor, stored: TensorInfo, advance: Advance = lambda num_bytes: None) -> bool:
    """Whether a tensor, stored or computed, has the same bytes as a stored tensor."""
    remaining = one.num_bytes
    if remaining != stored.num_bytes:
        return False
    with reading(stored.file) as stream:
        stream.seek(stored.begin)
        for piece in one.pieces() if isinstance(one, MadeTensor) else _pieces(one):
            if stream.read(len(piece)) != piece:
                return False
            remaining -= len(piece)
            advance(len(piece))
    return remaining == 0


def _pieces(info: TensorInfo) -> Iterator[bytes]:
    """The bytes of a stored tensor; fewer if its file has become shorter."""
    remaining = info.num_bytes
    with reading(info.file) as stream:
        stream.seek(info.begin)
        while piece := stream.read(min(PIECE_BYTES, remaining)):
            remaining -= len(piece)
            yield piece
