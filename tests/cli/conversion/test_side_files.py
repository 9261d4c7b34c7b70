"""The learned mask embedding is found in `mask_embedding.pt` without unpickling, and copied if readers use it."""

import collections
import contextlib
import io
import os
import pickle
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dflash_cli.checkpoints.torch_zip import read_torch_zip
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import MISSING, CheckpointError, DFlashError, UnsupportedError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses

EMBEDDING = torch.arange(16, dtype=torch.bfloat16) / 8


def save(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


@cache
def saved() -> bytes:
    """A mask embedding as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save({"embedding": EMBEDDING, "mask_token_id": 31}, buffer)
    return buffer.getvalue()


def content(info: Any) -> bytes:
    assert isinstance(info, TensorInfo)
    with info.file.open("rb") as stream:
        stream.seek(info.begin)
        return stream.read(info.num_bytes)


def source(tmp_path: Path, value: object | None = None) -> Path:
    path = support.make_native(tmp_path / "source")
    save(path / "mask_embedding.pt", {"embedding": EMBEDDING, "mask_token_id": 31} if value is None else value)
    return path


class TestReader:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
    def test_a_tensor_and_a_number(self, dtype: torch.dtype, tmp_path: Path) -> None:
        tensor = torch.randn(3, 5).to(dtype)
        found = read_torch_zip(save(tmp_path / "a.pt", {"embedding": tensor, "mask_token_id": 151669, "n": None}))
        assert found["mask_token_id"] == 151669
        assert found["embedding"].shape == (3, 5)
        assert content(found["embedding"]) == tensor.view(torch.uint8).numpy().tobytes()

    def test_a_slice_of_a_shared_storage(self, tmp_path: Path) -> None:
        whole = torch.arange(12.0)
        found = read_torch_zip(save(tmp_path / "a.pt", {"all": whole, "part": whole[4:8]}))
        assert np.frombuffer(content(found["part"]), np.float32).tolist() == [4, 5, 6, 7]

    def test_an_ordered_dictionary_inside(self, tmp_path: Path) -> None:
        found = read_torch_zip(save(tmp_path / "a.pt", {"more": collections.OrderedDict()}))
        assert found == {"more": {}}

    @pytest.mark.parametrize(
        ("value", "id", "found"),
        [
            (torch.ones(2), "torch-zip-not-a-dictionary", ""),
            ({1: torch.ones(2)}, "torch-zip-not-a-dictionary", ""),
            ({"a": torch.ones(2, 3).T}, "torch-zip-not-contiguous", ""),
            ({"a": torch.nn.Parameter(torch.ones(2))}, "torch-zip-pickle-global", "torch._utils._rebuild_parameter"),
            ({"a": torch.ones(2, dtype=torch.bool)}, "torch-zip-pickle-global", "torch.BoolStorage"),
            ({"a": np.ones(2)}, "torch-zip-pickle-global", "numpy."),
        ],
    )
    def test_anything_else_is_refused(self, value: Any, id: str, found: str, tmp_path: Path) -> None:
        with refuses(UnsupportedError, id, path=tmp_path / "a.pt") as caught:
            read_torch_zip(save(tmp_path / "a.pt", value))
        assert str(caught.value.found or "").startswith(found)

    @pytest.mark.parametrize("data", [b"", b"not a zip", pickle.dumps({"a": 1})])
    def test_a_file_that_is_not_an_archive(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        path.write_bytes(data)
        with refuses(UnsupportedError, "torch-zip-not-an-archive", path=path):
            read_torch_zip(path)

    def test_an_archive_without_its_beginning(self, tmp_path: Path) -> None:
        """The offsets of its members are then negative."""
        path = save(tmp_path / "a.pt", {"embedding": torch.ones(4)})
        path.write_bytes(path.read_bytes()[10:])
        with refuses(UnsupportedError, "torch-zip-not-an-archive", path=path):
            read_torch_zip(path)

    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_bytes_changed_anywhere(self, data: st.DataObject, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        damaged = bytearray(saved())
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError, UnsupportedError):
            read_torch_zip(path)

    def test_code_is_never_run(self, tmp_path: Path) -> None:
        """The pickle calls `os.system`."""

        class Bomb:
            def __reduce__(self) -> Any:
                return os.system, (f"touch {tmp_path / 'ran'}",)

        path = tmp_path / "a.pt"
        torch.save({"embedding": Bomb()}, path)
        with refuses(UnsupportedError, "torch-zip-pickle-global", found=f"{os.system.__module__}.system"):
            read_torch_zip(path)
        assert not (tmp_path / "ran").exists()

    def test_a_bomb_in_a_copied_file_stops_the_conversion(self, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> Any:
                return os.system, (f"touch {tmp_path / 'ran'}",)

        path = source(tmp_path, {"embedding": Bomb()})
        for to in ("native", "vllm", "sglang"):
            outcome = invoke("convert", path, tmp_path / "out", "--to", to)
            assert (outcome.code, outcome.error_id) == (5, "torch-zip-pickle-global")
        assert not (tmp_path / "ran").exists()

    def test_a_tensor_past_its_storage(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.pt", {"embedding": torch.ones(4)})
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data[:8] if "/data/" in name else data)
        with refuses(CheckpointError, "storage-too-small", field="embedding"):
            read_torch_zip(tmp_path / "b.pt")

    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_a_damaged_pickle_raises_an_error_for_the_user(self, data: st.DataObject, tmp_path: Path) -> None:
        """Random bytes of the uncompressed pickle are changed."""
        with zipfile.ZipFile(io.BytesIO(saved())) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        name = next(name for name in members if name.endswith("data.pkl"))
        damaged = bytearray(members[name])
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        path = tmp_path / "a.pt"
        with zipfile.ZipFile(path, "w") as archive:
            for member, value in members.items():
                archive.writestr(member, bytes(damaged) if member == name else value)
        with contextlib.suppress(DFlashError):
            read_torch_zip(path)


class TestConversion:
    def test_native_keeps_the_pickle_and_says_who_reads_it(self, tmp_path: Path) -> None:
        """z-lab's MLX loader and vLLM read every safetensors file as weights, so the result has only one."""
        path = source(tmp_path)
        outcome = invoke("convert", path, tmp_path / "out", "--to", "native")
        assert outcome.notices == ("mask-embedding-copied",)
        assert (tmp_path / "out" / "mask_embedding.pt").read_bytes() == (path / "mask_embedding.pt").read_bytes()
        assert [item.name for item in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]

    def test_the_mask_file_is_not_read_as_weights(self, tmp_path: Path) -> None:
        """The file is not read as weights, whatever the names of the weight files are."""
        path = source(tmp_path)
        (path / "model.safetensors").rename(path / "weights.safetensors")
        support.convert(path, tmp_path / "out", "native")
        support.convert(tmp_path / "out", tmp_path / "again", "native")
        assert load_file(tmp_path / "again" / "model.safetensors").keys() == support.body_arrays().keys()

    @pytest.mark.parametrize("to", ["vllm", "sglang"])
    def test_engines_get_the_file_they_read(self, to: str, tmp_path: Path) -> None:
        path = source(tmp_path)
        support.convert(path, tmp_path / "out", to)
        assert (tmp_path / "out" / "mask_embedding.pt").read_bytes() == (path / "mask_embedding.pt").read_bytes()
        loaded = torch.load(tmp_path / "out" / "mask_embedding.pt", weights_only=True)
        assert torch.equal(loaded["embedding"], EMBEDDING)

    @pytest.mark.parametrize("to", ["speculators", "mlx"])
    def test_other_dialects_cannot_hold_it(self, to: str, tmp_path: Path) -> None:
        args = ["convert", source(tmp_path), tmp_path / "out", "--to", to, "--target-name", "a/b"]
        outcome = invoke(*args)
        assert (outcome.code, outcome.error_id) == (5, "mask-embedding")
        assert outcome.error is not None
        assert "--allow-lossy" in str(outcome.error.hint)
        assert invoke(*args, "--allow-lossy").code == 0
        assert not list((tmp_path / "out").glob("mask_embedding*"))

    @pytest.mark.parametrize("to", ["native", "mlx", "vllm", "sglang"])
    def test_engines_do_not_read_it_from_safetensors(self, to: str, tmp_path: Path) -> None:
        path = support.make_native(tmp_path / "source")
        save_file({"embedding": EMBEDDING.float().numpy()}, path / "mask_embedding.safetensors")
        outcome = invoke("convert", path, tmp_path / "out", "--to", to)
        assert (outcome.code, outcome.error_id) == (5, "mask-embedding")
        assert outcome.error is not None
        assert outcome.error.path == path / "mask_embedding.safetensors"
        assert invoke("convert", path, tmp_path / "out", "--to", to, "--allow-lossy").code == 0
        assert not list((tmp_path / "out").glob("mask_embedding*"))

    @pytest.mark.parametrize(
        ("value", "id", "found"),
        [
            ({"embedding": EMBEDDING, "mask_token_id": 30}, "other-mask-token", 30),
            ({"embedding": EMBEDDING[:8].clone()}, "mask-embedding-shape", [8]),
            ({"mask_token_id": 31}, "mask-embedding-shape", MISSING),
        ],
    )
    def test_the_embedding_of_another_draft(self, value: Any, id: str, found: object, tmp_path: Path) -> None:
        outcome = invoke("convert", source(tmp_path, value), tmp_path / "out", "--to", "native")
        assert (outcome.code, outcome.error_id) == (3, id)
        assert outcome.error is not None
        assert outcome.error.found == found


def test_copied_and_dropped_files(tmp_path: Path) -> None:
    path = support.make_native(tmp_path / "source")
    for name in ("LICENSE", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (path / name).write_text(name)
    for name in ("modeling_dflash.py", "optimizer.pt", "training_args.json", "old.gguf"):
        (path / name).write_text("{}")
    (path / "assets").mkdir()
    manifest = support.convert(path, tmp_path / "out", "native")
    kept = {entry["from"] for entry in manifest["files"] if entry["change"] == "kept"}
    assert kept == {
        "LICENSE", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
    }  # fmt: skip
    for name in kept:
        assert (tmp_path / "out" / name).read_text() == name
    dropped = {entry["from"]: entry["why"] for entry in manifest["files"] if entry["change"] == "dropped"}
    assert set(dropped) == {"assets", "modeling_dflash.py", "old.gguf", "optimizer.pt", "training_args.json"}
    assert len(set(dropped.values())) == 5


def test_a_side_file_that_leads_outside_is_refused(tmp_path: Path) -> None:
    path = support.make_native(tmp_path / "source")
    (tmp_path / "secret").write_text("secret")
    (path / "README.md").symlink_to(tmp_path / "secret")
    outcome = invoke("convert", path, tmp_path / "out", "--to", "native")
    assert (outcome.code, outcome.error_id) == (3, "link-outside")
