"""Quantised targets run with their scales through transformers' code."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.quantised import target_quantization
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointError
from dflash_runtime.llm import LLM
from dflash_runtime.models.hosting import hosted_quantization
from dflash_runtime.models.hosting.hosted_loading import load_model
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.models.target_loading import load_target, target_bytes
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_config, edit_tensors
from dflash_testing.hosted_models import MIXED, host, make_model, plain_text
from dflash_testing.packed_models import plain_numbers
from dflash_testing.pairs import placement, random_prompts, random_target
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

FLOAT = torch.float32
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
KINDS = {
    "fp8": pytest.param(pack_blocks, FP8, "fp8, dequantised", marks=needs_accelerate),
    "compressed": pytest.param(pack_rows, COMPRESSED, "compressed-tensors, dequantised", marks=needs_compressed),
    "four bits": pytest.param(pack_groups, GROUPED, "compressed-tensors, dequantised", marks=needs_compressed),
}


@pytest.mark.parametrize(("pack", "config", "label"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_dequantised_target_computes_scale_times_weight(
    kind: str, pack: Any, config: Any, label: str, tmp_path: Path
) -> None:
    if kind == "qwen3_moe" and config is not FP8 and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("earlier releases dequantise experts to bfloat16, and are refused")
    model = quantise(tmp_path, kind, pack, config)
    source = open_target(tmp_path)
    pair = load_pair(source, None, EngineConfig(device="cpu", max_model_len=64, target_runtime="transformers"))
    loaded = dict(pair.target.decoder.named_parameters())  # type: ignore[attr-defined]
    for name, wanted in model.get_decoder().named_parameters():
        assert torch.equal(loaded[name], wanted), name
    prompts = random_prompts((3, 17), pair.target.config.vocab_size)
    outputs = LLM(pair).generate(prompts, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, prompt, 16) for prompt in prompts]
    assert pair.target_quantization == label
    assert any(label.partition(",")[0] in text for text in pair.warnings)
    assert target_bytes(source, torch.float32, "transformers") >= 4 * sum(item.numel() for item in model.parameters())


@needs_accelerate
@unpacks_wide
def test_a_native_family_with_a_gate_in_eight_bits_runs_through_transformers(tmp_path: Path) -> None:
    """Experts, shared experts and recurrent layers are dequantised, block by block."""
    model = quantise(tmp_path, "qwen3_5_moe_text", pack_blocks, FP8)
    target = load_target(open_target(tmp_path), placement(), "auto")
    assert isinstance(target, OwnCacheTarget)
    text = random_prompts((20,), target.config.vocab_size)[0]
    with torch.inference_mode():
        wanted = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    found = read_features(target, placement(), 16, text, [0, 2])
    torch.testing.assert_close(found, torch.cat([wanted[1][0], wanted[3][0]], dim=-1))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_cut_blocks_are_unpacked(stored: torch.dtype, tmp_path: Path) -> None:
    """24 rows of latent attention are a block of 16 and a cut one, and other weights may be narrower than the run."""
    model = quantise(tmp_path, "deepseek_v3", pack_blocks, FP8)
    plain = {name: item for name, item in load_file(tmp_path / "model.safetensors").items() if item.dtype == FLOAT}
    kept = {name: item for name, item in plain.items() if not name.endswith("_scale_inv")}
    edit_tensors(tmp_path, **{name: item.to(stored) for name, item in kept.items()})
    target = load_target(open_target(tmp_path), placement(), "auto")
    loaded = dict(target.decoder.named_parameters())  # type: ignore[attr-defined]
    for name, wanted in model.get_decoder().named_parameters():
        is_stored = f"model.{name}" in kept
        assert torch.equal(loaded[name], wanted.to(stored).to(FLOAT) if is_stored else wanted), name


def test_halves_of_cut_blocks_are_not_taken_for_blocks() -> None:
    """48 rows in blocks of 32 have two scales, which transformers would read as scales of blocks of 24."""
    assert target_quantization.has_cut_blocks((48, 32), (2, 2), [32, 16])
    factors = hosted_quantization._multiply(torch.ones(48, 32), torch.tensor([[2.0, 3.0], [5.0, 7.0]]), [32, 16])
    assert factors[31, 0] == 2
    assert factors[32, 0] == 5
    assert factors[47, 31] == 7


@pytest.mark.gpu
@pytest.mark.parametrize(("pack", "config", "label"), KINDS.values(), ids=KINDS)
def test_weights_on_a_gpu_are_scale_times_weight(pack: Any, config: Any, label: str, tmp_path: Path) -> None:
    """On a GPU transformers has kernels for quantised weights, and would fetch them."""
    model = quantise(tmp_path, "llama", pack, config)
    engine = EngineConfig(device="cuda", dtype="float32", max_model_len=64, target_runtime="transformers")
    pair = load_pair(open_target(tmp_path), None, engine)
    loaded = dict(pair.target.decoder.named_parameters())  # type: ignore[attr-defined]
    for name, wanted in model.get_decoder().named_parameters():
        assert torch.equal(loaded[name].cpu(), wanted), name
    (prompt,) = random_prompts((17,), pair.target.config.vocab_size)
    (output,) = LLM(pair).generate([prompt], PARAMS)
    assert list(output.token_ids) == plain_text(model, prompt, 16)
    assert pair.target_quantization == label


@needs_compressed
def test_dequantised_modules_can_be_moved() -> None:
    """The modules are as compressed-tensors leaves them with transformers 5.17."""
    from compressed_tensors.offload import offload_module

    module = torch.nn.Linear(3, 2)
    hidden, wanted = torch.ones(3), module(torch.ones(3))
    offload_module(module, torch.device("cpu"), torch.device("cpu"))
    assert type(module._parameters) is not dict
    hosted_quantization.leave_weights_in_place(module)
    assert type(module._parameters) is dict
    assert torch.equal(module(hidden), wanted)
    assert module.to("meta").weight.is_meta
    assert module(hidden.to("meta")).is_meta


@needs_accelerate
def test_scales_that_transformers_drops_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantise(tmp_path, "llama", pack_blocks, FP8)
    monkeypatch.setattr(
        Fp8Dequantize, "_dequantize_one", lambda self, packed, scales, output_dtype=None: packed.to(output_dtype)
    )
    with refuses(CheckpointError, "weights-loaded-without-scale", path=tmp_path) as refused:
        host(tmp_path)
    assert refused.value.field is not None
    assert refused.value.found == f"{refused.value.field}_scale_inv"


@unpacks_wide
def test_experts_of_four_bits_are_dequantised(tmp_path: Path) -> None:
    """The format of gpt-oss: two numbers per byte, and an exponent for every 32 numbers."""
    make_model(tmp_path, "gpt_oss", **MIXED, num_local_experts=2, num_experts_per_tok=1, intermediate_size=64)
    generator = torch.Generator().manual_seed(1)
    packed: dict[str, torch.Tensor | None] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, rows in (("gate_up_proj", 128), ("down_proj", 32)):
        groups = 32 // 32 if name == "gate_up_proj" else 64 // 32
        blocks = torch.randint(0, 256, (2, rows, groups, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(120, 130, (2, rows, groups), generator=generator).to(torch.uint8)
        meant[name] = plain_numbers(blocks, scales).transpose(1, 2)
        owner = f"model.layers.1.mlp.experts.{name}"
        packed |= {owner: None, f"{owner}_blocks": blocks, f"{owner}_scales": scales}
    edit_tensors(tmp_path, **packed)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    source = open_target(tmp_path)
    model = load_model(source, random_target().config, placement(), "eager")
    for name, wanted in meant.items():
        assert torch.equal(model.get_parameter(f"model.layers.1.mlp.experts.{name}"), wanted)
    assert target_bytes(source, torch.float32, "transformers") >= 4 * sum(item.numel() for item in model.parameters())


@needs_accelerate
def test_results_say_that_weights_were_dequantised(tmp_path: Path) -> None:
    quantise(tmp_path, "llama", pack_blocks, FP8)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [7, 8]}\n')
    command = ("generate", "-t", tmp_path, "-k", 0, "-p", prompts, "-n", 4, "--device", "cpu", "--json")
    outcome = invoke(*command, "--target-runtime", "transformers")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["measured"]["target_quantization"] == "fp8, dequantised"
    warnings = [line for line in outcome.err.splitlines() if line.startswith("warning: ") and "fp8" in line]
    assert len(warnings) == 1
    assert "float32" in warnings[0]


def test_no_kernel_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package `kernels`, transformers would fetch kernels for 8-bit products and for experts."""
    from transformers.integrations import hub_kernels

    fetched: list[object] = []
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *given, **options: fetched.append(given))
    make_model(tmp_path, "llama")
    host(tmp_path)
    hub_kernels.lazy_load_kernel("deep-gemm", {})
    assert not fetched
