"""Write a GGUF file. The bytes of tensors are copied from file to file and never decoded.

Layout: see `dflash_runtime.checkpoint.stored.gguf`. Numbers are u32, except negative ones and lists, which are i32, as
llama.cpp's converter writes them; other numbers are f32.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dflash_cli.checkpoints.safetensors_writer import Advance, Extent, MadeTensor, WrittenTensor, copy_extent, write_all
from dflash_runtime.checkpoint.stored.gguf import (
    ALIGNMENT,
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    LAYOUTS,
    MAGIC,
    SCALARS,
    STRING,
    TOKENIZER,
    TYPE_NUMBERS,
    UINT32,
    VERSIONS,
    GgufHeader,
)
from dflash_runtime.checkpoint.stored.gguf_checkpoint import JSON_KEYS, gguf_name
from dflash_runtime.checkpoint.stored.gguf_files import has_magic, read_gguf
from dflash_runtime.errors import LossyConversion, UsageError
from dflash_runtime.read_files import reading


def write_gguf(
    destination: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[WrittenTensor],
    advance: Advance,
    *,
    tokenizer: Path | None = None,
) -> None:
    """Write metadata, given as objects in objects, and tensors under their names in GGUF.

    The tokenizer's keys of the GGUF file `tokenizer` are copied, without keys that `metadata` states.

    Raises:
        LossyConversion: GGUF cannot hold a value of the metadata.
        CheckpointError: the file of the tokenizer is damaged.
    """
    flat = flatten_metadata(metadata)
    entries = [_text(name) + _value(name, value) for name, value in flat.items()]
    entries += [] if tokenizer is None else _tokenizer(read_gguf(tokenizer), flat)
    offsets, position = [], 0
    for tensor in tensors:
        offsets.append(position)
        position += _aligned(tensor.num_bytes)
    table = b"".join(_entry(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=True))
    head = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(entries)) + b"".join(entries) + table
    with destination.open("xb", buffering=0) as out:
        write_all(out.fileno(), head + bytes(_aligned(len(head)) - len(head)))
        for tensor in tensors:
            _copy(tensor, out, advance)
            write_all(out.fileno(), bytes(_aligned(tensor.num_bytes) - tensor.num_bytes))


def flatten_metadata(metadata: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. An object that the file holds as JSON stays one."""
    flat: dict[str, Any] = {}
    for key, value in metadata.items():
        name = prefix + key
        if isinstance(value, dict) and name not in JSON_KEYS:
            flat |= flatten_metadata(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def check_tokenizer(file: Path, vocab_size: int) -> None:
    """Refuse a file as the source of a tokenizer for a draft with that vocabulary.

    Raises:
        UsageError: not a GGUF file, without a tokenizer, or with one of another size.
        CheckpointError: the header is damaged.
    """
    if not file.is_file() or not has_magic(file):
        text, expected = "--tokenizer: not a GGUF file", "the GGUF file of the target"
        raise UsageError(text, id="tokenizer-not-gguf", path=file, field="--tokenizer", expected=expected)
    tokens = read_gguf(file).keys.get(f"{TOKENIZER}ggml.tokens")
    found = None if tokens is None or not isinstance(tokens.value, dict) else tokens.value["count"]
    if found != vocab_size:
        text = f"--tokenizer: found {found or 'no'} tokens, expected {vocab_size}, the vocabulary of the draft"
        raise UsageError(
            text, id="tokenizer-of-other-size", path=file, field="--tokenizer", found=found, expected=str(vocab_size)
        )


def _tokenizer(header: GgufHeader, stated: Mapping[str, Any]) -> Iterator[bytes]:
    """The entries of a file's tokenizer, byte for byte."""
    with reading(header.file) as stream:
        for name, key in header.keys.items():
            if name.startswith(TOKENIZER) and name not in stated:
                stream.seek(key.begin)
                yield stream.read(key.end - key.begin)


def _copy(tensor: WrittenTensor, out: BinaryIO, advance: Advance) -> None:
    if isinstance(tensor, MadeTensor):
        for piece in tensor.pieces():
            write_all(out.fileno(), piece)
            advance(len(piece))
        return
    copy_extent(Extent(tensor.file, tensor.begin, tensor.end), out.fileno(), advance)


def _entry(tensor: WrittenTensor, offset: int) -> bytes:
    """The entry of a tensor in the header."""
    shape = tensor.shape[::-1]
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(gguf_name(tensor.name)) + sizes + struct.pack("<IQ", TYPE_NUMBERS[tensor.dtype], offset)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(name: str, value: Any) -> bytes:
    """The kind and the bytes of a value.

    Raises:
        LossyConversion: the value is of a type that GGUF lacks.
    """
    if name in JSON_KEYS:
        value = json.dumps(value, sort_keys=True)
    if isinstance(value, list):
        kinds = {_kind(name, item) for item in value}
        kind = INT32 if kinds == {UINT32} else next(iter(kinds)) if len(kinds) == 1 else None
        if kind is None:
            raise _unwritable(name, value)
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_scalar(name, kind, item) for item in value)
    kind = _kind(name, value)
    return struct.pack("<I", kind) + _scalar(name, kind, value)


def _kind(name: str, value: Any) -> int:
    by_type: Iterable[tuple[type, int]] = ((bool, BOOL), (int, UINT32), (float, FLOAT32), (str, STRING))
    kind = next((kind for item, kind in by_type if isinstance(value, item)), None)
    if kind is None:
        raise _unwritable(name, value)
    return INT32 if kind == UINT32 and value < 0 else kind


def _scalar(name: str, kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    try:
        return LAYOUTS[SCALARS[kind]].pack(value)
    except (struct.error, OverflowError):
        raise _unwritable(name, value) from None


def _unwritable(name: str, value: Any) -> LossyConversion:
    text = f"{name} {value!r}: GGUF lacks a kind for this value"
    return LossyConversion(text, id="value-not-in-gguf", field=name, found=value)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
