"""Quantised targets that a run would misread are refused, before loading where headers show it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.quantised import target_quantization
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.errors import CheckpointError, InvalidConfig, TensorMismatch, UnsupportedError
from dflash_runtime.models.target_loading import find_target_runtime, load_target
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_config, edit_tensors, edited_config
from dflash_testing.hosted_models import MIXED, host, make_model
from dflash_testing.packed_models import pack_experts
from dflash_testing.pairs import placement, random_prompts
from dflash_testing.quantised_models import (
    COMPRESSED,
    FP8,
    GROUPED,
    needs_accelerate,
    needs_compressed,
    pack_blocks,
    pack_groups,
    pack_rows,
    quantise,
    unpacks_wide,
)
from dflash_testing.refusals import refuses

LAYER = "model.layers.1.mlp.up_proj"


@needs_accelerate
class TestScales:
    """Weights of eight bits without the scales that transformers expects are refused before loading."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        quantise(tmp_path, "llama", pack_blocks, FP8)
        return tmp_path

    def test_a_missing_scale(self, folder: Path) -> None:
        edit_tensors(folder, **{f"{LAYER}.weight_scale_inv": None})
        with refuses(CheckpointError, "scale-missing") as refused:
            find_target_runtime(open_target(folder), "transformers")
        assert f"{LAYER}.weight" in refused.value.message

    def test_scales_of_other_blocks(self, folder: Path) -> None:
        """48 rows in blocks of 32 have two scales, but the file has three."""
        with edited_config(folder) as settings:
            settings["quantization_config"]["weight_block_size"] = [32, 16]
        with refuses(CheckpointError, "scale-blocks-differ") as refused:
            find_target_runtime(open_target(folder), "transformers")
        assert "[32, 16]" in refused.value.message

    def test_names_that_transformers_does_not_read(self, folder: Path) -> None:
        """With other names, transformers would load the weights without their scales."""
        stored = load_file(folder / "model.safetensors")
        renamed = {name.removesuffix("_inv"): stored[name] for name in stored if name.endswith("_scale_inv")}
        edit_tensors(folder, **renamed, **{f"{name}_inv": None for name in renamed})
        with refuses(UnsupportedError, "scale-name") as refused:
            find_target_runtime(open_target(folder), "transformers")
        assert "weight_scale_inv" in refused.value.message

    def test_values_that_no_scale_has(self, folder: Path) -> None:
        name = f"{LAYER}.weight_scale_inv"
        edit_tensors(folder, **{name: -load_file(folder / "model.safetensors")[name]})
        with refuses(CheckpointError, "scale-invalid", field=name):
            host(folder)

    @pytest.mark.parametrize(
        ("shape", "grid", "block", "is_right"),
        [
            ((48, 32), (3, 2), [16, 16], True),
            ((48, 32), (2, 2), [32, 16], True),
            ((48, 32), (1, 2), [32, 16], False),
            ((576, 7168), (5, 56), [128, 128], True),
            ((576, 7168), (4, 56), [128, 128], False),
            ((48, 32), (3, 2), [16, 0], False),
            ((48, 32), (1, 2), [64, 16], True),
            ((48, 32), (), [16, 16], True),
            ((48, 32), (1,), None, True),
            ((48, 32), (1, 1), None, True),
            ((48, 32), (1, 1), [16, 16], False),
            ((48, 32), (48, 1), None, False),
            ((48, 32), (3, 2), "all", False),
        ],
    )
    def test_blocks(self, shape: Any, grid: Any, block: Any, is_right: bool) -> None:
        assert target_quantization._divides(shape, grid, block) is is_right


@needs_compressed
class TestCompressed:
    """compressed-tensors reads a file without complaint if a scale is missing, or is stored as an exponent."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        quantise(tmp_path, "llama", pack_rows, COMPRESSED)
        return tmp_path

    @pytest.mark.parametrize(
        ("scales", "id"),
        [(None, "scale-missing"), (torch.ones(3), "scale-blocks-differ"), (torch.ones(48, 1).int(), "scale-type")],
    )
    def test_scales(self, scales: torch.Tensor | None, id: str, folder: Path) -> None:
        edit_tensors(folder, **{f"{LAYER}.weight_scale": scales})
        with refuses(CheckpointError, id):
            find_target_runtime(open_target(folder), "transformers")

    def test_scales_that_it_misreads_are_noticed(self, folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        scales = {name: item for name, item in stored.items() if name.endswith("_scale")}
        edit_tensors(
            folder, **{name: item.log2().ceil().exp2().to(torch.float8_e8m0fnu) for name, item in scales.items()}
        )
        with refuses(CheckpointError, "weights-loaded-without-scale"):
            host(folder)

    def test_a_scheme_that_contradicts_the_weights(self, folder: Path) -> None:
        with edited_config(folder) as settings:
            settings["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "int"
        with refuses(CheckpointError, "scale-of-other-type", found="F8_E4M3", expected="I8"):
            find_target_runtime(open_target(folder), "transformers")

    def test_no_scheme(self, folder: Path) -> None:
        with edited_config(folder) as settings:
            settings["quantization_config"]["config_groups"] = {}
        with refuses(InvalidConfig, "invalid-config", field="quantization_config.config_groups"):
            find_target_runtime(open_target(folder), "transformers")

    def test_scales_of_activations_and_of_a_kv_cache_change_nothing(self, folder: Path) -> None:
        """Dequantised weights multiply plain activations. KV keeps the dtype of the run."""
        text = random_prompts((9,), 97)[0]
        wanted = read_features(host(folder), placement(), 16, text, [0, 2])
        stored = load_file(folder / "model.safetensors")
        owners = [name.removesuffix("weight_scale") for name in stored if name.endswith("weight_scale")]
        more = {f"{owner}input_scale": torch.tensor([0.02]) for owner in owners}
        names = ("k_scale", "v_proj.output_scale", "prob_scale")
        more |= {f"model.layers.1.self_attn.{name}": torch.tensor(0.5) for name in names}
        edit_tensors(folder, **more)
        assert torch.equal(read_features(host(folder), placement(), 16, text, [0, 2]), wanted)


def test_weights_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    make_model(tmp_path, "gemma2")
    name = "model.layers.2.mlp.up_proj.weight"
    edit_tensors(tmp_path, **{name: torch.full_like(load_file(tmp_path / "model.safetensors")[name], torch.nan)})
    with refuses(CheckpointError, "non-finite-logits", path=tmp_path / "model.safetensors", field=name):
        load_target(open_target(tmp_path), placement(), "auto")


PACKED_EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("runtime", ["auto", pytest.param("transformers", marks=unpacks_wide)])
class TestExponents:
    """Numbers and scales of MXFP4 are bytes. The byte 255 is invalid as a scale."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        pack_experts(tmp_path, make_model(tmp_path, "gpt_oss", **MIXED, num_local_experts=2, intermediate_size=64))
        return tmp_path

    @pytest.mark.parametrize("kind", [torch.float32, torch.int32, torch.float8_e8m0fnu], ids=str)
    @pytest.mark.parametrize("part", ["blocks", "scales"])
    def test_another_type(self, part: str, kind: torch.dtype, runtime: str, folder: Path) -> None:
        name = f"{PACKED_EXPERTS}_{part}"
        stored = load_file(folder / "model.safetensors")[name]
        edit_tensors(folder, **{name: stored.view(kind) if kind.itemsize == 1 else stored.to(kind)})
        with refuses(CheckpointError, "weight-type", field=name, expected="U8"):
            find_target_runtime(open_target(folder), runtime)

    @pytest.mark.parametrize("part", ["blocks", "scales"])
    def test_one_of_both_alone(self, part: str, runtime: str, folder: Path) -> None:
        edit_tensors(folder, **{f"{PACKED_EXPERTS}_{part}": None})
        with refuses(CheckpointError, "scale-missing", field=f"{PACKED_EXPERTS}_{part}"):
            find_target_runtime(open_target(folder), runtime)

    def test_scales_of_other_blocks(self, runtime: str, folder: Path) -> None:
        name = f"{PACKED_EXPERTS}_scales"
        edit_tensors(folder, **{name: load_file(folder / "model.safetensors")[name].repeat_interleave(2, -1)})
        with refuses(CheckpointError, "scale-blocks-differ", field=f"{PACKED_EXPERTS}_blocks"):
            find_target_runtime(open_target(folder), runtime)

    def test_no_number(self, runtime: str, folder: Path) -> None:
        name = f"{PACKED_EXPERTS}_scales"
        scales = load_file(folder / "model.safetensors")[name]
        scales.view(-1)[-1] = 255
        edit_tensors(folder, **{name: scales})
        with refuses(CheckpointError, "scale-invalid", path=folder, field=name):
            load_target(open_target(folder), placement(), runtime)

    def test_no_packed_experts(self, runtime: str, folder: Path) -> None:
        packed = [name for name in load_file(folder / "model.safetensors") if name.endswith(("_blocks", "_scales"))]
        edit_tensors(folder, **dict.fromkeys(packed))
        with pytest.raises((TensorMismatch, UnsupportedError)) as refused:
            load_target(open_target(folder), placement(), runtime)
        assert refused.value.id == ("tensor-mismatch" if runtime == "auto" else "quantization-without-weights")


UNKNOWN, FETCHES, NEEDS = "quantization-unknown", "quantization-fetches-code", "quantization-needs-package"
REFUSED = {
    "bitnet": (UNKNOWN, "mxfp4"),
    "modelopt": (UNKNOWN, "mxfp4"),
    "nvfp4": (FETCHES, ""),
    "fbgemm_fp8": (FETCHES, ""),
    "bitsandbytes": (NEEDS, "bitsandbytes"),
    "gptq": (NEEDS, "optimum"),
    "awq": (NEEDS, "gptqmodel"),
    "compressed-tensors": (NEEDS, "compressed-tensors"),
    "fp8": (NEEDS, "accelerate"),
}
"""Method -> the id of its refusal without further packages, and a method or package that the refusal names."""


@pytest.mark.parametrize("method", REFUSED)
def test_an_unsupported_method_is_named(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_quantization, "find_spec", lambda name: None)
    make_model(tmp_path, "llama", quantization_config={"quant_method": method})
    id, named = REFUSED[method]
    with refuses(UnsupportedError, id, path=tmp_path, field="quant_method", found=method) as refused:
        find_target_runtime(open_target(tmp_path), "auto")
    assert named in refused.value.message
    if id == NEEDS:
        assert refused.value.hint == f"pip install {named}"
    assert refused.value.exit_code == 5


def test_packages_that_fetch_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_quantization, "find_spec", lambda name: name)
    make_model(tmp_path, "llama", quantization_config={"quant_method": "gptq"})
    with refuses(UnsupportedError, FETCHES, found="gptq") as refused:
        find_target_runtime(open_target(tmp_path), "auto")
    assert "gptqmodel" in refused.value.message


def test_layers_with_different_quantization_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_quantization, "find_spec", lambda name: name)
    groups = {str(bits): {"weights": {"num_bits": bits}} for bits in (4, 8)}
    make_model(tmp_path, "llama", quantization_config={**COMPRESSED, "config_groups": groups})
    with refuses(UnsupportedError, "quantization-mixed", found="compressed-tensors"):
        find_target_runtime(open_target(tmp_path), "auto")


def test_quantised_tensors_without_a_config_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    packed = load_file(tmp_path / "model.safetensors")[f"{LAYER}.weight"].to(torch.float8_e4m3fn)
    edit_tensors(tmp_path, **{f"{LAYER}.weight": packed})
    with refuses(UnsupportedError, "quantised-weights") as refused:
        find_target_runtime(open_target(tmp_path), "transformers")
    assert f"{LAYER}.weight" in refused.value.found
    assert "F8_E4M3" in refused.value.found


def test_the_native_runtime_refuses_four_bits(tmp_path: Path) -> None:
    quantise(tmp_path, "llama", pack_groups, GROUPED)
    with refuses(UnsupportedError, "quantised-weights", found="quantization_config"):
        load_target(open_target(tmp_path), placement(), "native")


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_target_packed_by_mlx_is_named(key: str, tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    edit_tensors(tmp_path, **{f"{LAYER}.scales": torch.ones(3), f"{LAYER}.biases": torch.ones(3)})
    for stated in ({}, {key: {"group_size": 64, "bits": 4}}):
        edit_config(tmp_path, **stated)
        with refuses(UnsupportedError, "quantised-weights") as refused:
            find_target_runtime(open_target(tmp_path), "auto")
        assert refused.value.found.startswith("MLX")
    assert open_target(tmp_path).facts.quantization == "MLX (4 bits)"
    outcome = invoke("inspect", tmp_path)
    assert "MLX (4 bits)" in outcome.out
