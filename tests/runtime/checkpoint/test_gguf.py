"""GGUF drafts are recognised by their header and refused by name, whatever the rest of the file holds."""

import struct
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.checkpoint.gguf import MAX_BYTES, read_gguf_keys, refuse_gguf
from dflash_runtime.errors import UnknownFormat
from dflash_testing import checkpoints as support

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
    ("pairs", "message"),
    [
        ([architecture("dflash"), LAYERS], "a DFlash draft for llama.cpp"),
        ([architecture("dflash-draft")], "early llama.cpp builds"),
        ([architecture("gemma4-dflash-draft")], "a fork of llama.cpp"),
        ([architecture("dspark")], "a DSpark draft"),
        ([architecture("dflash"), pair("dflash.conv_kernel_size", U32, b"\x02\0\0\0")], "a DFlash 2 draft"),
        ([architecture("llama")], "general.architecture 'llama': no draft of a known kind"),
        ([LAYERS], "general.architecture None"),
    ],
)
@pytest.mark.parametrize("where", ["file", "directory", "directory with a config"])
def test_refused_by_name(pairs: list[bytes], message: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    if where != "file":
        (tmp_path / "draft").mkdir()
        path = tmp_path / "draft" / "draft.gguf"
    if where == "directory with a config":
        support.write_config(tmp_path / "draft", support.native_config())
    path.write_bytes(gguf(*pairs))
    reference = path if where == "file" else path.parent
    outcome = support.invoke("convert", reference, tmp_path / "out", "--to", "native")
    assert outcome.code == 5
    assert message in outcome.err
    assert "pass the safetensors checkpoint" in outcome.err


def test_a_gguf_beside_weights_is_no_obstacle(tmp_path: Path) -> None:
    source = support.make_native(tmp_path / "source")
    (source / "draft.gguf").write_bytes(gguf(architecture("dflash")))
    manifest = support.convert(source, tmp_path / "out", "native")
    assert {
        "from": "draft.gguf",
        "to": None,
        "change": "dropped",
        "why": "weights that the checkpoint does not name",
    } in (manifest["files"])


def test_another_file_is_no_gguf(tmp_path: Path) -> None:
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
    path = Path(support.__file__).parent
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
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
    """Lengths that point nowhere cost neither time nor memory."""
    assert read(gguf(architecture("dflash"), tail, count=2**60)) == {"general.architecture": "dflash"}


def test_only_the_first_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    with path.open("wb") as stream:
        stream.write(gguf(architecture("dflash"), count=2**40))
        stream.truncate(MAX_BYTES * 4096)
    with pytest.raises(UnknownFormat, match="DFlash draft"):
        refuse_gguf(path)
