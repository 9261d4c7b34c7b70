"""The header of a safetensors file, parsed and checked without torch.

A command that reads only headers must start at once, and a malformed header must give a message instead of a crash.

Layout of the file: u64 header length, JSON header, data. Source: huggingface/safetensors README, "Format".
"""

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.stored.strict_json import parse_json, regular_size
from dflash_runtime.errors import CheckpointError, unreadable
from dflash_runtime.json_values import is_int

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 50_000
"""The most tensors in one file, read in seconds. A shard of the largest published checkpoint has a fraction of it."""

DTYPE_BYTES: Mapping[str, float] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "F4": 0.5, "F6_E2M3": 0.75, "F6_E3M2": 0.75,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's name, dtype and shape, and its bytes [begin, end) in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


def read_header(file: Path, metadata: dict[str, str] | None = None) -> dict[str, TensorInfo]:
    """Read the header of one safetensors file, and return its tensors by name. Its metadata is added to `metadata`.

    Raises:
        CheckpointError: the file cannot be read; see also `parse_header`.
    """
    try:
        size = regular_size(file)  # before the file is opened, because opening a pipe would wait
        with file.open("rb") as stream:
            return parse_header(stream.read, size, file, metadata)
    except OSError as error:
        raise unreadable(file, error) from error


def parse_header(
    read: Callable[[int], bytes], size: int, file: Path, metadata: dict[str, str] | None = None
) -> dict[str, TensorInfo]:
    """Parse and check the header of a file of `size` bytes, and return its tensors by name.

    `read` returns the next bytes of the file. The header's metadata is added to `metadata`. The header fits the file.
    Every entry has a known dtype, and its shape agrees with its offsets. The tensors cover the data without holes or
    overlaps.

    Raises:
        CheckpointError: the header breaks one of these rules; names the file and the tensor.
    """
    prefix = read(8)
    if len(prefix) < 8:
        text, expected = f"{size} bytes, expected at least 8: not a safetensors file", "at least 8 bytes"
        raise CheckpointError(text, id="not-safetensors", path=file, field="file size", found=size, expected=expected)
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES or length < 2:
        expected = f"2..{MAX_HEADER_BYTES}"
        text = f"header length {length}, expected {expected}: not a safetensors file"
        raise CheckpointError(
            text, id="not-safetensors", path=file, field="header length", found=length, expected=expected
        )
    if length > size - 8:
        text, expected = f"truncated: header of {length} bytes in a file of {size}", f"at most {size - 8}"
        raise CheckpointError(
            text, id="header-truncated", path=file, field="header length", found=length, expected=expected
        )
    data = read(length)
    if data.count(b'"data_offsets"') > MAX_TENSORS:
        text, expected = f"more than {MAX_TENSORS} tensors: not a checkpoint this tool reads", f"at most {MAX_TENSORS}"
        raise CheckpointError(text, id="too-many-tensors", path=file, expected=expected)
    header = parse_json(data, file)
    found = header.pop("__metadata__", None)
    _check_metadata(found, file)
    if metadata is not None:
        metadata.update(found or {})
    infos = {name: _tensor_info(name, entry, file, 8 + length) for name, entry in header.items()}
    _check_coverage(infos, file, 8 + length, size)
    return infos


def _check_metadata(metadata: Any, file: Path) -> None:
    """Refuse metadata other than an object of strings: loaders stop at it."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            id="header-metadata", path=file, field="__metadata__", found=metadata, expected="an object of strings"
        )


def _tensor_info(name: str, entry: Any, file: Path, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _bad_entry("object", name, entry, "an object", file)
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _bad_entry("unknown dtype", name, dtype, "an element type of safetensors", file)
    if not _is_count_list(shape):
        raise _bad_entry("shape", name, shape, "a list of sizes", file)
    if not _is_count_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad_entry("data_offsets", name, offsets, "[begin, end]", file)
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise _bad_entry("bytes", name, offsets[1] - offsets[0], f"{expected:g} for {dtype} {shape}", file)
    return TensorInfo(name, dtype, tuple(shape), file, base + offsets[0], base + offsets[1])


def _bad_entry(part: str, name: str, found: Any, expected: str, file: Path) -> CheckpointError:
    """Return the error about one part of a tensor's header entry. Its id is `tensor-shape` for the part `shape`."""
    return CheckpointError(
        f"tensor {name!r}: found {part} {found!r}, expected {expected}",
        id=f"tensor-{re.sub('[_ ]', '-', part)}",
        path=file,
        field=name,
        found=found,
        expected=expected,
    )


def _check_coverage(infos: Mapping[str, TensorInfo], file: Path, base: int, size: int) -> None:
    position = base
    for info in sorted(infos.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != position:
            begin, overlaps = info.begin - base, info.begin < position
            problem = "overlaps the tensor before it" if overlaps else "leaves a hole before it"
            text, expected = f"tensor {info.name!r} {problem} (byte {begin})", f"begin at byte {position - base}"
            id = "tensor-overlap" if overlaps else "tensor-hole"
            raise CheckpointError(text, id=id, path=file, field=info.name, found=begin, expected=expected)
        position = info.end
    if position != size:
        problem = "truncated" if position > size else "oversized"
        text, expected = f"{problem}: {size} bytes, expected {position} from the header", f"{position} bytes"
        raise CheckpointError(text, id=f"file-{problem}", path=file, field="file size", found=size, expected=expected)


def _is_count_list(value: Any) -> bool:
    return isinstance(value, list) and all(is_int(item) and 0 <= item < 2**63 for item in value)
