"""Recognise GGUF files, so that a llama.cpp draft is refused by name instead of as "not a checkpoint".

Layout: magic, u32 version, u64 tensors, u64 keys, then key, u32 type, value; strings and arrays are preceded by their
u64 length. Source: ggml-org/ggml docs/gguf.md. Only the first bytes are read, however long the header says it is.
"""

import io
import struct
from pathlib import Path
from typing import Any, BinaryIO

from dflash_runtime.errors import UnknownFormat

MAGIC = b"GGUF"
MAX_BYTES = 1024 * 1024
"""How much of a file is looked at. Names and sizes come first; a tokenizer's lists may go on behind."""

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
    """Refuse a GGUF file, or a directory that holds weights in no other form.

    Raises:
        UnknownFormat: naming the architecture.
    """
    files = [path]
    if path.is_dir():
        has_weights = any(path.glob("*.safetensors"))
        files = [] if has_weights else sorted(path.glob("*.gguf"))
    for file in files:
        keys = read_gguf_keys(file) if file.is_file() else None
        if keys is not None:
            raise UnknownFormat(
                f"{file}: GGUF, general.architecture {keys.get('general.architecture')!r}: {_describe(keys)}; this "
                f"tool does not read GGUF",
                hint="pass the safetensors checkpoint it was made from",
            )


def read_gguf_keys(file: Path) -> dict[str, Any] | None:
    """The metadata that lies in a file's first bytes, as far as it can be read; None where it is no GGUF file."""
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
        pass  # cut off by the limit, or damaged: what was read so far names the file well enough
    return keys


def _describe(keys: dict[str, Any]) -> str:
    architecture = keys.get("general.architecture")
    if architecture == "dflash" and any(key.startswith(("dflash.conv_", "dflash.selector_")) for key in keys):
        return "a DFlash 2 draft for llama.cpp"
    if architecture in DRAFTS:
        return DRAFTS[architecture]
    return "no draft of a known kind"


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
