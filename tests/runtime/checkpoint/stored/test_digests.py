"""Digests: their values are stored in files, so they are held as numbers; and each covers what it says."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dflash_runtime.checkpoint.stored import digests
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.weight_digests import WeightDigest

LARGE = 2**20 + 64
TENSORS = {
    "lm_head.weight": ([24, 64], 24 * 64 * 4),
    "model.embed_tokens.weight": ([24, 64], 24 * 64 * 4),
    "model.layers.0.mlp.up_proj.weight": ([LARGE // 64, 16], LARGE),
    "model.norm.weight": ([64], 256),
}


def write(path: Path, shards: Mapping[str, list[str]] | None = None) -> Checkpoint:
    """A checkpoint written byte by byte, so that no library decides on its header."""
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "README.md").write_text("no part of a digest")
    shards = shards or {"model.safetensors": [*TENSORS]}
    for file, names in shards.items():
        header, begin = {}, 0
        for name in names:
            shape, size = TENSORS[name]
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
            begin += size
        text = json.dumps(header).encode()
        body = b"".join(bytes((7 * at + len(name)) % 251 for at in range(TENSORS[name][1])) for name in names)
        (path / file).write_bytes(struct.pack("<Q", len(text)) + text + body)
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return Checkpoint(path)


def rows(checkpoint: Checkpoint) -> str:
    tensors = checkpoint.tensors
    return digests.digest_rows([tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]])


ALL: Mapping[str, Callable[[Checkpoint], str]] = {
    "files": digests.digest_files,
    "headers": lambda checkpoint: digests.digest_headers(checkpoint.tensors),
    "rows": rows,
    "ends": lambda checkpoint: digests.digest_rows(
        [checkpoint.tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")], with_shapes=True
    ),
    "weights": lambda checkpoint: WeightDigest(checkpoint).value,
}
VALUES = {
    "files": "36f0bbd451fa7892",
    "headers": "d78a0d5f8761d902871a9efc0b23789ea8d2bc24aa22ceb22ce7ffe8e5d07348",
    "rows": "937011e1d05d5b920f783afbef2902a3813a40cda78e0d40b7f9fa1fc9bc6a9f",
    "ends": "81ce8f16945b611efc09e0e63c8e37b79680f6fa19d4407f2b5d0a69b4a19617",
    "weights": "0ba49a2a833fa1ad52b4ad3db55c5235",
}


def test_stored_digests_never_change(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "one")
    assert {name: digest(checkpoint) for name, digest in ALL.items()} == VALUES


def test_large_weights_have_another_digest_that_never_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "WHOLE_CHECKPOINT_BYTES", 10)
    assert digests.digest_files(write(tmp_path / "one")) == "bec2bf386fc367cb"


def test_texts_and_values(tmp_path: Path) -> None:
    assert digests.digest_text("prompt") == digests.digest_text(b"prompt") == "cf07194ee232eb53"
    assert digests.digest_value({"b": [1, 2.5], "a": None}, 16) == "63a7fe55f53839feee9aa20e58b6f605"
    assert digests.digest_value({"a": None, "b": [1, 2.5]}, 16) == digests.digest_value({"b": [1, 2.5], "a": None}, 16)
    assert len(digests.digest_value(1, 12)) == 24


def test_a_file_is_hashed_whole_and_its_bytes_are_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "HASH_BYTES", 4)
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"abcdef")
    second.write_bytes(b"ghi")
    seen: list[int] = []
    assert digests.hash_file(first, seen.append) == "bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721"
    assert seen == [4, 2]
    assert digests.hash_files([first, second]) == "19cc02f26df43cc571bc9ed7b0c4d29224a3ec229529221725ef76d021c8326f"


@pytest.mark.parametrize("kind", ["headers", "rows", "ends", "weights"])
def test_files_and_shards_do_not_matter(kind: str, tmp_path: Path) -> None:
    names = [*reversed(TENSORS)]
    shards = {"model-00001-of-00002.safetensors": names[:1], "model-00002-of-00002.safetensors": names[1:]}
    assert ALL[kind](write(tmp_path / "two", shards)) == VALUES[kind]


@pytest.mark.parametrize(
    ("name", "offset", "changed"),
    [
        ("lm_head.weight", 0, {"files", "ends", "weights"}),
        ("model.embed_tokens.weight", -1, {"files", "rows", "ends", "weights"}),
        ("model.norm.weight", 5, {"files", "rows", "weights"}),
        ("model.layers.0.mlp.up_proj.weight", 0, {"files", "weights"}),
        ("model.layers.0.mlp.up_proj.weight", LARGE // 2, {"files", "weights"}),
        ("model.layers.0.mlp.up_proj.weight", LARGE // 4, {"files", "weights"}),
    ],
)
def test_a_changed_byte_changes_the_digests_that_cover_it(
    name: str, offset: int, changed: set[str], tmp_path: Path
) -> None:
    checkpoint = write(tmp_path / "one")
    info = checkpoint.tensors[name]
    data = bytearray(info.file.read_bytes())
    data[(info.begin if offset >= 0 else info.end) + offset] ^= 1
    info.file.write_bytes(data)
    assert {kind for kind, digest in ALL.items() if digest(checkpoint) != VALUES[kind]} == changed
