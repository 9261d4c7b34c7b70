"""GGUF drafts are recognised by their header, and the refusal names their architecture, even in a damaged file."""

import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from dflash_runtime.checkpoint.gguf import DRAFTS, MAX_BYTES, read_gguf_keys, refuse_gguf
from dflash_runtime.errors import UnknownFormat
from dflash_testing import checkpoints as support
from dflash_testing.refusals import refuses

U32, STRING, ARRAY, BOOL = 4, 8, 9, 7


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf(*pairs: bytes, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 58, len(pairs) if count is None else count) + b"".join(pairs)


def architecture(name: str) -> bytes:
    return pair("general.architecture", STRING, text(name))


LAYERS = pair("dflash.target_layers", ARRAY, struct.pack("<IQ3I", U32, 3, 2, 10, 18))


@pytest.mark.parametrize(
    ("pairs", "found", "words"),
    [
        ([architecture("dflash"), LAYERS], "dflash", DRAFTS["dflash"]),
        ([architecture("dflash-draft")], "dflash-draft", DRAFTS["dflash-draft"]),
        ([architecture("gemma4-dflash-draft")], "gemma4-dflash-draft", DRAFTS["gemma4-dflash-draft"]),
        ([architecture("dspark")], "dspark", DRAFTS["dspark"]),
        ([architecture("dflash"), pair("dflash.conv_kernel_size", U32, b"\x02\0\0\0")], "dflash", "DFlash 2"),
        ([architecture("llama")], "llama", "such as a target"),
        ([LAYERS], None, ""),
    ],
)
@pytest.mark.parametrize("where", ["file", "directory", "directory with a config"])
def test_the_refusal_names_the_architecture(
    pairs: list[bytes], found: str | None, words: str, where: str, tmp_path: Path
) -> None:
    path = tmp_path / "draft.gguf"
    if where != "file":
        (tmp_path / "draft").mkdir()
        path = tmp_path / "draft" / "draft.gguf"
    if where == "directory with a config":
        support.write_config(tmp_path / "draft", support.native_config())
    path.write_bytes(gguf(*pairs))
    reference = path if where == "file" else path.parent
    with refuses(UnknownFormat, "gguf", path=path, field="general.architecture", found=found) as caught:
        refuse_gguf(reference)
    assert words in caught.value.message
    assert caught.value.hint is not None
    outcome = support.invoke("convert", reference, tmp_path / "out", "--to", "native")
    assert outcome.code == 5
    assert caught.value.message in outcome.err


def test_a_gguf_file_does_not_hide_safetensors_weights(tmp_path: Path) -> None:
    source = support.make_native(tmp_path / "source")
    (source / "draft.gguf").write_bytes(gguf(architecture("dflash")))
    manifest = support.convert(source, tmp_path / "out", "native")
    assert ("draft.gguf", None, "dropped") in [(item["from"], item["to"], item["change"]) for item in manifest["files"]]


def test_another_file_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not GGUF")
    assert read_gguf_keys(path) is None
    refuse_gguf(path)


def test_keys_of_every_kind() -> None:
    flag = pair("dflash.attention.causal", BOOL, b"\x01")
    nested = pair("nested", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQB", 0, 1, 7))
    assert read(gguf(architecture("dflash"), LAYERS, flag, nested)) == {
        "general.architecture": "dflash",
        "dflash.target_layers": [2, 10, 18],
        "dflash.attention.causal": True,
        "nested": [[7]],
    }


def read(data: bytes) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "a.gguf"
        path.write_bytes(data)
        found = read_gguf_keys(path)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        struct.pack("<Q", 2**63),
        text("key") + struct.pack("<I", 99),
        text("key") + struct.pack("<IIQ", ARRAY, U32, 2**40),
        text("key") + struct.pack("<IQ", STRING, 2**40),
        struct.pack("<Q", 3) + b"\xff\xfe\xfd",
        text("key") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 10_000,
    ],
)
def test_a_damaged_header_still_names_the_file(tail: bytes) -> None:
    """Wrong lengths cost neither time nor memory."""
    assert read(gguf(architecture("dflash"), tail, count=2**60)) == {"general.architecture": "dflash"}


def test_only_the_first_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    with path.open("wb") as stream:
        stream.write(gguf(architecture("dflash"), count=2**40))
        stream.truncate(MAX_BYTES * 4096)
    with refuses(UnknownFormat, "gguf", found="dflash"):
        refuse_gguf(path)
