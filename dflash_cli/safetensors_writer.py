"""Write safetensors files by moving bytes: tensors are copied from file to file and never decoded.

Layout: u64 header length, JSON header padded with spaces so that the data starts at a multiple of 8, data without
holes. Source: huggingface/safetensors README, "Format". Knows nothing about drafts.
"""

import json
import os
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_runtime.checkpoint import DTYPE_BYTES, TensorInfo

CHUNK_BYTES = 8 * 1024 * 1024
ALIGNMENT = 8
METADATA = {"format": "pt"}

Advance = Callable[[int], None]
"""Called with the number of bytes that have just been copied."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of one source file."""

    file: Path
    begin: int
    end: int


def write_tensors(destination: Path, tensors: Iterable[TensorInfo], advance: Advance) -> None:
    """Write the given tensors, byte for byte, into a new file.

    Wider element types come first, so that every tensor is aligned to its own type; among equals the source's order
    is kept, so that neighbours are copied in one go.
    """
    ordered = sorted(tensors, key=lambda info: (-DTYPE_BYTES[info.dtype], info.file, info.begin))
    header = encode_header(ordered)
    with destination.open("xb", buffering=0) as out:
        out.write(header)
        for extent in join_extents(ordered):
            with extent.file.open("rb", buffering=0) as source:
                copy_bytes(source.fileno(), out.fileno(), extent, advance)


def encode_header(tensors: Sequence[TensorInfo]) -> bytes:
    """The length prefix and header of a file that holds these tensors in this order."""
    entries: dict[str, object] = {"__metadata__": METADATA}
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
    return struct.pack("<Q", len(text)) + text


def join_extents(tensors: Sequence[TensorInfo]) -> list[Extent]:
    """The bytes of the tensors in order, neighbours merged."""
    extents: list[Extent] = []
    for info in tensors:
        last = extents[-1] if extents else None
        if last is not None and last.file == info.file and last.end == info.begin:
            extents[-1] = Extent(info.file, last.begin, info.end)
        elif info.num_bytes:
            extents.append(Extent(info.file, info.begin, info.end))
    return extents


def copy_bytes(source: int, out: int, extent: Extent, advance: Advance) -> None:
    """Append an extent to the end of `out`, inside the kernel where the system can.

    Raises:
        OSError: the source has become shorter, or the disk is full.
    """
    position = extent.begin
    while position < extent.end:
        count = min(CHUNK_BYTES, extent.end - position)
        if sys.platform == "linux":
            moved = os.sendfile(out, source, position, count)
        else:
            moved = os.write(out, os.pread(source, count, position))
        if moved == 0:
            raise OSError(f"{extent.file}: ended at byte {position}, expected {extent.end}")
        position += moved
        advance(moved)
