"""The files of a checkpoint: each fault in its folder, its index and its links has its own error."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_runtime.checkpoint.stored.files import INDEX_FILE, Checkpoint
from dflash_runtime.errors import MISSING, CheckpointError, CheckpointNotFound, TensorMismatch
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses


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
        assert invoke("inspect", folder).code == 0
        outcome = invoke("convert", folder, tmp_path / "out", "--to", "mlx")
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
            outcome = invoke("inspect", reference, "--json")
            assert outcome.code == 0, outcome.err
            assert "snapshots" in json.loads(outcome.out)["path"]
        outcome = invoke("convert", "acme/dflash-draft", tmp_path / "out", "--to", "mlx", "--json")
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
