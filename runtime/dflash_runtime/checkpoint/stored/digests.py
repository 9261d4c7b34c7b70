"""Digests of texts, files and checkpoints, in hexadecimal. Stored files hold them, so their values never change.

    function         covers                                                used for
    digest_text      a text                                                prompts, chat templates
    digest_value     a JSON value                                          fingerprints of pairs, names of cache files
    hash_file        every byte of a file                                  locks, manifests, prompts
    digest_files     config, tokenizer, template and weight files          results, journals, dumps
    digest_headers   names, element types and shapes of tensors            the target of a conversion
    digest_rows      some rows of tensors                                  the target of a conversion, dumps

`digest_files` depends on how files hold the tensors; the digests below it do not. It samples large weights.
`weight_digests.py` has the digest that covers all weights. Needs no torch.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.read_files import read_all, read_range, reading

SAMPLE_BYTES = 16 * 2**10
"""Bytes of one sample of a large tensor."""

WHOLE_CHECKPOINT_BYTES = 512 * 2**20
"""`digest_files` reads weights of up to this many bytes whole, and one sample of each tensor of larger weights."""

BLOCK_BYTES, HASH_BYTES = 2**20, 4 * 2**20
NUM_ROWS, MOST_ROW_BYTES = 8, 2**20
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".pt")
NOT_DECIDING = ("conversion.json", "requirements.txt")


def digest_text(text: str | bytes) -> str:
    """16 digits of a text's SHA-256."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def digest_value(value: Any, digest_size: int) -> str:
    """The BLAKE2b digest of a JSON value, of `digest_size` bytes. The order of an object's keys does not matter."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=digest_size).hexdigest()


def hash_file(file: Path, observe: Callable[[int], object] = lambda num_bytes: None) -> str:
    """The SHA-256 of a file. `observe` gets the number of bytes of each block that is read."""
    return hash_files([file], observe)


def hash_files(files: Iterable[Path], observe: Callable[[int], object] = lambda num_bytes: None) -> str:
    """The SHA-256 of the bytes of several files, one after the other."""
    hashed = hashlib.sha256()
    for file in files:
        with reading(file) as stream:
            while block := stream.read(HASH_BYTES):
                hashed.update(block)
                observe(len(block))
    return hashed.hexdigest()


def deciding_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that decide a result: config, tokenizer, template and weights."""
    return [*_text_files(checkpoint.path), *checkpoint.weight_files]


def is_read_whole(checkpoint: Checkpoint) -> bool:
    """Whether `digest_files` reads all weights of a checkpoint."""
    return sum(file.stat().st_size for file in checkpoint.weight_files) <= WHOLE_CHECKPOINT_BYTES


def digest_files(checkpoint: Checkpoint) -> str:
    """16 digits of the SHA-256 of a checkpoint's deciding files."""
    hashed = hashlib.sha256()
    for label, part in _file_parts(checkpoint, is_whole=is_read_whole(checkpoint)):
        hashed.update(f"{label}\0{len(part)}\0".encode())
        hashed.update(part)
    return hashed.hexdigest()[:16]


def digest_headers(tensors: Mapping[str, TensorInfo]) -> str:
    """The SHA-256 of the names, element types and shapes of tensors."""
    entries = sorted([name, info.dtype, list(info.shape)] for name, info in tensors.items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def digest_rows(tensors: Sequence[TensorInfo], *, with_shapes: bool = False) -> str:
    """The SHA-256 of rows of tensors: 8 rows spread over each, its first and last row included.

    A tensor with one axis is a single row. With `with_shapes`, the digest covers element types and shapes as well.
    """
    hashed = hashlib.sha256()
    for info in tensors:
        if with_shapes:
            hashed.update(json.dumps([info.dtype, list(info.shape)]).encode())
        for begin, size in _rows(info):
            hashed.update(_read(info, begin, min(size, MOST_ROW_BYTES)))
    return hashed.hexdigest()


def _text_files(path: Path) -> list[Path]:
    """Return the text files of a checkpoint's folder; [] for a GGUF file."""
    return (
        []
        if path.is_file()
        else [
            file
            for file in sorted(path.iterdir())
            if file.suffix in TEXT_SUFFIXES and file.name not in NOT_DECIDING and file.is_file()
        ]
    )


def _file_parts(checkpoint: Checkpoint, *, is_whole: bool) -> Iterator[tuple[str, bytes]]:
    """Label and bytes of each part of the deciding files."""
    for file in _text_files(checkpoint.path.resolve()):
        yield file.name, read_all(file)
    for file in checkpoint.weight_files:
        infos = {name: info for name, info in sorted(checkpoint.tensors.items()) if info.file == file}
        yield file.name, str(file.stat().st_size).encode()
        with reading(file) as stream:
            yield "header", stream.read(min(info.begin for info in infos.values()))
            if is_whole:
                while block := stream.read(BLOCK_BYTES):
                    yield "data", block
                continue
            for name, info in infos.items():
                stream.seek(info.begin)
                yield name, stream.read(min(SAMPLE_BYTES, info.num_bytes))


def _rows(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Begin and size of each sampled row, in bytes from the tensor's begin."""
    if len(info.shape) == 1:
        yield 0, info.num_bytes
        return
    count = info.shape[0] if info.shape else 0
    row_bytes = info.num_bytes // count if count else 0
    for row in sorted({at * (count - 1) // (NUM_ROWS - 1) for at in range(NUM_ROWS)}) if count else ():
        yield row * row_bytes, row_bytes


def _read(info: TensorInfo, begin: int, size: int) -> bytes:
    return read_range(info.file, info.begin + begin, info.begin + begin + size, info.name)
