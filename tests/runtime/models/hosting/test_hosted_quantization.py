"""Quantised targets run with their scales, or are refused; they never run as if they were plain."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.quantised import target_quantization
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointError, InvalidConfig, TensorMismatch, UnsupportedError
from dflash_runtime.llm import LLM
from dflash_runtime.models.hosting import hosted_quantization
from dflash_runtime.models.hosting.hosted_loading import load_model
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.models.target_loading import find_target_runtime, load_target, target_bytes
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.hosted_models import MIXED, host, make_model, plain_text
from dflash_testing.packed_models import pack_experts, plain_numbers
from dflash_testing.pairs import placement, random_prompts, random_target
from dflash_testing.quantised_models import COMPRESSED, FP8, GROUPED, pack_blocks, pack_groups, pack_rows, quantise
from dflash_testing.refusals import refuses

FLOAT = torch.float32
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
needs_compressed = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="not installed")
unpacks_wide = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="dequantises experts to bfloat16, and is refused"
)
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
    edit(tmp_path, **{name: item.to(stored) for name, item in kept.items()})
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
    edit(tmp_path, **packed)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(settings))
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
    outcome = support.invoke(*command, "--target-runtime", "transformers")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["measured"]["target_quantization"] == "fp8, dequantised"
    warnings = [line for line in outcome.err.splitlines() if line.startswith("warning: ") and "fp8" in line]
    assert len(warnings) == 1
    assert "float32" in warnings[0]


def edit(path: Path, **changes: Any) -> None:
    """Put tensors into a checkpoint. None removes a tensor."""
    tensors = load_file(path / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", {"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"


@needs_accelerate
class TestScales:
    """Weights of eight bits without the scales that transformers expects are refused before loading."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        quantise(tmp_path, "llama", pack_blocks, FP8)
        return tmp_path

    def test_a_missing_scale(self, folder: Path) -> None:
        edit(folder, **{f"{LAYER}.weight_scale_inv": None})
        with refuses(CheckpointError, "scale-missing") as refused:
            find_target_runtime(open_target(folder), "transformers")
        assert f"{LAYER}.weight" in refused.value.message

    def test_scales_of_other_blocks(self, folder: Path) -> None:
        """48 rows in blocks of 32 have two scales, but the file has three."""
        settings = json.loads((folder / "config.json").read_text())
        settings["quantization_config"]["weight_block_size"] = [32, 16]
        (folder / "config.json").write_text(json.dumps(settings))
        with refuses(CheckpointError, "scale-blocks-differ") as refused:
            find_target_runtime(open_target(folder), "transformers")
        assert "[32, 16]" in refused.value.message

    def test_names_that_transformers_does_not_read(self, folder: Path) -> None:
        """With other names, transformers would load the weights without their scales."""
        stored = load_file(folder / "model.safetensors")
        renamed = {name.removesuffix("_inv"): stored[name] for name in stored if name.endswith("_scale_inv")}
        edit(folder, **renamed, **{f"{name}_inv": None for name in renamed})
        with refuses(UnsupportedError, "scale-name") as refused:
            find_target_runtime(open_target(folder), "transformers")
        assert "weight_scale_inv" in refused.value.message

    def test_values_that_no_scale_has(self, folder: Path) -> None:
        name = f"{LAYER}.weight_scale_inv"
        edit(folder, **{name: -load_file(folder / "model.safetensors")[name]})
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
        edit(folder, **{f"{LAYER}.weight_scale": scales})
        with refuses(CheckpointError, id):
            find_target_runtime(open_target(folder), "transformers")

    def test_scales_that_it_misreads_are_noticed(self, folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        scales = {name: item for name, item in stored.items() if name.endswith("_scale")}
        edit(folder, **{name: item.log2().ceil().exp2().to(torch.float8_e8m0fnu) for name, item in scales.items()})
        with refuses(CheckpointError, "weights-loaded-without-scale"):
            host(folder)

    def test_a_scheme_that_contradicts_the_weights(self, folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        settings["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "int"
        (folder / "config.json").write_text(json.dumps(settings))
        with refuses(CheckpointError, "scale-of-other-type", found="F8_E4M3", expected="I8"):
            find_target_runtime(open_target(folder), "transformers")

    def test_no_scheme(self, folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text())
        settings["quantization_config"]["config_groups"] = {}
        (folder / "config.json").write_text(json.dumps(settings))
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
        edit(folder, **more)
        assert torch.equal(read_features(host(folder), placement(), 16, text, [0, 2]), wanted)


def test_weights_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    make_model(tmp_path, "gemma2")
    name = "model.layers.2.mlp.up_proj.weight"
    edit(tmp_path, **{name: torch.full_like(load_file(tmp_path / "model.safetensors")[name], torch.nan)})
    with refuses(CheckpointError, "non-finite-logits", path=tmp_path / "model.safetensors", field=name):
        load_target(open_target(tmp_path), placement(), "auto")


PACKED_EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("runtime", ["auto", pytest.param("transformers", marks=unpacks_wide)])
class TestExponents:
    """Numbers and scales of MXFP4 are bytes, and the byte 255 is no scale."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        pack_experts(tmp_path, make_model(tmp_path, "gpt_oss", **MIXED, num_local_experts=2, intermediate_size=64))
        return tmp_path

    @pytest.mark.parametrize("kind", [torch.float32, torch.int32, torch.float8_e8m0fnu], ids=str)
    @pytest.mark.parametrize("part", ["blocks", "scales"])
    def test_another_type(self, part: str, kind: torch.dtype, runtime: str, folder: Path) -> None:
        name = f"{PACKED_EXPERTS}_{part}"
        stored = load_file(folder / "model.safetensors")[name]
        edit(folder, **{name: stored.view(kind) if kind.itemsize == 1 else stored.to(kind)})
        with refuses(CheckpointError, "weight-type", field=name, expected="U8"):
            find_target_runtime(open_target(folder), runtime)

    @pytest.mark.parametrize("part", ["blocks", "scales"])
    def test_one_of_both_alone(self, part: str, runtime: str, folder: Path) -> None:
        edit(folder, **{f"{PACKED_EXPERTS}_{part}": None})
        with refuses(CheckpointError, "scale-missing", field=f"{PACKED_EXPERTS}_{part}"):
            find_target_runtime(open_target(folder), runtime)

    def test_scales_of_other_blocks(self, runtime: str, folder: Path) -> None:
        name = f"{PACKED_EXPERTS}_scales"
        edit(folder, **{name: load_file(folder / "model.safetensors")[name].repeat_interleave(2, -1)})
        with refuses(CheckpointError, "scale-blocks-differ", field=f"{PACKED_EXPERTS}_blocks"):
            find_target_runtime(open_target(folder), runtime)

    def test_no_number(self, runtime: str, folder: Path) -> None:
        name = f"{PACKED_EXPERTS}_scales"
        scales = load_file(folder / "model.safetensors")[name]
        scales.view(-1)[-1] = 255
        edit(folder, **{name: scales})
        with refuses(CheckpointError, "scale-invalid", path=folder, field=name):
            load_target(open_target(folder), placement(), runtime)

    def test_no_packed_experts(self, runtime: str, folder: Path) -> None:
        packed = [name for name in load_file(folder / "model.safetensors") if name.endswith(("_blocks", "_scales"))]
        edit(folder, **dict.fromkeys(packed))
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
    edit(tmp_path, **{f"{LAYER}.weight": packed})
    with refuses(UnsupportedError, "quantised-weights") as refused:
        find_target_runtime(open_target(tmp_path), "transformers")
    assert f"{LAYER}.weight" in refused.value.found
    assert "F8_E4M3" in refused.value.found


def test_the_native_runtime_refuses_four_bits(tmp_path: Path) -> None:
    quantise(tmp_path, "llama", pack_groups, GROUPED)
    with refuses(UnsupportedError, "quantised-weights", found="quantization_config"):
        load_target(open_target(tmp_path), placement(), "native")


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


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_target_packed_by_mlx_is_named(key: str, tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    edit(tmp_path, **{f"{LAYER}.scales": torch.ones(3), f"{LAYER}.biases": torch.ones(3)})
    for stated in ({}, {key: {"group_size": 64, "bits": 4}}):
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings, **stated}))
        with refuses(UnsupportedError, "quantised-weights") as refused:
            find_target_runtime(open_target(tmp_path), "auto")
        assert refused.value.found.startswith("MLX")
    assert open_target(tmp_path).facts.quantization == "MLX (4 bits)"
    outcome = support.invoke("inspect", tmp_path)
    assert "MLX (4 bits)" in outcome.out
