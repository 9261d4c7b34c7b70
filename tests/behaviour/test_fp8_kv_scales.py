"""Scales of KV in FP8 that a checkpoint has: their names, which of them are used, and which are refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.kv.kv_format import KVScales
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointError, DFlashError, UnsupportedError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.edits import edit_tensors
from dflash_testing.fp8_models import FORMS, RoundedModel
from dflash_testing.refusals import refuses

FP8_ENGINE = EngineConfig(device="cpu", kv_dtype="fp8", num_pages=60, max_num_requests=1)


def scaled_target(folder: Path, changes: Mapping[str, Tensor]) -> LLM:
    """A small target in FP8 with more tensors, which decodes plainly with its KV in FP8."""
    RoundedModel(folder, "qwen3", FORMS["compressed weights"])
    edit_tensors(folder, **changes)
    return LLM(open_target(folder), None, FP8_ENGINE)


NAMES = [
    "model.layers.{}.self_attn.{}_scale",
    "model.layers.{}.self_attn.attn.{}_scale",
    "model.layers.{}.self_attn.{}_proj.{}_scale",
    "model.layers.{}.self_attn.{}_proj.output_scale",
]


@pytest.mark.parametrize("pattern", NAMES)
def test_scales_of_a_checkpoint_are_used(pattern: str, tmp_path: Path) -> None:
    wanted = {layer: KVScales(0.25, 2.0 + layer) for layer in range(4)}
    stored = {
        pattern.format(layer, side, side): torch.tensor(scale)
        for layer, both in wanted.items() for side, scale in zip("kv", both, strict=True)
    }  # fmt: skip
    scaled = scaled_target(tmp_path, stored)
    plain = LLM(replace(scaled.pair, kv_scales={}))
    assert scaled.pair.kv_scales == wanted
    for llm in (scaled, plain):
        llm.generate([list(range(60))], SamplingParams(max_new_tokens=1))
    scaled_keys, keys = (llm.engine.runner.target_kv.layers[0][0].float() for llm in (scaled, plain))
    # A power of two changes only exponents, if numbers stay in the range of FP8.
    normal = (scaled_keys.abs() < 448) & (keys.abs() > 2**-6)
    assert torch.equal(scaled_keys[normal] * 0.25, keys[normal])
    assert int(normal.sum()) > 500
    auto = LLM(open_target(tmp_path), None, replace(FP8_ENGINE, kv_dtype="auto"))
    assert auto.pair.kv_scales == {}


def test_one_scale_is_for_keys_and_values(tmp_path: Path) -> None:
    """As in vLLM: `kv_scale` is for both, and values without a scale have the scale of the keys."""
    names = {"kv_scale": 0.5, "k_scale": 0.25}
    stored = {f"model.layers.{layer}.self_attn.{name}": torch.tensor([names[name]]) for layer, name in enumerate(names)}
    scaled = scaled_target(tmp_path, stored)
    assert scaled.pair.kv_scales == {0: KVScales(0.5, 0.5), 1: KVScales(0.25, 0.25)}


def test_values_alone_have_no_scale(tmp_path: Path) -> None:
    with refuses(CheckpointError, "kv-scale-invalid", field="layers.1.self_attn.k_scale"):
        scaled_target(tmp_path, {"model.layers.1.self_attn.v_scale": torch.tensor(0.5)})


@pytest.mark.parametrize(
    ("scale", "error", "id"),
    [
        (torch.tensor([0.5, 0.5]), UnsupportedError, "kv-scale-of-heads"),
        (torch.tensor(0.0), CheckpointError, "kv-scale-invalid"),
        (torch.tensor(torch.inf), CheckpointError, "kv-scale-invalid"),
    ],
)
def test_other_scales_are_refused(scale: Tensor, error: type[DFlashError], id: str, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_scale"
    with refuses(error, id, field=name):
        scaled_target(tmp_path, {name: scale})
