"""Targets in FP8 run natively in every form, and compute what transformers computes with rounded activations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.fp8.fp8_config import fp8_product_shape
from dflash_kernels.fp8.fp8_weight import FP8 as E4M3
from dflash_kernels.suite import triton_kernels
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointError, DFlashError, InvalidConfig, UnsupportedError
from dflash_runtime.llm import LLM
from dflash_runtime.models.target_loading import find_target_runtime, load_target, target_bytes
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.edits import edit_config, edit_tensors, edited_config
from dflash_testing.fp8_models import FORMS, RoundedModel
from dflash_testing.hosted_models import LINEAR
from dflash_testing.pairs import ScriptedDraft, always_right, placement, random_draft, random_llm, random_prompts
from dflash_testing.quantised_models import BLOCK, COMPRESSED
from dflash_testing.refusals import refuses

WIDE = torch.float64
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},  # with biases
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
}
SAMPLED = [("llama", form) for form in FORMS] + [(kind, "blocks") for kind in FAMILIES if kind != "llama"]
SAMPLED += [("qwen3_moe", "compressed rows"), ("qwen3_5_moe_text", "static"), ("qwen3_next", "compressed rows")]
ALL = [(kind, form) for kind in FAMILIES for form in FORMS]
CASES = [case if case in SAMPLED else pytest.param(*case, marks=pytest.mark.slow) for case in ALL]
LAYERS = [0, 1, 2, 3]
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_target_computes_what_its_format_says(kind: str, form: str, tmp_path: Path) -> None:
    """Every layer's output in float64, but for a few numbers: transformers' norms compute in float32, and a number
    between two numbers of e4m3 may then be rounded to the other one. Without rounded activations, or with another scale
    for them, outputs differ by the error of the format.
    """
    oracle = RoundedModel(tmp_path, kind, FORMS[form], **FAMILIES[kind])
    source = open_target(tmp_path)
    assert find_target_runtime(source, "auto")[0] == "native"
    target = load_target(source, placement(WIDE))
    text = random_prompts((20,), target.config.vocab_size)[0]
    found = read_features(target, placement(WIDE), 16, text, LAYERS[:-1])
    assert_close_to_format(torch.stack(found.chunk(3, dim=-1)), oracle, text)


def assert_close_to_format(found: torch.Tensor, oracle: RoundedModel, text: list[int]) -> None:
    """Require that outputs of layers [L, T, hidden] are within 5% of the error of the format."""
    wanted, unrounded = oracle(text)[: len(found)], oracle(text, rounds=False)[: len(found)]
    if not oracle.form.rounds:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        return
    error = (found - wanted).norm(dim=(1, 2)) / (unrounded - wanted).norm(dim=(1, 2))
    assert bool((error < 0.05).all()), error


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["blocks", "compressed rows", "static", "compressed weights"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5_text"])
@pytest.mark.parametrize("count", [1, 20])
def test_rows_rounded_in_norms_change_nothing(
    kind: str, form: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, beside norms that leave the rounding to the product after them."""
    RoundedModel(tmp_path, kind, FORMS[form], **FAMILIES[kind])
    tiling, kernels, norms, found = fp8_product_shape, triton_kernels(), 0, []
    # Rounded rows take other tiles, which add up a product in another order.
    monkeypatch.setattr(
        "dflash_kernels.fp8.fp8_product.fp8_product_shape",
        lambda *given, is_rounded, **options: tiling(*given, **options),
    )

    def add_norm(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal norms
        norms += 1
        return kernels.add_rms_norm(*given[:-1])

    for suite in (kernels, replace(kernels, add_round_norm=add_norm)):  # type: ignore[arg-type]
        placed = replace(placement(), kernels=suite)
        target = load_target(open_target(tmp_path), placed)
        text = random_prompts((count,), target.config.vocab_size)[0]
        found.append(read_features(target, placed, 16, text, LAYERS[:-1]))
    assert torch.equal(*found)
    assert norms == (0 if form == "compressed weights" else 3 if kind == "qwen3_moe" else 7)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_moe_text"])
def test_matrices_stay_in_fp8_in_memory(kind: str, tmp_path: Path) -> None:
    RoundedModel(tmp_path, kind, FORMS["blocks"], **FAMILIES[kind])
    source = open_target(tmp_path)
    target = load_target(source, placement())
    stored = load_file(tmp_path / "model.safetensors")
    sizes = [item.numel() * (1 if item.dtype == E4M3 else 4) for item in stored.values()]  # scales too
    assert target_bytes(source, torch.float32, "native") == sum(sizes)
    layer = target._decoder.layers[-1]  # type: ignore[attr-defined]
    linears = [layer.mixer.output, *([layer.mlp.gate_up, layer.mlp.down] if kind == "llama" else [])]
    assert {item.weight.values.dtype for item in linears} == {E4M3}
    if kind != "llama":
        assert {layer.mlp.gate_up.values.dtype, layer.mlp.down.values.dtype} == {E4M3}


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"scheduling": "async", "max_num_requests": 5}, marks=pytest.mark.slow),
        {"scheduling": "sync", "max_num_requests": 2, "max_batched_tokens": 16},
        {"scheduling": "async", "max_num_requests": 5, "max_batched_tokens": 17, "prefix_cache": False},
    ],
    ids=["together", "in chunks", "without prefix cache"],
)
def test_texts_are_the_same_in_every_mode(kind: str, engine: dict[str, Any], tmp_path: Path) -> None:
    """Plain, with right and with wrong drafts, alone and together, in float64."""
    RoundedModel(tmp_path, kind, FORMS["blocks"], **FAMILIES[kind])
    common: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_model_len": 128, "num_pages": 400}
    alone = load_pair(open_target(tmp_path), None, EngineConfig(**{**common, "max_num_requests": 1}))
    vocab = alone.target.config.vocab_size
    prompts = random_prompts((1, 15, 16, 17, 33), vocab)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    wanted = [LLM(alone).generate([prompt], params)[0].token_ids for prompt in prompts]
    pair = load_pair(open_target(tmp_path), None, EngineConfig(**{**common, **engine}))
    assert [output.token_ids for output in LLM(pair).generate(prompts, params)] == wanted


def test_speculative_text_equals_plain_text(tmp_path: Path) -> None:
    """A draft that proposes the text, so that whole blocks are verified and accepted."""
    RoundedModel(tmp_path, "qwen3", FORMS["blocks"])
    target = load_target(open_target(tmp_path), placement(WIDE))
    (prompt,) = random_prompts((17,), target.config.vocab_size)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    plain = random_llm(target, None, 0).generate([prompt], params)[0]
    draft: ScriptedDraft = always_right(random_draft(target, WIDE), [*prompt, *plain.token_ids])
    drafted = random_llm(target, draft, 3).generate([prompt], params)[0]
    assert drafted.token_ids == plain.token_ids
    assert max(step.num_accepted for step in drafted.drafts) == 3


def test_results_name_the_quantization_and_no_warning_says_slow(tmp_path: Path) -> None:
    RoundedModel(tmp_path, "llama", FORMS["compressed rows"])
    pair = load_pair(open_target(tmp_path), None, EngineConfig(device="cpu", max_model_len=64))
    assert (pair.target_runtime, pair.target_quantization) == ("native", "compressed-tensors")
    assert not pair.warnings
    assert how_it_runs(open_target(tmp_path)).words == "natively; weights compressed-tensors"


LAYER = "model.layers.1.mlp.up_proj"


def state(path: Path, **changes: Any) -> None:
    """Change keys of the quantization config."""
    with edited_config(path) as settings:
        settings["quantization_config"] |= changes


class TestRefusals:
    """One clear error, before anything is loaded."""

    @pytest.mark.parametrize("form", ["blocks", "compressed rows", "static"])
    def test_a_missing_scale(self, form: str, tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS[form])
        end = "weight_scale_inv" if form == "blocks" else "weight_scale"
        edit_tensors(tmp_path, **{f"{LAYER}.{end}": None})
        with refuses(CheckpointError, "scale-missing", path=tmp_path, field=f"{LAYER}.weight") as refused:
            find_target_runtime(open_target(tmp_path), "auto")
        assert refused.value.exit_code == 3
        assert how_it_runs(open_target(tmp_path)).runtime is None

    def test_a_missing_scale_of_activations(self, tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS["static"])
        edit_tensors(tmp_path, **{f"{LAYER}.input_scale": None})
        with refuses(CheckpointError, "scale-missing", field=f"{LAYER}.weight"):
            find_target_runtime(open_target(tmp_path), "auto")

    def test_scales_of_other_blocks(self, tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS["blocks"])
        state(tmp_path, weight_block_size=[32, 16])
        with refuses(CheckpointError, "scale-blocks-differ") as refused:
            find_target_runtime(open_target(tmp_path), "auto")
        assert "(32, 16)" in refused.value.message

    @pytest.mark.parametrize(
        ("changed", "id"),
        [
            (
                {f"{LAYER}.weight": torch.ones(48, 32), f"{LAYER}.weight_scale": None},
                "fp8-parts-differ",
            ),
            (
                {
                    "model.embed_tokens.weight": torch.ones(97, 32).to(E4M3),
                    "model.embed_tokens.weight_scale": torch.ones(97, 1),
                },
                "fp8-not-multiplied",
            ),
        ],
    )
    def test_weights_that_native_code_does_not_multiply(
        self, changed: dict[str, torch.Tensor | None], id: str, tmp_path: Path
    ) -> None:
        RoundedModel(tmp_path, "llama", FORMS["compressed rows"])
        edit_tensors(tmp_path, **changed)
        with refuses(UnsupportedError, id):
            load_target(open_target(tmp_path), placement(), "native")

    def test_a_config_of_fp8_over_plain_weights(self, tmp_path: Path) -> None:
        oracle = RoundedModel(tmp_path, "llama", FORMS["blocks"])
        config = (tmp_path / "config.json").read_text()
        oracle.model.float().save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(config)
        with refuses(UnsupportedError, "quantization-without-weights"):
            load_target(open_target(tmp_path), placement(), "native")

    @pytest.mark.parametrize(
        "changes",
        [
            {"scale_fmt": "ue8m0"}, {"weight_block_size": [24, 16]},
            {"activation_scheme": "static"},
        ],
    )  # fmt: skip
    def test_other_formats_do_not_run_natively(self, changes: dict[str, Any], tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS["blocks"])
        state(tmp_path, **changes)
        with pytest.raises(DFlashError) as refused:
            load_target(open_target(tmp_path), placement(), "native")
        assert refused.value.id == "quantised-weights"

    @pytest.mark.parametrize(
        ("form", "end"),
        [
            ("blocks", "weight_scale_inv"), ("compressed rows", "weight_scale"), ("static", "weight_scale"),
            ("static", "input_scale"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -0.01])
    def test_scales_that_are_no_positive_numbers(self, value: float, form: str, end: str, tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS[form])
        name = f"{LAYER}.{end}"
        scales = load_file(tmp_path / "model.safetensors")[name]
        scales.view(-1)[-1] = value
        edit_tensors(tmp_path, **{name: scales})
        with refuses(CheckpointError, "scale-invalid", path=tmp_path, field=name) as refused:
            load_target(open_target(tmp_path), placement())
        assert f"{value:g}" in refused.value.message

    @pytest.mark.parametrize("runtime", ["auto", "transformers"])
    @pytest.mark.parametrize(
        ("changed", "id", "field"),
        [
            ({f"{LAYER}.weight": torch.ones(48, 32)}, "scale-of-other-type", f"{LAYER}.weight"),
            ({f"{LAYER}.weight": torch.ones(48, 32).to(torch.float8_e5m2)}, "scale-of-other-type", f"{LAYER}.weight"),
            ({f"{LAYER}.weight": torch.ones(48, 32).to(torch.int8)}, "scale-of-other-type", f"{LAYER}.weight"),
            ({"model.norm.weight_scale": torch.ones(1)}, "scale-of-other-type", "model.norm.weight"),
            ({f"{LAYER}.weight_scale": torch.ones(48, 1).int()}, "scale-type", f"{LAYER}.weight_scale"),
            ({f"{LAYER}.weight_scale": torch.ones(48, 1).to(torch.uint8)}, "scale-type", f"{LAYER}.weight_scale"),
            ({f"{LAYER}.weight_scale": torch.ones(3)}, "scale-blocks-differ", f"{LAYER}.weight_scale"),
            ({f"{LAYER}.weight_scale": None}, "scale-missing", f"{LAYER}.weight"),
            ({"model.embed_tokens.weight": torch.ones(97, 32).to(E4M3)}, "scale-missing", "model.embed_tokens.weight"),
            ({"lm_head.weight": torch.ones(97, 32).to(torch.int8)}, "weight-type", "lm_head.weight"),
        ],
    )
    def test_weights_and_scales_of_other_types(
        self, changed: dict[str, torch.Tensor | None], id: str, field: str, runtime: str, tmp_path: Path
    ) -> None:
        """Headers show them, so that no weights are read. transformers would drop such scales or misread them."""
        RoundedModel(tmp_path, "llama", FORMS["compressed rows"])
        edit_tensors(tmp_path, **changed)
        with refuses(CheckpointError, id, path=tmp_path, field=field) as refused:
            find_target_runtime(open_target(tmp_path), runtime)
        assert refused.value.exit_code == 3
        assert refused.value.expected
        assert refused.value.hint

    def test_parts_of_models_with_the_names_of_scales_are_none(self, tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS["compressed rows"])
        more = {"model.norm.scale": torch.ones(1), "model.embed_scale": torch.ones(1)}
        edit_tensors(tmp_path, **more)
        with refuses(UnsupportedError, "tensors-not-applied") as refused:
            load_target(open_target(tmp_path), placement(), "native")
        assert set(refused.value.found) == set(more)

    def test_a_fixed_scale_of_activations_with_another_shape(self, tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS["static"])
        edit_tensors(tmp_path, **{f"{LAYER}.input_scale": torch.ones(3)})
        with refuses(CheckpointError, "scale-blocks-differ", field=f"{LAYER}.input_scale"):
            find_target_runtime(open_target(tmp_path), "auto")

    @pytest.mark.parametrize("inner", [16, 24])
    def test_a_wider_shared_expert_has_scales_of_its_own(self, inner: int, tmp_path: Path) -> None:
        """Parts of 16 numbers have blocks of their own. Parts of 24 would not have them."""
        changes = {"moe_intermediate_size": inner, "shared_expert_intermediate_size": 2 * inner}
        RoundedModel(tmp_path, "qwen3_next", FORMS["blocks"], **changes)
        if inner == BLOCK:
            assert how_it_runs(open_target(tmp_path)).runtime == "native"
            return
        with refuses(UnsupportedError, "fp8-shared-expert-cut"):
            load_target(open_target(tmp_path), placement(), "native")
        assert how_it_runs(open_target(tmp_path)).runtime == "transformers-cache"


@pytest.mark.parametrize(
    ("kind", "inner", "shared"),
    [
        ("qwen3_moe", 12, None),
        ("qwen3_moe", 24, None),
        ("qwen3_next", 12, 4),
        ("qwen3_next", 24, 12),
        ("qwen3_next", 16, 48),
    ],
)
def test_experts_of_any_width(kind: str, inner: int, shared: int | None, tmp_path: Path) -> None:
    """Experts narrower than a block, with a cut block, and beside a shared expert of another width."""
    changes: dict[str, Any] = {
        "moe_intermediate_size": inner,
        **({"shared_expert_intermediate_size": shared} if shared else {}),
    }
    oracle = RoundedModel(tmp_path, kind, FORMS["blocks"], **changes)
    target = load_target(open_target(tmp_path), placement(WIDE))
    text = random_prompts((20,), target.config.vocab_size)[0]
    found = read_features(target, placement(WIDE), 16, text, LAYERS[:-1])
    assert_close_to_format(torch.stack(found.chunk(3, dim=-1)), oracle, text)


class TestStatements:
    """What a checkpoint says about its weights in several places."""

    def test_the_file_of_model_optimizer_is_enough(self, tmp_path: Path) -> None:
        oracle = RoundedModel(tmp_path, "llama", FORMS["modelopt"])
        with edited_config(tmp_path) as settings:
            del settings["quantization_config"]
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
        target = load_target(open_target(tmp_path), placement(WIDE), "native")
        assert how_it_runs(open_target(tmp_path)).words == "natively; weights modelopt"
        text = random_prompts((9,), target.config.vocab_size)[0]
        assert_close_to_format(read_features(target, placement(WIDE), 16, text, [0])[None], oracle, text)

    @pytest.mark.parametrize(
        ("key", "file", "found", "expected"),
        [
            (None, MODELOPT, "fp8", "modelopt"),
            ("compression_config", COMPRESSED, "fp8", "compressed-tensors"),
            ("quantization", {"bits": 4, "group_size": 64}, "fp8", "MLX"),
        ],
    )
    def test_two_statements_that_differ(
        self, key: str | None, file: dict[str, Any], found: str, expected: str, tmp_path: Path
    ) -> None:
        RoundedModel(tmp_path, "llama", FORMS["blocks"])
        if key is None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
        else:
            edit_config(tmp_path, **{key: file})
        with refuses(CheckpointError, "quantizations-differ", path=tmp_path, found=found) as refused:
            find_target_runtime(open_target(tmp_path), "auto")
        assert expected in refused.value.message

    @pytest.mark.parametrize(
        "changes",
        [
            {"weight_block_size": "all"}, {"weight_block_size": [16]}, {"weight_block_size": [0, 16]},
            {"weight_block_size": [16.0, 16]}, {"activation_scheme": None}, {"activation_scheme": "sometimes"},
            {"fmt": "e3m4"},
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("runtime", ["auto", "native", "transformers"])
    def test_settings_that_no_reader_knows(self, runtime: str, changes: dict[str, Any], tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS["blocks"])
        state(tmp_path, **changes)
        (key,) = changes
        with refuses(InvalidConfig, "quantization-setting", field=f"quantization_config.{key}") as refused:
            find_target_runtime(open_target(tmp_path), runtime)
        assert refused.value.exit_code == 3

    @pytest.mark.parametrize("stated", ["fp8", [1]])
    def test_a_statement_that_is_no_object(self, stated: Any, tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS["blocks"])
        edit_config(tmp_path, quantization_config=stated)
        with refuses(InvalidConfig, "invalid-config", field="quantization_config"):
            find_target_runtime(open_target(tmp_path), "auto")

    def test_a_type_of_floats_that_the_weights_do_not_have(self, tmp_path: Path) -> None:
        RoundedModel(tmp_path, "llama", FORMS["blocks"])
        state(tmp_path, fmt="e5m2")
        with refuses(CheckpointError, "scale-of-other-type", expected="F8_E5M2"):
            find_target_runtime(open_target(tmp_path), "auto")


def test_scales_of_a_kv_cache_are_left_out(tmp_path: Path) -> None:
    """KV keeps the dtype of the run, so its scales change nothing."""
    oracle = RoundedModel(tmp_path, "llama", FORMS["compressed static"])
    edit_tensors(
        tmp_path, **{f"model.layers.{layer}.self_attn.{part}_scale": torch.ones(1) for layer in LAYERS for part in "kv"}
    )
    target = load_target(open_target(tmp_path), placement(WIDE))
    text = random_prompts((9,), target.config.vocab_size)[0]
    assert_close_to_format(read_features(target, placement(WIDE), 16, text, [0])[None], oracle, text)
