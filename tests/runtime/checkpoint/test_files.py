"""The header reader: every way a checkpoint's files can be wrong has a message of its own."""

import json
import struct
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from dflash_runtime.checkpoint.files import INDEX_FILE, Checkpoint, read_header
from dflash_runtime.checkpoint.strict_json import parse_json, read_json
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from dflash_testing import checkpoints as support

PATH = Path("some.json")


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with exactly this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


class TestHeader:
    def test_reads_what_the_library_writes(self, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft", support.REDUCED)
        infos = read_header(draft / "model.safetensors")
        assert infos["fc.weight"].shape == (16, 32)
        assert infos["d2t"].dtype == "I64"
        assert infos["t2d"].num_bytes == 32
        assert infos["fc.weight"].num_elements == 512
        raw = (draft / "model.safetensors").read_bytes()
        info = infos["norm.weight"]
        expected = support.body_arrays(support.REDUCED)["norm.weight"].tobytes()
        assert raw[info.begin : info.end] == expected

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "0 bytes, expected at least 8"),
            (b"1234567", "7 bytes, expected at least 8"),
            (struct.pack("<Q", 0), "header length 0"),
            (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
            (struct.pack("<Q", 100) + b"{}", "truncated: header of 100 bytes in a file of 10"),
            (struct.pack("<Q", 4) + b"{}{}", "not valid JSON"),
            (struct.pack("<Q", 2) + b"[]", "expected an object"),
            (b"\x80\x04pickle data here", "not a safetensors file"),
        ],
    )
    def test_prefix(self, data: bytes, message: str, tmp_path: Path) -> None:
        file = tmp_path / "x.safetensors"
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=message) as caught:
            read_header(file)
        assert str(file) in caught.value.message

    @pytest.mark.parametrize(
        ("header", "data", "message"),
        [
            ({"a": entry(0, 4)}, b"123", "truncated: .* expected"),
            ({"a": entry(0, 4)}, b"12345", "oversized"),
            ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "'b' overlaps the tensor before it"),
            ({"a": entry(0, 2), "b": entry(4, 6)}, b"123456", "'b' leaves a hole before it"),
            ({"a": entry(2, 4)}, b"1234", "'a' leaves a hole"),
            ({"a": entry(0, 4, dtype="F12")}, b"1234", "unknown dtype 'F12'"),
            ({"a": entry(0, 4, dtype="F32") | {"shape": [2]}}, b"1234", "takes 4 bytes, expected 8 for F32"),
            ({"a": entry(0, 4) | {"shape": [-4]}}, b"1234", r"shape \[-4\]"),
            ({"a": entry(0, 4) | {"shape": [True]}}, b"1234", "expected a list of sizes"),
            ({"a": entry(0, 4) | {"data_offsets": [4, 0]}}, b"1234", "data_offsets"),
            ({"a": entry(0, 4) | {"data_offsets": [0]}}, b"1234", r"expected \[begin, end\]"),
            ({"a": []}, b"", "is not an object"),
            ({"__metadata__": []}, b"", "'__metadata__' is not an object of strings"),
            ({"__metadata__": {"epoch": 1}}, b"", "'__metadata__' is not an object of strings"),
            (b'{"a":' + json.dumps(entry(0, 1)).encode() + b',"a":' + json.dumps(entry(0, 1)).encode() + b"}",
             b"1", "duplicate key 'a'"),
        ],
    )  # fmt: skip
    def test_entries(self, header: Any, data: bytes, message: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_header(write_file(tmp_path / "x.safetensors", header, data))

    def test_a_product_that_would_overflow_is_no_match(self, tmp_path: Path) -> None:
        header = {"a": entry(0, 4) | {"shape": [2**62, 2**62, 4]}}
        with pytest.raises(CheckpointError, match="takes 4 bytes"):
            read_header(write_file(tmp_path / "x.safetensors", header, b"1234"))

    @pytest.mark.parametrize("count", [49_000, 240_000])
    def test_very_many_tensors_take_seconds(self, count: int, tmp_path: Path) -> None:
        header = {f"layers.{at}.x": entry(0, 0, [0]) for at in range(count)}
        file = write_file(tmp_path / "x.safetensors", header)
        started = time.perf_counter()
        with pytest.raises(CheckpointError, match="more than 50000") if count > 50_000 else nullcontext():
            assert len(read_header(file)) == count
        assert time.perf_counter() - started < 10

    def test_metadata_is_skipped(self, tmp_path: Path) -> None:
        header = {"__metadata__": {"format": "pt"}, "a": entry(0, 1)}
        assert list(read_header(write_file(tmp_path / "x.safetensors", header, b"1"))) == ["a"]


def is_read_by_the_library(file: Path) -> bool:
    try:
        with safe_open(file, framework="np"):
            return True
    except SafetensorError:
        return False


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers_are_errors_of_ours(data: st.DataObject, tmp_path: Path) -> None:
    """Whatever bytes change in a header: tensors inside the file where the library reads it, else a message."""
    found: list[Any] = [None, {}, {"format": "pt"}, {"epoch": 1}, {"tags": None}, [], "pt"]
    metadata = data.draw(st.sampled_from(found))
    header = json.dumps({"__metadata__": metadata, "a": entry(0, 4, [2], "F16"), "b": entry(4, 6)}).encode()
    raw = bytearray(struct.pack("<Q", len(header)) + header + b"123456")
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "x.safetensors"
    file.write_bytes(raw[: data.draw(st.integers(len(raw) - 8, len(raw)))])
    try:
        infos = read_header(file)
    except CheckpointError:
        assert not is_read_by_the_library(file)
        return
    assert is_read_by_the_library(file)
    assert all(0 <= info.begin <= info.end <= file.stat().st_size for info in infos.values())


class TestJson:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"", "not valid JSON"),
            (b"[1]", "found a JSON list"),
            (b'{"a": Infinity}', "Infinity is not JSON"),
            (b'{"a": 1e999}', "1e999 is too large"),
            (b'{"a": ' + b"9" * 30 + b"}", "is too large"),
            (b'{"a": -' + b"9" * 5000 + b"}", "a number of 5001 digits is too large"),
            (b"\xef\xbb\xbf{}", "begins with a byte order mark, expected plain UTF-8"),
            (b'{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
            (b'{"\xff": 1}', "not UTF-8 at byte 2"),
            (b'{"a":' * 100_000, "nested too deeply|not valid JSON"),
            (b'{"a":' * 65 + b"1" + b"}" * 65, "nested too deeply"),
            (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "nested too deeply"),
        ],
    )
    def test_strictness(self, text: bytes, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            parse_json(text, PATH)

    def test_a_byte_order_mark_has_a_hint_that_works(self, tmp_path: Path) -> None:
        path = tmp_path / "it's a config.json"
        path.write_bytes(b"\xef\xbb\xbf{}")
        with pytest.raises(CheckpointError) as caught:
            read_json(path)
        assert caught.value.hint is not None
        subprocess.run(caught.value.hint.partition(": ")[2], shell=True, check=True)
        assert path.read_bytes() == b"{}"

    def test_numbers_stay_numbers(self) -> None:
        assert parse_json(b'{"a":' * 64 + b"1" + b"}" * 64, PATH)
        assert parse_json(b'{"a": 1e-6, "b": -3}', PATH) == {"a": 1e-6, "b": -3}


class TestDirectory:
    def test_absent(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointNotFound, match="no such directory"):
            Checkpoint(tmp_path / "absent")

    def test_single_file(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(support.make_native(tmp_path / "draft"))
        assert [file.name for file in checkpoint.weight_files] == ["model.safetensors"]
        expected = support.body_arrays()["fc.weight"]
        assert np.array_equal(checkpoint.load("fc.weight").numpy(), expected)

    def test_a_stray_file_beside_the_single_one_is_ignored(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        (draft / "optimizer.safetensors").write_bytes(b"")
        assert "fc.weight" in Checkpoint(draft).tensors

    def test_shards(self, tmp_path: Path) -> None:
        arrays = support.body_arrays()
        draft = support.write_sharded(tmp_path / "draft", support.native_config(), arrays, num_shards=3)
        checkpoint = Checkpoint(draft)
        assert set(checkpoint.tensors) == set(arrays)
        assert len(checkpoint.weight_files) == 3
        loaded = dict(checkpoint.load_many(list(arrays)))
        assert all(np.array_equal(loaded[name].numpy(), array) for name, array in arrays.items())

    def edit_index(self, tmp_path: Path, change: Any) -> Path:
        draft = support.write_sharded(tmp_path / "draft", support.native_config(), support.body_arrays())
        index = json.loads((draft / INDEX_FILE).read_text())
        change(index)
        (draft / INDEX_FILE).write_text(json.dumps(index))
        return draft

    @pytest.mark.parametrize(
        "shard", ["../escape.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", None, "a\\b"]
    )
    def test_shard_names_stay_inside(self, shard: Any, tmp_path: Path) -> None:
        draft = self.edit_index(tmp_path, lambda index: index["weight_map"].update({"fc.weight": shard}))
        with pytest.raises(CheckpointError, match="expected a file beside the index"):
            _ = Checkpoint(draft).tensors

    def test_missing_shard(self, tmp_path: Path) -> None:
        draft = self.edit_index(tmp_path, lambda index: index["weight_map"].update({"fc.weight": "x.safetensors"}))
        with pytest.raises(CheckpointError, match=r"names x\.safetensors, which is not there"):
            _ = Checkpoint(draft).tensors

    def test_index_and_headers_must_agree(self, tmp_path: Path) -> None:
        def change(index: dict[str, Any]) -> None:
            index["weight_map"]["ghost"] = index["weight_map"].pop("fc.weight")

        with pytest.raises(TensorMismatch) as caught:
            _ = Checkpoint(self.edit_index(tmp_path, change)).tensors
        assert caught.value.unexpected == ("fc.weight",)
        assert caught.value.missing[0].startswith("ghost")

    def test_a_name_in_a_shard_that_the_index_does_not_give_it(self, tmp_path: Path) -> None:
        """transformers takes the copy of the index, vLLM whichever comes last."""
        arrays = support.body_arrays()
        draft = support.write_sharded(tmp_path / "draft", support.native_config(), arrays)
        second = draft / "model-00002-of-00002.safetensors"
        save_file({**load_file(second), "fc.weight": -arrays["fc.weight"]}, second)
        with pytest.raises(TensorMismatch) as caught:
            _ = Checkpoint(draft).tensors
        found = (
            "fc.weight (in model-00002-of-00002.safetensors; the index gives it to model-00001-of-00002.safetensors)"
        )
        assert caught.value.unexpected == (found,)

    def test_index_without_a_map(self, tmp_path: Path) -> None:
        draft = self.edit_index(tmp_path, lambda index: index.pop("weight_map"))
        with pytest.raises(CheckpointError, match="weight_map: missing"):
            _ = Checkpoint(draft).tensors

    def test_pickle_is_refused(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        (draft / "model.safetensors").rename(draft / "model.pth")
        with pytest.raises(CheckpointError, match=r"only pickle weights \(model.pth\)"):
            _ = Checkpoint(draft).tensors


class TestLinks:
    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_outside_is_refused(self, name: str, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        outside = tmp_path / "outside"
        (draft / name).rename(outside)
        (draft / name).symlink_to(outside)
        with pytest.raises(CheckpointError, match="outside the checkpoint"):
            _ = Checkpoint(draft).tensors

    def test_inside_is_followed(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        (draft / "model.safetensors").rename(draft / "data")
        (draft / "model.safetensors").symlink_to("data")
        assert "fc.weight" in Checkpoint(draft).tensors

    def test_the_hub_cache_is_followed(self, tmp_path: Path) -> None:
        snapshot = support.make_native(tmp_path / "models--acme--draft" / "snapshots" / "abc")
        blobs = snapshot.parents[1] / "blobs"
        blobs.mkdir()
        for name in ("config.json", "model.safetensors"):
            (snapshot / name).rename(blobs / name)
            (snapshot / name).symlink_to(f"../../blobs/{name}")
        assert "fc.weight" in Checkpoint(snapshot).tensors

    def test_a_checkpoint_that_is_itself_a_link(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        (tmp_path / "link").symlink_to(draft)
        assert "fc.weight" in Checkpoint(tmp_path / "link").tensors
