"""Read the header of a GGUF file: its metadata, and the bytes of each tensor. The file may be hostile.

Layout: magic, u32 version, u64 number of tensors, u64 number of keys, the keys, the tensors, padding, the data. A key
is its name, u32 kind and value. A tensor is its name, u32 number of dimensions, u64 dimensions from the innermost on,
u32 type and u64 offset in the data. A u64 length precedes strings and lists. Source: the specification of
ggml-org/ggml.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_runtime.errors import CheckpointError

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)
ALIGNMENT_KEY, ALIGNMENT = "general.alignment", 32
MAX_ALIGNMENT = 1 << 20

MAX_HEADER_BYTES = 100_000_000
MAX_KEYS = 10_000
MAX_TENSORS = 50_000
MAX_ENTRIES = 4_000_000
"""The most entries of all lists. The tokenizer of a large model has about a million."""

MAX_LISTED = 4096
"""The most entries of a list that is kept. Of longer lists, and of a tokenizer's, only the number is kept."""

MAX_NESTING = 4
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
CHUNK_BYTES = 1 << 20

SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
"""Kind of a number -> its code for `struct`."""

LAYOUTS = {code: struct.Struct(f"<{code}") for code in SCALARS.values()}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TOKENIZER = "tokenizer."
"""Prefix of the keys of a tokenizer."""


class ByteSource(Protocol):
    """Gives the next bytes of a file, or fewer at its end."""

    def read(self, count: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type: `num_bytes` bytes hold `block` adjacent elements of a row."""

    name: str
    block: int = 1
    num_bytes: int = 0


TYPES: Mapping[int, ElementType] = {
    number: ElementType(*entry)
    for number, entry in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    }.items()
}  # fmt: skip
"""Number of an element type -> the type. Source: gguf 0.19.0 constants.py, GGML_QUANT_SIZES."""

TYPE_NUMBERS = {item.name: number for number, item in TYPES.items()}

DRAFTS = {
    "dflash": "a DFlash draft for llama.cpp",
    "dflash-draft": "a DFlash draft under the name of early llama.cpp builds, which current ones do not load",
    "gemma4-dflash-draft": "a DFlash draft for a fork of llama.cpp",
    "dspark": "a DSpark draft for a fork of llama.cpp",
}
"""Value of general.architecture -> the kind of draft."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key of the metadata. `begin` and `end` enclose the whole entry in the file. See MAX_LISTED for long lists."""

    value: Any
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: its shape from the outermost dimension on, its element type, and its bytes [begin, end) in `file`."""

    file: Path
    type: ElementType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file, or of all files of a split one. `file` is then the first of them."""

    file: Path
    keys: Mapping[str, StoredKey]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str | None:
        """The value of general.architecture, None if it is not a text."""
        found = self.keys.get("general.architecture")
        return found.value if found is not None and isinstance(found.value, str) else None


def read_gguf_stream(file: Path, stream: ByteSource, size: int) -> GgufHeader:
    """Read and check the header of `file` from a stream of its `size` bytes.

    Every count, length, offset and type is checked before memory is used for it. Tensors lie inside the file, start at
    the alignment, and do not overlap.

    Raises:
        CheckpointError: the header breaks one of these rules; names the file and the key or tensor.
    """
    cursor = _Cursor(file, stream, size)
    if cursor.take(4) != MAGIC:
        raise CheckpointError("not a GGUF file", id="not-gguf", path=file, expected="the bytes GGUF at the start")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise _wrong(file, "gguf-version", "version", version, "2 or 3, in little-endian order")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    for field, found, most in (("tensors", num_tensors, MAX_TENSORS), ("keys", num_keys, MAX_KEYS)):
        if found > most:
            raise _wrong(file, "gguf-count", field, found, f"at most {most} {field}")
    keys = _read_keys(cursor, num_keys)
    entries = [_read_tensor(cursor) for _ in range(num_tensors)]
    stated = keys.get(ALIGNMENT_KEY)
    alignment = ALIGNMENT if stated is None else stated.value
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _wrong(file, "gguf-alignment", ALIGNMENT_KEY, alignment, f"a power of 2 up to {MAX_ALIGNMENT}")
    base = -(-cursor.at // alignment) * alignment
    return GgufHeader(file, keys, _place_tensors(file, entries, base, alignment, size))


def _read_keys(cursor: "_Cursor", count: int) -> dict[str, StoredKey]:
    keys: dict[str, StoredKey] = {}
    for _ in range(count):
        begin = cursor.at
        name = cursor.name()
        if name in keys:
            raise _wrong(cursor.file, "gguf-key", name, "the key twice", "each key once")
        value = cursor.value(name, cursor.number("I"))
        keys[name] = StoredKey(value, begin, cursor.at)
    return keys


def _read_tensor(cursor: "_Cursor") -> tuple[str, tuple[int, ...], ElementType, int]:
    """Return the name, shape, type and offset of the next tensor."""
    name, num_dimensions = cursor.name(), cursor.number("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise _wrong(cursor.file, "gguf-tensor", name, f"{num_dimensions} dimensions", f"at most {MAX_DIMENSIONS}")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in TYPES:
        raise _wrong(cursor.file, "gguf-tensor", name, f"element type {number}", "an element type of GGUF")
    if any(not 0 < length < 2**31 for length in shape):
        raise _wrong(cursor.file, "gguf-tensor", name, f"shape {list(shape)}", "sizes of 1 or more")
    kind = TYPES[number]
    if (shape[-1] if shape else 1) % kind.block:
        expected = f"rows of a multiple of {kind.block} elements for {kind.name}"
        raise _wrong(cursor.file, "gguf-tensor", name, f"shape {list(shape)}", expected)
    return name, shape, kind, offset


def _place_tensors(
    file: Path, entries: list[tuple[str, tuple[int, ...], ElementType, int]], base: int, alignment: int, size: int
) -> dict[str, StoredTensor]:
    """Return the tensors by name, after checking that their bytes lie in the file and do not overlap."""
    found: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in entries:
        if name in found:
            raise _wrong(file, "gguf-tensor", name, "the tensor twice", "each tensor once")
        if offset % alignment:
            raise _wrong(file, "gguf-tensor", name, f"offset {offset}", f"a multiple of {alignment}")
        num_bytes = math.prod(shape) // kind.block * kind.num_bytes
        begin = base + offset
        if begin + num_bytes > size:
            raise _wrong(file, "file-truncated", name, f"{size} bytes", f"at least {begin + num_bytes} bytes")
        found[name] = StoredTensor(file, kind, shape, begin, begin + num_bytes)
    position, last = base, ""
    for name, tensor in sorted(found.items(), key=lambda item: item[1].begin):
        if tensor.begin < position:
            raise _wrong(file, "gguf-tensor", name, f"bytes of {last}", "bytes of its own")
        position, last = tensor.end, name
    return found


def _wrong(file: Path, id: str, field: str, found: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{field}: found {found}, expected {expected}", id=id, path=file, field=field,
                           found=found, expected=expected)  # fmt: skip


class _Cursor:
    """Reads the header from its first byte on, in chunks, and never more than the file or the limit holds."""

    def __init__(self, file: Path, stream: ByteSource, size: int) -> None:
        self.file, self.at = file, 0
        self._stream, self.data = stream, bytearray()
        self._limit = min(size, MAX_HEADER_BYTES)
        self._num_entries = 0

    def advance(self, count: int) -> int:
        """Continue after the next `count` bytes, which are in memory then, and return where they begin."""
        begin, end = self.at, self.at + count
        if end > self._limit:
            raise _wrong(self.file, "gguf-truncated", "header", f"{self._limit} bytes", f"at least {end} bytes")
        if end > len(self.data):
            self.data += self._stream.read(max(end - len(self.data), CHUNK_BYTES))
            if end > len(self.data):
                raise _wrong(self.file, "gguf-truncated", "header", f"{len(self.data)} bytes", f"at least {end} bytes")
        self.at = end
        return begin

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        begin = self.advance(count)
        return bytes(self.data[begin : self.at])

    def number(self, code: str) -> Any:
        layout = LAYOUTS[code]
        return layout.unpack_from(self.data, self.advance(layout.size))[0]

    def name(self) -> str:
        length = self.number("Q")
        if length > MAX_NAME_BYTES:
            raise _wrong(self.file, "gguf-count", "name", f"{length} bytes", f"at most {MAX_NAME_BYTES} bytes")
        return self._text(length)

    def value(self, name: str, kind: int) -> Any:
        """The value of a key. A long list, and every list of a tokenizer, becomes `{"count": entries}`."""
        if kind in SCALARS:
            return self._scalar(kind)
        if kind == STRING:
            return self._text(self.number("Q"))
        if kind != ARRAY:
            raise _wrong(self.file, "gguf-key", name, f"kind {kind}", "a kind of GGUF")
        begin, count = self.at, self._skip_list(name)
        if count > MAX_LISTED or name.startswith(TOKENIZER):
            return {"count": count}
        self.at = begin
        return self._list()

    def _skip_list(self, name: str, nesting: int = 0) -> int:
        """Check a list, continue after it, and return the number of its entries."""
        kind, count = self.number("I"), self.number("Q")
        self._num_entries += count
        if nesting == MAX_NESTING or (kind not in SCALARS and kind not in (STRING, ARRAY)):
            raise _wrong(self.file, "gguf-key", name, f"a list of kind {kind}", f"at most {MAX_NESTING} nested lists")
        if self._num_entries > MAX_ENTRIES:
            raise _wrong(self.file, "gguf-count", name, f"{count} entries", f"at most {MAX_ENTRIES} entries in all")
        if kind in SCALARS:
            self.advance(count * LAYOUTS[SCALARS[kind]].size)
        elif kind == STRING:
            self._skip_texts(count)
        else:
            for _ in range(count):
                self._skip_list(name, nesting + 1)
        return int(count)

    def _skip_texts(self, count: int) -> None:
        """Continue after that many texts. The inner loop passes the texts that are in memory, which is most of them."""
        length_of = LAYOUTS["Q"].unpack_from
        while count:
            data, at, loaded = self.data, self.at, len(self.data)
            while count and at + 8 <= loaded and (end := at + 8 + length_of(data, at)[0]) <= loaded:
                at, count = end, count - 1
            self.at = at
            if count:
                self.advance(self.number("Q"))
                count -= 1

    def _list(self) -> list[Any]:
        """The entries of a list that `_skip_list` has checked."""
        kind, count = self.number("I"), self.number("Q")
        if kind == ARRAY:
            return [self._list() for _ in range(count)]
        return [self._text(self.number("Q")) if kind == STRING else self._scalar(kind) for _ in range(count)]

    def _scalar(self, kind: int) -> Any:
        value = self.number(SCALARS[kind])
        return shortest(value) if kind == FLOAT32 else value

    def _text(self, length: int) -> str:
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise _wrong(self.file, "gguf-text", "header", f"byte {self.at - length}", "text in UTF-8") from None


def shortest(value: float) -> float:
    """Return the number with the fewest digits that a float of 32 bits stores as this value: 1e-06 for 9.99...e-07."""
    for digits in range(1, 10):
        found = float(f"{value:.{digits}g}")
        if to_float32(found) == value:
            return found
    return value


def to_float32(value: float) -> float | None:
    """Return a number as a float of 32 bits stores it, None if it is too large."""
    try:
        stored: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return None
    return stored
