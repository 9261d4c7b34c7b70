"""The digest of weights: every byte counts, files are read once, and a changed file is never taken for the old one."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from dflash_runtime.checkpoint.stored import weight_digests
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.weight_digests import WeightDigest, hash_ranges
from dflash_runtime.errors import CheckpointError
from dflash_testing.checkpoints import write_checkpoint

SIZE = 5000
ROWS, OTHER = numpy.arange(64, dtype=numpy.int16).reshape(8, 8), numpy.arange(16, dtype=numpy.int16)
JOINED = numpy.concatenate([ROWS.reshape(-1)[-8:], OTHER])


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test, small chunks, and files that count as settled at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_digests, "CHUNK_BYTES", 512)
    monkeypatch.setattr(weight_digests, "SETTLED_NS", -1)


def write(path: Path, **sizes: int) -> Checkpoint:
    """A checkpoint with a tensor for each name, of the given number of bytes."""
    arrays = {f"{name}.weight": (numpy.arange(size) // 7).astype(numpy.uint8) for name, size in sizes.items()}
    return Checkpoint(write_checkpoint(path, {"model_type": "qwen3"}, arrays))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return write(tmp_path / "model", a=SIZE, b=8, c=700)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    reads: list[object] = []

    def counted(file: Path, ranges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
        reads.append(ranges)
        return hash_ranges(file, ranges)

    monkeypatch.setattr(weight_digests, "hash_ranges", counted)
    return reads


def digest_weights(checkpoint: Checkpoint, names: Sequence[str] | None = None) -> str:
    return WeightDigest(checkpoint, names).value


def change(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("at", [0, 511, 512, 2499, SIZE - 1])
def test_any_byte_of_a_large_tensor_counts(checkpoint: Checkpoint, at: int) -> None:
    before = digest_weights(checkpoint)
    info = checkpoint.tensors["a.weight"]
    change(info.file, info.begin + at)
    assert digest_weights(Checkpoint(checkpoint.path)) != before


def test_chunks_that_change_places_count(checkpoint: Checkpoint) -> None:
    """Two chunks are exchanged, as when token rows are repaired."""
    before = digest_weights(checkpoint)
    info = checkpoint.tensors["a.weight"]
    data = bytearray(info.file.read_bytes())
    one, two = (slice(info.begin + begin, info.begin + begin + 512) for begin in (512, 2048))
    data[one], data[two] = data[two], data[one]
    info.file.write_bytes(data)
    assert digest_weights(Checkpoint(checkpoint.path)) != before


def test_a_file_is_read_once_and_again_after_any_change(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that restores the modification time changes the other time."""
    reads = count_reads(monkeypatch)
    before = digest_weights(checkpoint, ["a.weight"])
    assert digest_weights(checkpoint, ["a.weight"]) == before
    assert len(reads) == 1
    digest_weights(checkpoint)  # further tensors of the file
    digest_weights(checkpoint)
    assert len(reads) == 2
    info = checkpoint.tensors["a.weight"]
    stat = info.file.stat()
    change(info.file, info.begin + 600)
    os.utime(info.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest_weights(checkpoint, ["a.weight"]) != before
    assert len(reads) == 3


VARIANTS: dict[str, dict[str, Any]] = {
    "another dtype": {"a.weight": ROWS.view(numpy.float16), "b.weight": OTHER},
    "another dtype of integers": {"a.weight": ROWS.view(numpy.uint16), "b.weight": OTHER},
    "another shape": {"a.weight": ROWS.reshape(4, 16), "b.weight": OTHER},
    "one axis more": {"a.weight": ROWS.reshape(1, 8, 8), "b.weight": OTHER},
    "names exchanged": {"b.weight": ROWS, "a.weight": OTHER},
    "one name changed": {"A.weight": ROWS, "b.weight": OTHER},
    "rows exchanged": {"a.weight": ROWS[::-1].copy(), "b.weight": OTHER},
    "a tensor more": {"a.weight": ROWS, "b.weight": OTHER, "c.weight": OTHER[:0]},
    "a byte moved between tensors": {"a.weight": ROWS.reshape(-1)[:-8], "b.weight": JOINED},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_name_dtype_shape_and_order_count(tmp_path: Path, name: str) -> None:
    """The bytes of the files are the same, or the same in another order."""
    config = {"model_type": "qwen3"}
    plain = digest_weights(
        Checkpoint(write_checkpoint(tmp_path / "plain", config, {"a.weight": ROWS, "b.weight": OTHER}))
    )
    other = digest_weights(Checkpoint(write_checkpoint(tmp_path / "other", config, VARIANTS[name])))
    assert other != plain


@pytest.mark.parametrize("way", ["written over", "renamed over", "link turned", "grown and cut"])
def test_a_change_that_keeps_size_and_times_counts(tmp_path: Path, way: str) -> None:
    """`touch -d` and `cp -p` restore the modification time of a changed file."""
    checkpoint = write(tmp_path / "model", a=SIZE)
    file = checkpoint.path / "model.safetensors"
    moved = checkpoint.path / "blob"
    if way == "link turned":
        file.rename(moved)
        file.symlink_to(moved)
    checkpoint = Checkpoint(checkpoint.path)
    before, stat, data = digest_weights(checkpoint), file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 1
    if way in ("written over", "grown and cut"):
        file.write_bytes(bytes(data) + b"more" * (way == "grown and cut"))
        os.truncate(file, len(data))
    else:
        new = checkpoint.path / "new"
        new.write_bytes(data)
        os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if way == "renamed over":
            new.replace(file)
        else:
            file.unlink()
            file.symlink_to(new)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert digest_weights(Checkpoint(checkpoint.path)) != before


def test_entries_of_another_form_are_not_taken(checkpoint: Checkpoint) -> None:
    """A digest of another form would be part of the fingerprint."""
    before = digest_weights(checkpoint)
    (file,) = weight_digests.memory_folder().iterdir()
    entries = json.loads(file.read_text())
    for wrong in ("", "x", "A" * 32, "0" * 31):
        file.write_text(json.dumps(dict.fromkeys(entries, wrong)))
        assert digest_weights(checkpoint) == before


def test_a_file_that_just_changed_is_not_remembered(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_digests, "SETTLED_NS", 3600 * 10**9)
    reads = count_reads(monkeypatch)
    assert digest_weights(checkpoint) == digest_weights(checkpoint)
    assert len(reads) == 2


def test_weights_that_change_after_they_were_opened_have_no_digest(checkpoint: Checkpoint) -> None:
    digest = WeightDigest(checkpoint)
    info = checkpoint.tensors["a.weight"]
    change(info.file, info.begin)
    with pytest.raises(CheckpointError) as caught:
        _ = digest.value
    assert (caught.value.id, caught.value.path) == ("weights-changed", info.file)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"0-8": 5}', b'{"x": "y"}', b"\xff"])
def test_a_damaged_memory_is_ignored(checkpoint: Checkpoint, content: bytes) -> None:
    before = digest_weights(checkpoint)
    for file in weight_digests.memory_folder().iterdir():
        file.write_bytes(content)
    assert digest_weights(checkpoint) == before


def test_a_cache_folder_that_cannot_be_written_changes_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest_weights(checkpoint)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert digest_weights(checkpoint) == before


def test_few_files_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_digests, "MAX_REMEMBERED", 2)
    for name in "abcd":
        digest_weights(write(tmp_path / name, w=10))
    assert len(list(weight_digests.memory_folder().iterdir())) == 2
