"""The destination is complete or absent, files keep their structure, and torch is not imported."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_cli.checkpoints import references, safetensors_writer
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.safetensors_writer import encode_header
from dflash_cli.conversion import execute, staging
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.plan import ConversionPlan, plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.safetensors_header import read_header
from dflash_runtime.errors import CapacityError, GateFailed, UsageError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses


def leftovers(directory: Path) -> list[str]:
    return [item.name for item in directory.iterdir() if ".tmp-" in item.name or ".old-" in item.name]


def plan(source: Path) -> ConversionPlan:
    return plan_conversion(open_draft(source), ConversionSpec(to="speculators", verifier="acme/target"))


class TestDestination:
    def test_refused_before_anything_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        outcome = invoke("convert", tmp_path / "absent", tmp_path / "out", "--to", "native")
        assert (outcome.code, outcome.error_id) == (2, "output-exists")

    def test_a_missing_folder_is_refused_and_not_made(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        outcome = invoke("convert", source, tmp_path / "absent" / "out", "--to", "native")
        assert (outcome.code, outcome.error_id) == (2, "no-parent-directory")
        with refuses(UsageError, "no-parent-directory", path=tmp_path / "absent"):
            convert_draft(plan(source), tmp_path / "absent" / "out")
        assert not (tmp_path / "absent").exists()

    @pytest.mark.parametrize("more", [(), ("--dry-run",)])
    @pytest.mark.parametrize("name", ["draft", "target", "."])
    def test_a_bundled_source_or_target_is_not_replaced(
        self, name: str, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = tmp_path / "tiny"
        support.make_native(home / "draft")
        support.make_target(home / "target")
        monkeypatch.setattr(references, "tiny_directory", lambda: home)
        outcome = invoke("convert", "tiny", home / name, "--to", "speculators", "--force", *more)
        id = "destination-holds-source" if name == "draft" else "destination-not-a-draft"
        assert (outcome.code, outcome.error_id) == (2, id)
        assert open_draft(home / "draft").format.name == "native"
        assert (home / "target" / "model.safetensors").exists()

    def test_force_replaces_a_checkpoint(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        destination = support.make_native(tmp_path / "out", support.Shape(vocab=40, draft_vocab=40))
        args = ["convert", source, destination, "--to", "speculators", "--target-name", "acme/target", "--force"]
        assert invoke(*args).code == 0
        assert open_draft(destination).config.vocab_size == 32
        assert leftovers(tmp_path) == []

    def test_dry_run_writes_nothing(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        args = ["convert", source, tmp_path / "out", "--to", "speculators", "--target-name", "acme/target", "--dry-run"]
        outcome = invoke(*args)
        assert outcome.code == 0
        lines = [line.split() for line in outcome.out.splitlines()]
        assert ["derived", "dflash_config.target_layer_ids", "->", "aux_hidden_state_layer_ids"] in [
            words[:4] for words in lines
        ]
        assert ["writes", "model.safetensors", "(24064"] in [words[:3] for words in lines]
        document = json.loads(invoke(*args, "--json").out)
        assert document["dry_run"] is True
        assert [item.name for item in tmp_path.iterdir()] == ["source"]

    def test_json_prints_the_manifest(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        args = ["convert", source, tmp_path / "out", "--to", "speculators", "--target-name", "acme/target", "--json"]
        printed = json.loads(invoke(*args).out)
        written = json.loads((tmp_path / "out" / "conversion.json").read_text())
        assert {**written, "kind": "convert", "destination": str(tmp_path / "out")} == printed

    @pytest.mark.parametrize(
        ("error", "reported"),
        [(KeyboardInterrupt, KeyboardInterrupt), (OSError, UsageError), (GateFailed, GateFailed)],
    )
    @pytest.mark.parametrize("exists", [False, True])
    def test_any_failure_leaves_nothing(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: type[BaseException],
        reported: type[BaseException],
        exists: bool,
    ) -> None:
        source = support.make_native(tmp_path / "source")
        if exists:
            support.make_native(tmp_path / "out", support.Shape(vocab=40, draft_vocab=40))

        def fail(*args: object, **kwargs: object) -> None:
            raise error("in the middle")

        monkeypatch.setattr("dflash_cli.conversion.execute.verify_roundtrip", fail)
        with pytest.raises(reported):
            convert_draft(plan(source), tmp_path / "out", force=exists)
        assert leftovers(tmp_path) == []
        assert (tmp_path / "out").exists() is exists
        if exists:
            assert open_draft(tmp_path / "out").config.vocab_size == 40

    def test_a_failed_rename_puts_the_old_one_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = support.make_native(tmp_path / "source")
        support.make_native(tmp_path / "out", support.Shape(vocab=40, draft_vocab=40))
        move = staging.move_new

        def fail(source: Path, destination: Path) -> None:
            if ".tmp-" in source.name:
                raise KeyboardInterrupt
            move(source, destination)

        monkeypatch.setattr(staging, "move_new", fail)
        with pytest.raises(KeyboardInterrupt):
            convert_draft(plan(source), tmp_path / "out", force=True)
        assert open_draft(tmp_path / "out").config.vocab_size == 40
        assert leftovers(tmp_path) == []

    def test_a_full_disk_is_seen_before_writing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = support.make_native(tmp_path / "source")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        with refuses(CapacityError, "disk-full", path=tmp_path, found=10):
            convert_draft(plan(source), tmp_path / "out")
        assert [item.name for item in tmp_path.iterdir()] == ["source"]

    def test_a_result_that_differs_is_caught(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = support.make_native(tmp_path / "source")
        copy = safetensors_writer.write_tensors

        def corrupt(destination: Path, *args: Any) -> None:
            copy(destination, *args)
            with destination.open("r+b") as stream:
                stream.seek(-4, os.SEEK_END)
                stream.write(b"\x00\x00\x00\x00")

        monkeypatch.setattr(execute, "write_tensors", corrupt)
        with refuses(GateFailed, "result-differs") as caught:
            convert_draft(plan(source), tmp_path / "out")
        assert caught.value.field in support.body_arrays()
        assert not (tmp_path / "out").exists()


class TestFiles:
    def test_shards_keep_their_structure(self, tmp_path: Path) -> None:
        arrays = support.body_arrays()
        source = support.write_sharded(tmp_path / "source", support.native_config(), arrays, num_shards=3)
        support.convert(source, tmp_path / "out", "speculators", verifier="acme/target")
        names = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
        assert names == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
        before = json.loads((source / "model.safetensors.index.json").read_text())
        after = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert after["weight_map"] == before["weight_map"]
        result = Checkpoint(tmp_path / "out")
        for name, array in arrays.items():
            assert result.load(name).numpy().tobytes() == array.tobytes()

    def test_header_is_aligned_and_marked(self, tmp_path: Path) -> None:
        source = support.make_speculators(tmp_path / "source", support.REDUCED)
        support.convert(source, tmp_path / "out", "speculators")
        data = (tmp_path / "out" / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        assert json.loads(data[8 : 8 + length])["__metadata__"] == {"format": "pt"}
        for info in read_header(tmp_path / "out" / "model.safetensors").values():
            assert info.begin % {"I64": 8, "F32": 4, "BOOL": 1}[info.dtype] == 0
        support.assert_same_tensors(source, tmp_path / "out")

    @pytest.mark.parametrize("padding", [0, 8, 4000, 4096])
    def test_data_keeps_its_offset_within_a_page(self, padding: int, tmp_path: Path) -> None:
        """The header is padded with spaces, so that the system can copy whole memory pages."""
        source = support.make_native(tmp_path / "source")
        file = source / "model.safetensors"
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length] + b" " * (padding + -length % 8)
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        support.convert(source, tmp_path / "out", "speculators", verifier="acme/target")
        first, copy = (
            min(info.begin for info in read_header(path / "model.safetensors").values())
            for path in (source, tmp_path / "out")
        )
        assert first % 4096 == copy % 4096
        support.assert_same_tensors(source, tmp_path / "out")

    def test_an_empty_file_has_a_valid_header(self) -> None:
        header = encode_header([])
        assert len(header) % 8 == 0

    def test_empty_tensors_survive(self, tmp_path: Path) -> None:
        """A tensor with 0 elements keeps its entry in the header."""
        from safetensors.numpy import save_file

        from dflash_cli.checkpoints.safetensors_writer import write_tensors

        save_file({"a": np.zeros((0, 4), np.float32), "b": np.ones(3, np.float32)}, tmp_path / "in.safetensors")
        infos = read_header(tmp_path / "in.safetensors")
        write_tensors(tmp_path / "out.safetensors", infos.values(), lambda count: None)
        copy = load_file(tmp_path / "out.safetensors")
        assert copy["a"].shape == (0, 4)
        assert copy["b"].tolist() == [1, 1, 1]
