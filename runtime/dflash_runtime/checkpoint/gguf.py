"""Recognise GGUF files, so that the refusal of a llama.cpp draft names its architecture.

Layout: magic, u32 version, u64 number of tensors, u64 number of keys, then per key its name, u32 type and value. A u64
length precedes strings and arrays. Source: ggml-org/ggml docs/gguf.md. Only the first bytes of a file are read.
"""

import io
import struct
from pathlib import Path
from typing import Any, BinaryIO

from dflash_runtime.errors import UnknownFormat

MAGIC = b"GGUF"
MAX_BYTES = 1024 * 1024
"""Bytes of a file that are read. Names and sizes come first; a tokenizer's lists may continue after them."""

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_NESTING = 4

DRAFTS = {
    "dflash": "a DFlash draft for llama.cpp",
    "dflash-draft": "a DFlash draft under the name of early llama.cpp builds, which current ones do not load",
    "gemma4-dflash-draft": "a DFlash draft for a fork of llama.cpp",
    "dspark": "a DSpark draft for llama.cpp, which is not DFlash",
}


def refuse_gguf(path: Path) -> None:
    """Refuse a GGUF file, or a directory with GGUF weights and without safetensors weights.

    Raises:
        UnknownFormat: names the architecture.
    """
    files = [path]
    if path.is_dir():
        has_weights = any(path.glob("*.safetensors"))
        files = [] if has_weights else sorted(path.glob("*.gguf"))
    for file in files:
        keys = read_gguf_keys(file) if file.is_file() else None
        if keys is not None:
            architecture = keys.get("general.architecture")
            raise UnknownFormat(
                f"GGUF, general.architecture {architecture!r}: {_describe(keys)}; this tool does not read GGUF",
                id="gguf",
                path=file,
                field="general.architecture",
                found=architecture,
                expected="a safetensors checkpoint",
                hint="pass the safetensors checkpoint it was made from",
            )


def read_gguf_keys(file: Path) -> dict[str, Any] | None:
    """Return the readable metadata in the first MAX_BYTES of a GGUF file; None for another file."""
    with file.open("rb") as stream:
        data = stream.read(MAX_BYTES)
    if not data.startswith(MAGIC):
        return None
    keys: dict[str, Any] = {}
    reader = io.BytesIO(data[len(MAGIC) :])
    try:
        _, _, count = struct.unpack("<IQQ", _take(reader, 20))
        for _ in range(count):
            name = _string(reader)
            keys[name] = _value(reader, _scalar(reader, "I"))
    except (EOFError, UnicodeDecodeError):
        pass  # The limit cut the header off, or it is damaged. The keys read so far suffice to name the draft.
    return keys


def _describe(keys: dict[str, Any]) -> str:
    architecture = keys.get("general.architecture")
    if architecture == "dflash" and any(key.startswith(("dflash.conv_", "dflash.selector_")) for key in keys):
        return "a DFlash 2 draft for llama.cpp"
    if architecture in DRAFTS:
        return DRAFTS[architecture]
    return "a model, or a kind of draft that is not known"


def _take(reader: BinaryIO, count: int) -> bytes:
    data = reader.read(count) if count <= MAX_BYTES else b""
    if len(data) < count:
        raise EOFError
    return data


def _scalar(reader: BinaryIO, code: str) -> Any:
    (value,) = struct.unpack(f"<{code}", _take(reader, struct.calcsize(f"<{code}")))
    return value


def _string(reader: BinaryIO) -> str:
    return _take(reader, _scalar(reader, "Q")).decode("utf-8")


def _value(reader: BinaryIO, kind: int, nesting: int = 0) -> Any:
    if kind in SCALARS:
        return _scalar(reader, SCALARS[kind])
    if kind == STRING:
        return _string(reader)
    if kind != ARRAY or nesting == MAX_NESTING:
        raise EOFError
    inner, count = _scalar(reader, "I"), _scalar(reader, "Q")
    if count > MAX_BYTES:
        raise EOFError
    return [_value(reader, inner, nesting + 1) for _ in range(count)]
