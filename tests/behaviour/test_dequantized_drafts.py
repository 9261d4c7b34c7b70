"""`convert --dequantize` writes a draft in FP8 as plain bfloat16, for every form of scales."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft
from dflash_kernels.fp8.fp8_weight import FP8
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_config, edit_tensors

SHAPE = support.Shape(hidden=64, inner=96, layers=2, heads=2, kv_heads=1, head_dim=32, windows=(None, None))
"""Widths that the block of 64 divides and cuts."""


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


MODEL_OPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "block": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_scale_inv", "block"),
    "tensor": ({"quant_method": "fp8"}, "weight_scale", "tensor"),
    "row": (compressed("channel"), "weight_scale", "row"),
    "file": (MODEL_OPT, "weight_scale", "tensor"),
}
"""Form -> what the config or the file states, the end of the names of scales, and what shares a scale."""


def rounded(matrix: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """The codes and scales of a matrix, and the numbers that they stand for."""
    height, width = matrix.shape
    if form == "block":
        scales = torch.rand(-(-height // 64), -(-width // 64)) + 0.5
        whole = scales.repeat_interleave(64, 0)[:height].repeat_interleave(64, 1)[:, :width]
    else:
        scales = torch.rand(height, 1) + 0.5 if form == "row" else torch.tensor([0.75])
        whole = scales.expand(height, width)
    codes = (matrix.float() / whole).to(FP8)
    return codes, scales, (codes.float() * whole).to(torch.bfloat16)


def write_draft(folder: Path, form: str) -> dict[str, Tensor]:
    """Write a draft in a form of FP8. Returns the numbers that it stands for."""
    support.make_native(folder, SHAPE)
    stated, end, kind = FORMS[form]
    file, stored, meant = folder / "model.safetensors", {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        meant[name] = tensor
        if name.endswith("_proj.weight") or name == "fc.weight":
            codes, scales, meant[name] = rounded(tensor, kind)
            stored[name], stored[name.replace("weight", end)] = codes, scales
            if form == "file":
                stored[name.replace("weight", "input_scale")] = torch.tensor([0.5])
        else:
            stored[name] = tensor
    save_file(stored, file)
    if form == "file":
        (folder / "hf_quant_config.json").write_text(json.dumps(stated))
    else:
        edit_config(folder, quantization_config=stated)
    return meant


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_in_fp8_becomes_plain(form: str, tmp_path: Path) -> None:
    meant, out = write_draft(tmp_path / "source", form), tmp_path / "out"
    outcome = invoke("convert", tmp_path / "source", out, "--to", "native", "--dequantize", "--json")
    assert outcome.code == 0, outcome.err
    draft = open_draft(out)
    assert draft.quantization is None
    assert set(draft.checkpoint.tensors) == set(meant)
    for name, numbers in meant.items():
        assert torch.equal(draft.checkpoint.load(name), numbers), name
    assert not (out / "hf_quant_config.json").exists()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_a_dialect_without_fp8_takes_the_plain_numbers(tmp_path: Path) -> None:
    write_draft(tmp_path / "source", "block")
    args = ("convert", tmp_path / "source", tmp_path / "out", "--to", "speculators", "--target-name", "org/model")
    outcome = invoke(*args)
    assert (outcome.code, outcome.error_id) == (5, "quantised-weights")
    assert invoke(*args, "--dequantize").code == 0


def test_a_missing_scale_is_malformed(tmp_path: Path) -> None:
    write_draft(tmp_path / "source", "block")
    edit_tensors(tmp_path / "source", **{"fc.weight_scale_inv": None})
    outcome = invoke("convert", tmp_path / "source", tmp_path / "out", "--to", "native", "--dequantize")
    assert (outcome.code, outcome.error_id) == (3, "scale-missing")
    assert not (tmp_path / "out").exists()
