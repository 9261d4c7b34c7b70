"""Write safetensors files. The bytes of tensors are copied from file to file and never decoded.

Layout: u64 header length, JSON header padded with spaces so that the data starts at a multiple of 8, data without
holes. Source: huggingface/safetensors README, "Format".
"""

import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_runtime.checkpoint.stored.gguf_files import find_gguf
from dflash_runtime.checkpoint.stored.safetensors_header import DTYPE_BYTES, TensorInfo, read_header
from dflash_runtime.errors import CheckpointError
from dflash_runtime.read_files import reading
from dflash_runtime.whole_files import NotWritten

CHUNK_BYTES = 64 * 1024 * 1024
"""The most bytes that one system call moves. Progress is reported after each call."""

BUFFER_BYTES = 8 * 1024 * 1024
"""Size of the copy buffer, used if the system cannot copy from file to file itself."""

ALIGNMENT = 8
PREFIX_BYTES = 8
PAGE_BYTES = 4096
METADATA = {"format": "pt"}

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers for a full disk, an exceeded quota of the user, or an exceeded limit on the size of a file."""

Advance = Callable[[int], None]
"""Called after each copy with the number of bytes copied."""

Move = Callable[[int, int, int, int], int]
"""`move(source, out, position, count)` appends up to `count` bytes to `out` and returns the number of bytes."""


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A computed tensor. Each call of `pieces` computes its bytes, from data in `file`. `why` says what changed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    pieces: Callable[[], Iterator[bytes]]
    why: str = ""

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape) * DTYPE_BYTES[self.dtype])


WrittenTensor = TensorInfo | MadeTensor


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [begin, end) of a source file."""

    file: Path
    begin: int
    end: int


def write_tensors(destination: Path, tensors: Iterable[WrittenTensor], advance: Advance) -> None:
    """Write tensors into a new file, byte for byte.

    The file has the metadata of the source's files. Wider element types come first, so that every tensor is aligned to
    its type. Tensors of the same width keep the source's order, so that neighbours are copied together.
    """
    ordered = sorted(tensors, key=_order)
    metadata: dict[str, str] = {}
    for file in sorted({info.file for info in ordered}):
        if find_gguf(file) is None:
            read_header(file, metadata)
    with destination.open("xb", buffering=0) as out:
        runs = join_extents(ordered)
        write_all(out.fileno(), encode_header(ordered, page_offset=_page_offset(runs), metadata=metadata))
        for run in runs:
            if isinstance(run, MadeTensor):
                for piece in run.pieces():
                    write_all(out.fileno(), piece)
                    advance(len(piece))
            else:
                copy_extent(run, out.fileno(), advance)


def encode_header(
    tensors: Sequence[WrittenTensor], *, page_offset: int | None = None, metadata: Mapping[str, str] = METADATA
) -> bytes:
    """The length prefix and the header of a file with these tensors in this order.

    With `page_offset`, a multiple of ALIGNMENT, the data starts at this offset within a memory page.
    """
    entries: dict[str, object] = {"__metadata__": {**metadata, **METADATA}}
    position = 0
    for info in tensors:
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [position, position + info.num_bytes],
        }
        position += info.num_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if page_offset is not None:
        text += b" " * ((page_offset - len(text) - PREFIX_BYTES) % PAGE_BYTES)
    return struct.pack("<Q", len(text)) + text


def join_extents(tensors: Sequence[WrittenTensor]) -> list[Extent | MadeTensor]:
    """The extents of the tensors in order. Neighbours in one file are merged."""
    runs: list[Extent | MadeTensor] = []
    for info in tensors:
        last = runs[-1] if runs else None
        if isinstance(info, MadeTensor):
            runs.append(info)
        elif isinstance(last, Extent) and last.file == info.file and last.end == info.begin:
            runs[-1] = Extent(info.file, last.begin, info.end)
        elif info.num_bytes:
            runs.append(Extent(info.file, info.begin, info.end))
    return runs


def _page_offset(runs: Sequence[Extent | MadeTensor]) -> int | None:
    """The offset of the first extent within a memory page of its source, so that whole pages can be copied."""
    first = runs[0] if runs else None
    if not isinstance(first, Extent) or first.begin % ALIGNMENT:
        return None
    return first.begin % PAGE_BYTES


def copy_extent(extent: Extent, out: int, advance: Advance) -> None:
    """Append an extent to `out`, inside the system's kernel if possible.

    Raises:
        CheckpointError: the source file has become shorter.
        FileUnreadable: the system does not give the source.
        NotWritten: see `write_all`.
    """
    with reading(extent.file) as stream:
        _copy(stream.fileno(), out, extent, advance)


def _copy(source: int, out: int, extent: Extent, advance: Advance) -> None:
    """Append an extent of the open file `source` to `out`; see `copy_extent`."""
    moves = list(MOVES)
    position = extent.begin
    while position < extent.end:
        try:
            moved = moves[0](source, out, position, min(CHUNK_BYTES, extent.end - position))
        except OSError as error:
            if error.errno in FULL:
                raise NotWritten(error.errno, error.strerror) from error
            if len(moves) == 1:
                raise
            moves.pop(0)
            continue
        if moved == 0 and len(moves) > 1:  # some file systems return 0 instead of an error
            moves.pop(0)
            continue
        if moved == 0:
            raise CheckpointError(
                f"ended at byte {position}, expected {extent.end}",
                id="source-shrank",
                path=extent.file,
                found=position,
                expected=f"{extent.end} bytes",
            )
        position += moved
        advance(moved)


def write_all(out: int, data: bytes) -> None:
    """Append all bytes, in as many calls as the system needs.

    Raises:
        NotWritten: the disk is full, or another error of the system.
    """
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(out, view) :]
    except OSError as error:
        raise NotWritten(error.errno, error.strerror) from error


def _copy_file_range(source: int, out: int, position: int, count: int) -> int:
    return os.copy_file_range(source, out, count, position)


def _sendfile(source: int, out: int, position: int, count: int) -> int:
    return os.sendfile(out, source, position, count)


def _read_and_write(source: int, out: int, position: int, count: int) -> int:
    data = os.pread(source, min(count, BUFFER_BYTES), position)
    write_all(out, data)
    return len(data)


MOVES: tuple[Move, ...] = (
    *([_copy_file_range] if hasattr(os, "copy_file_range") else []),
    *([_sendfile] if hasattr(os, "sendfile") else []),
    _read_and_write,
)
"""The ways to copy bytes, the fastest first. If one fails, the next is used. The last tells which file fails."""


def _order(info: WrittenTensor) -> tuple[float, str, int]:
    begin = info.begin if isinstance(info, TensorInfo) else 0
    return -DTYPE_BYTES[info.dtype], str(info.file), begin
