"""The reader of headers and JSON: each fault in a checkpoint's files has its own error."""

import hashlib
import json
import re
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
from dflash_runtime.errors import MISSING, CheckpointError, CheckpointNotFound, TensorMismatch
from dflash_runtime.json_values import finite, is_number
from dflash_testing import checkpoints as support
from dflash_testing.refusals import refuses

PATH = Path("some.json")

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


class TestJson:
    def test_a_config_may_hold_numbers_that_are_not_finite(self) -> None:
        """Published configs of Nemotron-H do, in a key that dflash does not read. A number that is read is finite."""
        found = parse_json(
            b'{"time_step_limit": [0.0, Infinity], "block_size": NaN, "big": 1e999}', PATH, is_config=True
        )
        assert found["time_step_limit"] == [0.0, float("inf")]
        assert not is_number(found["block_size"])
        assert finite(found)["time_step_limit"] == [0.0, "Infinity"]

    @pytest.mark.parametrize(
        ("text", "id", "found"),
        [
            (b"", "not-json", None),
            (b"[1]", "json-not-an-object", "list"),
            (b'{"a": Infinity}', "json-constant", "Infinity"),
            (b'{"a": 1e999}', "json-number-too-large", "1e999"),
            (b'{"a": ' + b"9" * 30 + b"}", "json-number-too-large", "9" * 30),
            (b'{"a": -' + b"9" * 5000 + b"}", "json-number-too-large", "-" + "9" * 19),
            (b"\xef\xbb\xbf{}", "json-byte-order-mark", None),
            (b'{"a": {"b": 1, "b": 2}}', "json-duplicate-key", "b"),
            (b'{"\xff": 1}', "json-not-utf8", 2),
            (b'{"a": "\\ud800"}', "json-half-surrogate", None),
            (b'{"a":' * 65 + b"1" + b"}" * 65, "json-too-deep", None),
            (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "json-too-deep", None),
        ],
    )
    def test_strictness(self, text: bytes, id: str, found: object) -> None:
        with refuses(CheckpointError, id, path=PATH, found=found):
            parse_json(text, PATH)

    def test_deep_nesting_stops_no_parser(self) -> None:
        """Python releases differ in whether the depth or the missing end is noticed first."""
        with refuses(CheckpointError, path=PATH) as caught:
            parse_json(b'{"a":' * 100_000, PATH)
        assert caught.value.id in ("json-too-deep", "not-json")

    def test_a_byte_order_mark_has_a_hint_that_works(self, tmp_path: Path) -> None:
        path = tmp_path / "it's a config.json"
        path.write_bytes(b"\xef\xbb\xbf{}")
        with refuses(CheckpointError, "json-byte-order-mark") as caught:
            read_json(path)
        assert caught.value.hint is not None
        subprocess.run(caught.value.hint.partition(": ")[2], shell=True, check=True)
        assert path.read_bytes() == b"{}"

    def test_numbers_stay_numbers(self) -> None:
        assert parse_json(b'{"a":' * 64 + b"1" + b"}" * 64, PATH)
        assert parse_json(b'{"a": 1e-6, "b": -3}', PATH) == {"a": 1e-6, "b": -3}


class TestDirectory:
    def test_absent(self, tmp_path: Path) -> None:
        with refuses(CheckpointNotFound, path=tmp_path / "absent"):
            Checkpoint(tmp_path / "absent")

    def test_a_file_is_not_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with refuses(CheckpointError, "not-a-directory", path=tmp_path / "file"):
            Checkpoint(tmp_path / "file")

    def test_without_config_or_weights(self, tmp_path: Path) -> None:
        with refuses(CheckpointError, "config-missing", path=tmp_path / "config.json"):
            Checkpoint(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        with refuses(CheckpointError, "no-weights", path=tmp_path):
            _ = Checkpoint(tmp_path).tensors

    def test_a_tensor_in_two_files(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        arrays = load_file(draft / "model.safetensors")
        (draft / "model.safetensors").rename(draft / "a.safetensors")
        save_file({"fc.weight": arrays["fc.weight"]}, draft / "b.safetensors")
        with refuses(CheckpointError, "tensor-in-two-files", field="fc.weight", path=draft / "b.safetensors"):
            _ = Checkpoint(draft).tensors

    def test_single_file(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(support.make_native(tmp_path / "draft"))
        assert [file.name for file in checkpoint.weight_files] == ["model.safetensors"]
        expected = support.body_arrays()["fc.weight"]
        assert np.array_equal(checkpoint.load("fc.weight").numpy(), expected)

    def test_a_stray_weight_file_is_ignored(self, tmp_path: Path) -> None:
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
        with refuses(CheckpointError, "shard-outside", field="weight_map", found=shard):
            _ = Checkpoint(draft).tensors

    def test_missing_shard(self, tmp_path: Path) -> None:
        draft = self.edit_index(tmp_path, lambda index: index["weight_map"].update({"fc.weight": "x.safetensors"}))
        with refuses(CheckpointError, "shard-missing", path=draft / INDEX_FILE, found="x.safetensors"):
            _ = Checkpoint(draft).tensors

    def test_index_and_headers_must_agree(self, tmp_path: Path) -> None:
        def change(index: dict[str, Any]) -> None:
            index["weight_map"]["ghost"] = index["weight_map"].pop("fc.weight")

        with pytest.raises(TensorMismatch) as caught:
            _ = Checkpoint(self.edit_index(tmp_path, change)).tensors
        assert caught.value.unexpected == ("fc.weight",)
        assert caught.value.missing[0].startswith("ghost")

    def test_a_tensor_in_a_shard_that_the_index_does_not_name(self, tmp_path: Path) -> None:
        """transformers takes the copy in the index's shard, vLLM takes the last copy."""
        arrays = support.body_arrays()
        draft = support.write_sharded(tmp_path / "draft", support.native_config(), arrays)
        second = draft / "model-00002-of-00002.safetensors"
        save_file({**load_file(second), "fc.weight": -arrays["fc.weight"]}, second)
        with pytest.raises(TensorMismatch) as caught:
            _ = Checkpoint(draft).tensors
        (found,) = caught.value.unexpected
        assert re.findall(r"fc\.weight|model-\d+-of-\d+", found) == [
            "fc.weight", "model-00002-of-00002", "model-00001-of-00002",
        ]  # fmt: skip

    def test_index_without_a_map(self, tmp_path: Path) -> None:
        draft = self.edit_index(tmp_path, lambda index: index.pop("weight_map"))
        with refuses(CheckpointError, "index-without-map", field="weight_map", found=MISSING):
            _ = Checkpoint(draft).tensors

    def test_pickle_is_refused(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        (draft / "model.safetensors").rename(draft / "model.pth")
        with refuses(CheckpointError, "pickle-weights", path=draft, found="model.pth"):
            _ = Checkpoint(draft).tensors


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_cache(home: Path) -> Path:
    """Write a draft as the hub's client stores it, and return the repository's folder."""
    repo = home / "models--acme--dflash-draft"
    snapshot = support.make_native(repo / "snapshots" / COMMIT)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file in sorted(snapshot.iterdir()):
        blob = repo / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        file.symlink_to(f"../../blobs/{blob.name}")
    return repo


class TestLinks:
    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_outside_is_refused(self, name: str, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        outside = tmp_path / "outside"
        (draft / name).rename(outside)
        (draft / name).symlink_to(outside)
        with refuses(CheckpointError, "link-outside", path=draft / name, found=str(outside)):
            _ = Checkpoint(draft).tensors

    def test_a_link_to_itself_is_refused(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        (draft / "model.safetensors").unlink()
        (draft / "model.safetensors").symlink_to("model.safetensors")
        with refuses(CheckpointError, path=draft / "model.safetensors") as caught:
            _ = Checkpoint(draft).tensors
        assert caught.value.id in ("link-to-itself", "file-unreadable")  # by release of Python

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

    @pytest.mark.parametrize("via", ["blob", "snapshot"])
    def test_a_directory_of_links_into_the_hub_cache_is_followed(self, via: str, tmp_path: Path) -> None:
        repo, folder = make_cache(tmp_path), tmp_path / "plain"
        (snapshot,) = (repo / "snapshots").iterdir()
        folder.mkdir()
        for file in snapshot.iterdir():
            (folder / file.name).symlink_to(file.resolve() if via == "blob" else file)
        assert "fc.weight" in Checkpoint(folder).tensors
        assert support.invoke("inspect", folder).code == 0
        outcome = support.invoke("convert", folder, tmp_path / "out", "--to", "mlx")
        assert outcome.code == 0, outcome.err
        assert not (tmp_path / "out" / "model.safetensors").is_symlink()

    @pytest.mark.parametrize("repo", ["models--acme--draft", "datasets--acme--draft", "acme"])
    @pytest.mark.parametrize("name", ["a" * 64, "secret"])
    def test_other_links_into_a_folder_of_blobs_are_refused(self, repo: str, name: str, tmp_path: Path) -> None:
        """Only blobs of a model are followed: the folder, its snapshots, and a name that is a hash."""
        draft, blob = support.make_native(tmp_path / "draft"), tmp_path / repo / "blobs" / name
        (tmp_path / repo / "snapshots").mkdir(parents=True)
        blob.parent.mkdir()
        (draft / "config.json").rename(blob)
        (draft / "config.json").symlink_to(blob)
        if repo.startswith("models--") and name != "secret":
            assert Checkpoint(draft).config
            return
        with refuses(CheckpointError, "link-outside", path=draft / "config.json"):
            _ = Checkpoint(draft).tensors

    def test_the_hubs_own_cache_is_found_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The layout is the client's: blobs by hash, a reference to a commit, and a snapshot of links."""
        from huggingface_hub import constants

        make_cache(tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        for reference in ("acme/dflash-draft", "acme/dflash-draft@main"):
            outcome = support.invoke("inspect", reference, "--json")
            assert outcome.code == 0, outcome.err
            assert "snapshots" in json.loads(outcome.out)["path"]
        outcome = support.invoke("convert", "acme/dflash-draft", tmp_path / "out", "--to", "mlx", "--json")
        assert outcome.code == 0, outcome.err
        assert json.loads(outcome.out)["source"] == {
            "name": "acme/dflash-draft",
            "repo": "acme/dflash-draft",
            "commit": COMMIT,
        }

    def test_a_checkpoint_that_is_itself_a_link(self, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "draft")
        (tmp_path / "link").symlink_to(draft)
        assert "fc.weight" in Checkpoint(tmp_path / "link").tensors
