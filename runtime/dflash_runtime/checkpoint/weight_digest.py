"""A digest of a model's weights that does not depend on files, shards or dialect. Needs no torch.

It covers names, dtypes, shapes and bytes. Of a large tensor it covers three samples, because one more training step
changes every part of a tensor.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from dflash_runtime.checkpoint.files import Checkpoint, TensorInfo

WHOLE_BYTES = 2**20
"""Tensors of up to this many bytes are read whole."""

SAMPLE_BYTES = 16 * 2**10
"""Bytes that are read at the beginning, in the middle and at the end of a larger tensor."""


def digest_weights(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> str:
    """Return a digest of 16 hexadecimal digits over the named tensors, by default over all tensors."""
    infos = checkpoint.tensors
    hashed = hashlib.blake2b(digest_size=8)
    by_file: dict[Path, list[tuple[str, TensorInfo]]] = {}
    for name in sorted(infos if names is None else names):
        by_file.setdefault(infos[name].file, []).append((name, infos[name]))
    parts: dict[str, bytes] = {}
    for file, members in by_file.items():
        with file.open("rb") as stream:
            for name, info in members:
                parts[name] = _digest_tensor(stream, info)
    for name in sorted(parts):
        hashed.update(f"{name}\0".encode() + parts[name])
    return hashed.hexdigest()


def _digest_tensor(stream: BinaryIO, info: TensorInfo) -> bytes:
    hashed = hashlib.blake2b(f"{info.dtype} {list(info.shape)}\0".encode(), digest_size=16)
    for begin, size in _samples(info):
        stream.seek(begin)
        hashed.update(stream.read(size))
    return hashed.digest()


def _samples(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Yield the samples of a tensor, each as its offset in the file and its number of bytes."""
    if info.num_bytes <= WHOLE_BYTES:
        yield info.begin, info.num_bytes
        return
    for begin in (0, (info.num_bytes - SAMPLE_BYTES) // 2, info.num_bytes - SAMPLE_BYTES):
        yield info.begin + begin, SAMPLE_BYTES
