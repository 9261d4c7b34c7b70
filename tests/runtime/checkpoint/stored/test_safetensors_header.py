"""The reader of safetensors headers: each fault in a header has its own error."""

import json
import struct
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from dflash_runtime.checkpoint.stored.safetensors_header import read_header
from dflash_runtime.errors import CheckpointError
from dflash_testing import checkpoints as support
from dflash_testing.refusals import refuses

FRAME = 8 + len(json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}))
"""Bytes before the data of a file with the one tensor `a` of 4 bytes."""


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a safetensors file with exactly this header."""
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
        ("data", "id", "found"),
        [
            (b"", "not-safetensors", 0),
            (b"1234567", "not-safetensors", 7),
            (struct.pack("<Q", 0), "not-safetensors", 0),
            (struct.pack("<Q", 2**63) + b"{}", "not-safetensors", 2**63),
            (struct.pack("<Q", 100) + b"{}", "header-truncated", 100),
            (struct.pack("<Q", 4) + b"{}{}", "not-json", None),
            (struct.pack("<Q", 2) + b"[]", "json-not-an-object", "list"),
            (b"\x80\x04pickle data here", "not-safetensors", int.from_bytes(b"\x80\x04pickle", "little")),
        ],
    )
    def test_prefix(self, data: bytes, id: str, found: object, tmp_path: Path) -> None:
        file = tmp_path / "x.safetensors"
        file.write_bytes(data)
        with refuses(CheckpointError, id, path=file, found=found) as caught:
            read_header(file)
        assert str(file) in caught.value.message

    @pytest.mark.parametrize(
        ("header", "data", "id", "field", "found"),
        [
            ({"a": entry(0, 4)}, b"123", "file-truncated", "file size", FRAME + 3),
            ({"a": entry(0, 4)}, b"12345", "file-oversized", "file size", FRAME + 5),
            ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "tensor-overlap", "b", 2),
            ({"a": entry(0, 2), "b": entry(4, 6)}, b"123456", "tensor-hole", "b", 4),
            ({"a": entry(2, 4)}, b"1234", "tensor-hole", "a", 2),
            ({"a": entry(0, 4, dtype="F12")}, b"1234", "tensor-unknown-dtype", "a", "F12"),
            ({"a": entry(0, 4, dtype="F32") | {"shape": [2]}}, b"1234", "tensor-bytes", "a", 4),
            ({"a": entry(0, 4) | {"shape": [-4]}}, b"1234", "tensor-shape", "a", [-4]),
            ({"a": entry(0, 4) | {"shape": [True]}}, b"1234", "tensor-shape", "a", [True]),
            ({"a": entry(0, 4) | {"data_offsets": [4, 0]}}, b"1234", "tensor-data-offsets", "a", [4, 0]),
            ({"a": entry(0, 4) | {"data_offsets": [0]}}, b"1234", "tensor-data-offsets", "a", [0]),
            ({"a": []}, b"", "tensor-object", "a", []),
            ({"__metadata__": []}, b"", "header-metadata", "__metadata__", []),
            ({"__metadata__": {"epoch": 1}}, b"", "header-metadata", "__metadata__", {"epoch": 1}),
            (b'{"a":' + json.dumps(entry(0, 1)).encode() + b',"a":' + json.dumps(entry(0, 1)).encode() + b"}",
             b"1", "json-duplicate-key", None, "a"),
        ],
    )  # fmt: skip
    def test_entries(self, header: Any, data: bytes, id: str, field: str | None, found: object, tmp_path: Path) -> None:
        file = write_file(tmp_path / "x.safetensors", header, data)
        with refuses(CheckpointError, id, path=file, field=field, found=found):
            read_header(file)

    def test_a_product_that_would_overflow_does_not_fit(self, tmp_path: Path) -> None:
        header = {"a": entry(0, 4) | {"shape": [2**62, 2**62, 4]}}
        with refuses(CheckpointError, "tensor-bytes", field="a", found=4):
            read_header(write_file(tmp_path / "x.safetensors", header, b"1234"))

    @pytest.mark.parametrize("count", [49_000, 240_000])
    def test_very_many_tensors_take_seconds(self, count: int, tmp_path: Path) -> None:
        header = {f"layers.{at}.x": entry(0, 0, [0]) for at in range(count)}
        file = write_file(tmp_path / "x.safetensors", header)
        started = time.perf_counter()
        with refuses(CheckpointError, "too-many-tensors") if count > 50_000 else nullcontext():
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
def test_a_damaged_header_is_read_as_the_library_does_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """With any changed bytes in a header, tensors stay inside the file, and a header the library refuses is refused."""
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
