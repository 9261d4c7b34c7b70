"""Tensor layouts: prefixes, fused projections, aliases, odd files and quantised weights are read and converted."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion.logits import verify_logits
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.errors import CheckpointError, LossyConversion, TensorMismatch, UnsupportedError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses

BIASED = replace(support.SMALL, bias=True)


def prefixed(prefix: str) -> Callable[[support.Arrays], support.Arrays]:
    return lambda arrays: {prefix + name: array for name, array in arrays.items()}


def fused(arrays: support.Arrays) -> support.Arrays:
    """Fuse projections as engines do in memory."""
    result = dict(arrays)
    for layer in range(support.SMALL.layers):
        for whole, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            for kind in ("weight", "bias"):
                names = [f"layers.{layer}.{part}.{kind}" for part in parts]
                if names[0] in result:
                    result[f"layers.{layer}.{whole}.{kind}"] = np.concatenate([result.pop(name) for name in names])
    return result


def encoder_names(arrays: support.Arrays) -> support.Arrays:
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {renamed.get(name, name): array for name, array in arrays.items()}


LAYOUTS: dict[str, Callable[[support.Arrays], support.Arrays]] = {
    "model.": prefixed("model."),
    "dflash_module.": prefixed("dflash_module."),
    "draft_model.model.": prefixed("draft_model.model."),
    "encoder": encoder_names,
    "fused": fused,
    "fused and prefixed": lambda arrays: prefixed("model.")(fused(arrays)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [support.SMALL, BIASED], ids=["plain", "biased"])
def test_every_layout_loads_and_converts_to_plain_names(name: str, shape: support.Shape, tmp_path: Path) -> None:
    arrays = support.body_arrays(shape)
    source = support.write_checkpoint(tmp_path / "source", support.native_config(shape), LAYOUTS[name](arrays))
    draft = open_draft(source)
    assert set(draft.select_tensors().load) == set(arrays)
    for tensor_name, tensor in draft.source.checkpoint.load_many(list(arrays)):
        assert tensor.numpy().tobytes() == arrays[tensor_name].tobytes(), tensor_name
    support.convert(source, tmp_path / "out", "native")
    support.assert_same_tensors(
        support.write_checkpoint(tmp_path / "plain", support.native_config(shape), arrays), tmp_path / "out"
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_runs_to_equal_logits(name: str, tmp_path: Path) -> None:
    arrays = support.body_arrays()
    plain = support.write_checkpoint(tmp_path / "plain", support.native_config(), arrays)
    other = support.write_checkpoint(tmp_path / "other", support.native_config(), LAYOUTS[name](arrays))
    assert verify_logits(open_draft(plain), open_draft(other)).max_difference == 0


def test_the_manifest_has_names_and_rows(tmp_path: Path) -> None:
    source = support.write_checkpoint(
        tmp_path / "source", support.native_config(), prefixed("model.")(fused(support.body_arrays()))
    )
    manifest = support.convert(source, tmp_path / "out", "native")
    changes = {entry["to"]: entry for entry in manifest["tensors"]}
    assert changes["fc.weight"]["from"] == "model.fc.weight"
    assert changes["fc.weight"]["change"] == "renamed"
    keys = changes["layers.1.self_attn.k_proj.weight"]
    assert (keys["from"], keys["change"]) == ("model.layers.1.self_attn.qkv_proj.weight", "split")
    assert re.findall(r"\d+", keys["why"]) == ["32", "47"]
    stored = set(Checkpoint(source).tensors)
    assert {entry["from"] for entry in manifest["tensors"]} == stored


def test_a_fused_projection_with_too_few_rows_is_named(tmp_path: Path) -> None:
    arrays = fused(support.body_arrays())
    arrays["layers.0.self_attn.qkv_proj.weight"] = arrays["layers.0.self_attn.qkv_proj.weight"][:-1].copy()
    source = support.write_checkpoint(tmp_path / "source", support.native_config(), arrays)
    with pytest.raises(TensorMismatch) as refused:
        open_draft(source).select_tensors()
    assert refused.value.wrong == {"layers.0.self_attn.qkv_proj.weight": ("[63, 16]", "32 + 16 + 16 rows")}


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    arrays = support.body_arrays()
    arrays["model.norm.weight"] = arrays["norm.weight"]
    source = support.write_checkpoint(tmp_path / "source", support.native_config(), arrays)
    with refuses(CheckpointError, "tensor-stored-twice", field="norm.weight") as refused:
        open_draft(source).select_tensors()
    assert set(refused.value.found) == {"norm.weight", "model.norm.weight"}


def test_a_prefixed_head_is_compared_with_the_targets(tmp_path: Path) -> None:
    target = support.target_arrays(support.REDUCED)
    arrays = prefixed("model.")({**support.body_arrays(), **support.reduced_arrays(support.REDUCED, target)})
    source = support.write_checkpoint(tmp_path / "source", support.speculators_config(support.REDUCED), arrays)
    made = support.make_target(tmp_path / "target", support.REDUCED)
    support.convert(source, tmp_path / "out", "native", target=made, allow_lossy=True)
    assert set(Checkpoint(tmp_path / "out").tensors) == set(support.body_arrays())


class TestFiles:
    def shards(self, path: Path, names: list[str], *, index: str | None = None) -> Path:
        """Write a checkpoint in files of these names."""
        arrays = support.body_arrays()
        path.mkdir()
        support.write_config(path, support.native_config())
        weight_map: dict[str, str] = {}
        for at, name in enumerate(names):
            members = {key: arrays[key] for key in sorted(arrays)[at :: len(names)]}
            save_file(members, path / name)
            weight_map |= dict.fromkeys(members, name)
        if index is not None:
            (path / index).write_text(json.dumps({"weight_map": weight_map}))
        return path

    @pytest.mark.parametrize(
        ("names", "index"),
        [
            (["draft.safetensors"], None),
            (["b.safetensors", "a-2.safetensors"], None),
            (["part1.safetensors", "part0.safetensors"], "model.safetensors.index.json"),
            (["x.safetensors", "y.safetensors"], "diffusion.safetensors.index.json"),
        ],
    )
    def test_odd_names_become_usual_ones(self, names: list[str], index: str | None, tmp_path: Path) -> None:
        source = self.shards(tmp_path / "source", names, index=index)
        assert set(open_draft(source).checkpoint.tensors) == set(support.body_arrays())
        support.convert(source, tmp_path / "out", "native")
        written = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
        count = len(names)
        assert written == (
            ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in (1, 2)]
        )
        for name, array in support.body_arrays().items():
            assert Checkpoint(tmp_path / "out").load(name).numpy().tobytes() == array.tobytes()

    def test_shards_can_be_made_smaller_and_joined_again(self, tmp_path: Path) -> None:
        source = support.make_native(tmp_path / "source")
        args = ["convert", source, tmp_path / "small", "--to", "native", "--max-shard-size", "4KB"]
        assert invoke(*args).code == 0
        files = sorted((tmp_path / "small").glob("*.safetensors"))
        sizes = [sum(info.num_bytes for info in open_draft(tmp_path / "small").checkpoint.tensors.values()
                     if info.file == file) for file in files]  # fmt: skip
        assert len(files) > 3
        assert max(sizes) <= 4 * 1024
        index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        support.convert(tmp_path / "small", tmp_path / "joined", "native", max_shard_bytes=10**9)
        assert [file.name for file in (tmp_path / "joined").glob("*.safetensors*")] == ["model.safetensors"]
        support.assert_same_tensors(source, tmp_path / "joined")

    def test_a_tensor_larger_than_a_shard_has_its_own_file(self, tmp_path: Path) -> None:
        support.convert(support.make_native(tmp_path / "source"), tmp_path / "out", "native", max_shard_bytes=1)
        assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(support.body_arrays())

    @pytest.mark.parametrize("text", ["", "0", "-5GB", "5 apples", "GB"])
    def test_a_malformed_size_is_refused(self, text: str, tmp_path: Path) -> None:
        outcome = invoke("convert", "tiny", tmp_path / "out", "--to", "native", f"--max-shard-size={text}")
        assert outcome.code == 2
        assert "--max-shard-size" in outcome.err
        assert repr(text) in outcome.err


class TestQuantisedWeights:
    """Quantised weights are recognised and copied unchanged, and never run."""

    def source(self, tmp_path: Path, *, config: bool = True, **arrays: Any) -> Path:
        packed = {name: array for name, array in support.body_arrays().items() if "down_proj" not in name}
        for layer in range(2):
            packed[f"layers.{layer}.mlp.down_proj.weight_packed"] = np.arange(48, dtype=np.uint8).reshape(16, 3)
            packed[f"layers.{layer}.mlp.down_proj.weight_scale"] = np.ones((16, 1), np.float32)
        changes: dict[str, Any] = {"quantization_config": {"quant_method": "compressed-tensors"}} if config else {}
        return support.write_checkpoint(tmp_path / "source", support.native_config(**changes), {**packed, **arrays})

    @pytest.mark.parametrize("config", [True, False])
    @pytest.mark.parametrize("to", ["native", "vllm", "sglang"])
    def test_they_are_copied_unchanged(self, config: bool, to: str, tmp_path: Path) -> None:
        source = self.source(tmp_path, config=config)
        support.convert(source, tmp_path / "out", to)
        support.assert_same_tensors(source, tmp_path / "out")
        written = open_draft(tmp_path / "out")
        assert written.quantization is not None
        assert written.config == open_draft(source).config
        assert written.checkpoint.config.get("quantization_config") == (
            {"quant_method": "compressed-tensors"} if config else None
        )

    def test_the_evidence_is_a_key_a_tensor_or_a_file(self, tmp_path: Path) -> None:
        assert open_draft(self.source(tmp_path)).quantization == "quantization_config"
        by_name = open_draft(self.source(tmp_path, config=False)).quantization
        assert by_name is not None
        assert "layers.0.mlp.down_proj.weight_" in by_name
        (tmp_path / "source" / "hf_quant_config.json").write_text("{}")
        assert open_draft(tmp_path / "source").quantization == "hf_quant_config.json"

    def test_the_evidence_may_be_an_element_type(self, tmp_path: Path) -> None:
        arrays = support.body_arrays()
        arrays["fc.weight"] = arrays["fc.weight"].astype(np.uint8)
        source = support.write_checkpoint(tmp_path / "source", support.native_config(), arrays)
        evidence = open_draft(source).quantization
        assert evidence is not None
        assert {"fc.weight", "U8"} <= set(evidence.split())

    def test_plain_weights_and_id_maps_are_no_evidence(self, tmp_path: Path) -> None:
        assert open_draft(support.make_speculators(tmp_path / "draft", support.REDUCED)).quantization is None

    def test_they_are_not_run(self, tmp_path: Path) -> None:
        draft = open_draft(self.source(tmp_path))
        with refuses(UnsupportedError, "quantised-weights", path=draft.checkpoint.path, found="quantization_config"):
            _ = draft.source

    def test_they_are_not_written_in_a_dialect_without_keys_for_them(self, tmp_path: Path) -> None:
        with pytest.raises(LossyConversion) as refused:
            support.convert(self.source(tmp_path), tmp_path / "out", "speculators", verifier="a/b")
        assert "quantization_config" in refused.value.message

    def test_the_file_of_quantization_settings_is_copied(self, tmp_path: Path) -> None:
        source = self.source(tmp_path, config=False)
        (source / "hf_quant_config.json").write_text('{"quantization": {}}')
        support.convert(source, tmp_path / "out", "native")
        assert (tmp_path / "out" / "hf_quant_config.json").read_text() == '{"quantization": {}}'


def test_a_tie_word_embeddings_flag_drops_no_tensor(tmp_path: Path) -> None:
    source = support.make_native(tmp_path / "source", tie_word_embeddings=True)
    support.convert(source, tmp_path / "out", "native")
    support.assert_same_tensors(source, tmp_path / "out")
    assert Checkpoint(tmp_path / "out").config["tie_word_embeddings"] is False


def test_every_element_type_is_copied(tmp_path: Path) -> None:
    """Tensors of narrow types would leave later tensors unaligned, unless wide types come first."""
    arrays = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in support.body_arrays().items()}
    arrays["norm.weight"] = arrays["norm.weight"].double()
    path = tmp_path / "source"
    path.mkdir()
    support.write_config(path, support.native_config())
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    save_torch(arrays, path / "model.safetensors")
    support.convert(path, tmp_path / "out", "native")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == arrays[name].dtype
        assert torch.equal(tensor, arrays[name])
