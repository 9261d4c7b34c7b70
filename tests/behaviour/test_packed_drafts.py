"""Drafts that MLX packed: they are described, checked, and converted to the numbers that they stand for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_config

SHAPE = support.Shape(hidden=32, inner=32, layers=1, heads=2, kv_heads=1, head_dim=16, windows=(None,))
GROUP = 32


def pack(matrix: np.ndarray[Any, Any], bits: int, group: int) -> tuple[dict[str, torch.Tensor], np.ndarray[Any, Any]]:
    """A matrix as mlx.core.quantize documents it, number by number, and the numbers that the result stands for.

    A group's bias is its smallest number, and its scale a part of its range. The first number of a word has its lowest
    bits.
    """
    height, width = matrix.shape
    words = np.zeros((height, width * bits // 32), dtype=np.uint32)
    scales, biases = (torch.zeros(height, width // group, dtype=torch.bfloat16) for _ in range(2))
    meant = np.zeros(matrix.shape)
    for row in range(height):
        for at in range(width // group):
            part = matrix[row, at * group : (at + 1) * group]
            biases[row, at], scales[row, at] = float(part.min()), float(part.max() - part.min()) / (2**bits - 1)
            bias, scale = float(biases[row, at]), float(scales[row, at])
            for column, number in enumerate(part, start=at * group):
                code = min(max(round((float(number) - bias) / scale), 0), 2**bits - 1)
                word, place = divmod(column * bits, 32)
                words[row, word] |= np.uint32(code << place)
                meant[row, column] = scale * code + bias
    return {"weight": torch.from_numpy(words), "scales": scales, "biases": biases}, meant


def make_packed(
    folder: Path, bits: int, *, own_bits: int | None = None, **quantization: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """A draft that MLX packed, and the numbers of each tensor. `own_bits` are of fc, which then states them itself."""
    stored: dict[str, torch.Tensor] = {}
    meant = {}
    for name, array in support.body_arrays(SHAPE).items():
        module = name.removesuffix(".weight")
        if array.ndim == 1:
            meant[name], stored[name] = array, torch.from_numpy(array)
            continue
        parts, meant[name] = pack(array, own_bits if own_bits and module == "fc" else bits, GROUP)
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    stated = {"group_size": GROUP, "bits": bits, "mode": "affine", **quantization}
    if own_bits:
        stated["fc"] = {"group_size": GROUP, "bits": own_bits}
    folder.mkdir()
    config = support.native_config(SHAPE, quantization=stated, quantization_config=stated, dtype="bfloat16")
    support.write_config(folder, config)
    save_file(stored, folder / "model.safetensors")
    return meant


@pytest.mark.parametrize(("bits", "own_bits"), [(4, None), (8, None), (4, 8)])
@pytest.mark.parametrize("to", ["native", "gguf"])
def test_packed_matrices_become_the_numbers_they_stand_for(
    bits: int, own_bits: int | None, to: str, tmp_path: Path
) -> None:
    meant = make_packed(tmp_path / "source", bits, own_bits=own_bits)
    out = tmp_path / "out"
    outcome = invoke("convert", tmp_path / "source", out, "--to", to, "--dequantize", "--json")
    assert outcome.code == 0, outcome.err
    draft = open_draft(out)
    for name, values in meant.items():
        expected = torch.from_numpy(values).to(torch.float32).to(torch.bfloat16 if values.ndim > 1 else torch.float32)
        assert torch.equal(draft.checkpoint.load(name), expected), name
    assert draft.quantization is None
    assert draft.config.dtype == "bfloat16"
    changes = {item["to"]: item["change"] for item in json.loads(outcome.out)["tensors"]}
    assert set(changes.values()) == ({"derived", "kept"} if to == "native" else {"derived", "renamed"})
    assert not {"quantization", "quantization_config"} & open_draft(out).parsed.carried.keys()


@pytest.mark.parametrize("stated", ["quantization", "quantization_config"])
def test_a_packed_draft_is_described_and_checked(stated: str, tmp_path: Path) -> None:
    make_packed(tmp_path / "source", 4)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    other = {"quantization", "quantization_config"} - {stated}
    support.write_config(tmp_path / "source", {key: value for key, value in config.items() if key not in other})
    target = support.make_target(tmp_path / "target", SHAPE)
    described = invoke("inspect", tmp_path / "source", "--json")
    assert (described.code, json.loads(described.out)["dtypes"]["U32"]) == (0, 8)
    plan = ValidationPlan(draft=tmp_path / "source", target=target)
    found = {item.id: item for item in validate_draft(plan).findings}
    assert {item.severity for item in found.values()} <= {"warning", "info"}, found
    assert "C49" not in found
    assert found["N11"].severity == "warning"
    assert "--dequantize" in found["N11"].fix


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("is_missing", [True, False])
def test_scales_and_biases_of_another_shape_are_refused(part: str, is_missing: bool, tmp_path: Path) -> None:
    make_packed(tmp_path / "source", 4)
    file = tmp_path / "source" / "model.safetensors"
    stored = load_file(file)
    name = f"layers.0.mlp.up_proj.{part}"
    tensor = stored.pop(name)
    if part == "scales" and is_missing:
        stored[name] = tensor[:, :0]  # without scales, the matrix does not look packed
    elif not is_missing:
        stored[name] = tensor[:, 1:].contiguous()
    save_file(stored, file)
    outcome = invoke("convert", tmp_path / "source", tmp_path / "out", "--to", "native", "--dequantize")
    assert (outcome.code, outcome.error_id) == (3, "tensor-mismatch")
    assert name in outcome.err
    found = validate_draft(ValidationPlan(draft=tmp_path / "source")).findings
    assert [name for item in found if item.id == "N11" and item.severity == "error" and name in item.message]


def test_shapes_of_a_packed_draft_are_checked_against_the_config(tmp_path: Path) -> None:
    make_packed(tmp_path / "source", 4)
    edit_config(tmp_path / "source", intermediate_size=64)
    assert "N04" in {item.id for item in validate_draft(ValidationPlan(draft=tmp_path / "source")).findings}


@pytest.mark.parametrize("quantization", [{"mode": "mxfp4"}, {"group_size": 0}])
def test_another_form_of_mlx_is_refused(quantization: dict[str, Any], tmp_path: Path) -> None:
    make_packed(tmp_path / "source", **{"bits": 4, **quantization})
    outcome = invoke("convert", tmp_path / "source", tmp_path / "out", "--to", "native", "--dequantize")
    assert (outcome.code, outcome.error_id) == (5, "mlx-form"), outcome.err


def test_a_plain_draft_has_nothing_to_unpack(tmp_path: Path) -> None:
    source = support.make_native(tmp_path / "source")
    outcome = invoke("convert", source, tmp_path / "out", "--to", "native", "--dequantize")
    assert (outcome.code, outcome.error_id, outcome.field) == (2, "nothing-packed", "--dequantize")
