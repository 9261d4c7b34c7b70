"""`convert --quantize fp8`: matrices in FP8 with their scales, which dflash runs and engines load."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.tuning.rounded_pairs import rounded
from dflash_cli.tuning.what_if import parse_what_ifs
from dflash_kernels.fp8.fp8_weight import FP8, Fp8Weight, to_fp8
from dflash_runtime.checkpoint.quantised.fp8_format import read_fp8_format
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.drafts.draft import load_draft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointError
from dflash_runtime.models.target import TargetEnds
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_config, edit_tensors
from dflash_testing.fp8_models import FORMS, RoundedModel
from dflash_testing.pairs import (
    bundled_draft,
    bundled_draft_model,
    bundled_llm,
    bundled_prompts,
    bundled_target_model,
    placement,
)
from dflash_testing.refusals import refuses

HALF_A_BLOCK = "S32 model.safetensors:layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module", params=["part", "all"])
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft with matrices in FP8: without q, k, v and the head, or all of them."""
    path: Path = tmp_path_factory.mktemp("fp8") / request.param
    more = ["--quantize-all"] if request.param == "all" else []
    outcome = invoke("convert", "tiny", path, "--to", "native", "--quantize", "fp8", *more)
    assert outcome.code == 0, outcome.err
    assert ("fp8-blocks-cut" in outcome.notices) == bool(more), "k has 64 rows, half a block"
    return path


def test_values_and_scales(draft: Path) -> None:
    """Each matrix is the source's, rounded. All other tensors are the source's bytes."""
    source, stored = bundled_draft().checkpoint, load_file(draft / "model.safetensors")
    is_all = draft.name == "all"
    rounded = {name.removesuffix("_scale") for name in stored if name.endswith("_scale")}
    kept = {name for name in stored if name not in rounded and not name.endswith("_scale")}
    assert ("layers.0.self_attn.q_proj.weight" in rounded) == is_all
    assert ("lm_head.weight" in rounded) == is_all
    assert {"fc.weight", "layers.0.mlp.down_proj.weight", "layers.2.self_attn.o_proj.weight"} <= rounded
    for name in rounded - {"lm_head.weight"}:
        made = to_fp8(source.load(name), (128, 128))
        assert stored[name].dtype == FP8
        assert torch.equal(stored[name].view(torch.uint8), made.values.view(torch.uint8))
        assert torch.equal(stored[f"{name}_scale"], made.scales)
    assert all(torch.equal(stored[name], source.load(name)) for name in kept)


def test_the_manifest_and_the_config_say_so(draft: Path) -> None:
    manifest = json.loads((draft / "conversion.json").read_text())
    changes = {item["to"]: item for item in manifest["tensors"]}
    assert changes["fc.weight"]["change"] == changes["fc.weight_scale"]["change"] == "derived"
    assert changes["norm.weight"]["change"] == "kept"
    form = read_fp8_format(open_draft(draft).checkpoint)
    assert form is not None
    assert (form.block, form.activations) == ((128, 128), "dynamic")


def test_the_runtime_runs_it(draft: Path) -> None:
    """Text equals plain decoding. Nearly as many tokens are accepted as of the plain draft; without scales, few are."""
    target: TargetEnds = bundled_target_model(torch.float32)
    made = load_draft(open_draft(draft).source, target, placement())
    prompts, params = bundled_prompts()[:4], SamplingParams(max_new_tokens=24)
    outputs = bundled_llm(made, 7).generate(prompts, params)
    plain = bundled_llm(None, 0).generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    source = bundled_llm(bundled_draft_model(), 7).generate(prompts, params)
    assert mean_accepted(outputs) > 0.8 * mean_accepted(source)


def test_code_that_changes_weights_gets_plain_numbers(draft: Path) -> None:
    """`diagnose` reads parts in other ways, and `tune --what-if` rounds them."""
    target = open_target(tiny_directory() / "target")
    loaded = load_pair(target, open_draft(draft), EngineConfig(device="cpu", max_model_len=64))
    pair = loaded.with_plain_draft()
    assert loaded.draft_weights is not None
    assert pair.draft_weights is not None
    assert any(tensor.dtype == FP8 for tensor in loaded.draft_weights.values())
    assert {tensor.dtype for tensor in pair.draft_weights.values()} == {torch.float32}
    assert not any(name.endswith("_scale") for name in pair.draft_weights)
    form = Fp8Weight.find(loaded.draft_weights, "fc")
    assert form is not None
    assert torch.equal(pair.draft_weights["fc.weight"], form.dequantised())
    rounded_again = rounded(loaded, target, parse_what_ifs("draft=int8")[0])
    assert rounded_again.draft_weights is not None
    assert {tensor.dtype for tensor in rounded_again.draft_weights.values()} == {torch.float32}


def mean_accepted(outputs: list[RequestOutput]) -> float:
    return fmean(step.num_accepted for output in outputs for step in output.drafts)


def problems(draft: Path, engine: str) -> list[str]:
    """An engine's findings about packed weights: ids and locations."""
    findings = json.loads(invoke("validate", draft, "--engine", engine, "--json").out)["findings"]
    return [f"{item['id']} {item['location']}" for item in findings if item["id"] in ("S32", "S42", "N11")]


def test_verdicts_of_engines(draft: Path) -> None:
    """vLLM loads every part as it is meant. SGLang takes `fc` for plain numbers (docs/measurements).

    Neither loads k of 64 rows in FP8, which ends inside a block.
    """
    cut = [HALF_A_BLOCK] if draft.name == "all" else []
    assert problems(draft, "vllm") == cut
    assert problems(draft, "sglang") == (cut or ["S42 model.safetensors:fc.weight"])


@pytest.mark.parametrize("more", [[], ["--quantize-all"]])
def test_a_draft_for_sglang_keeps_fc(more: list[str], tmp_path: Path) -> None:
    outcome = invoke("convert", "tiny", tmp_path / "out", "--to", "sglang", "--quantize", "fp8", *more)
    assert outcome.code == 0, outcome.err
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["fc.weight"].dtype != FP8
    assert stored["layers.0.mlp.up_proj.weight"].dtype == FP8
    for engine in ("sglang", "vllm"):
        assert problems(tmp_path / "out", engine) == ([HALF_A_BLOCK] if more else [])


@pytest.mark.parametrize("form", ["blocks", "compressed rows"])
def test_the_head_of_a_target_in_fp8_is_dequantised(form: str, tmp_path: Path) -> None:
    """Its numbers alone, without their scales, would be another head."""
    target = tmp_path / "target"
    shutil.copytree(tiny_directory() / "target", target)
    stored = load_file(target / "model.safetensors")
    name = "lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"
    plain, parts = FORMS[form].pack(stored[name].float())
    edit_tensors(target, **{f"lm_head.{end}": tensor for end, tensor in parts.items()})
    edit_config(target, quantization_config=FORMS[form].config, tie_word_embeddings=False)
    out = tmp_path / "out"
    options = ("--to", "native", "--quantize", "fp8", "--quantize-all", "--target", target, "--verify", "none")
    outcome = invoke("convert", "tiny", out, *options)
    assert outcome.code == 0, outcome.err
    made, wanted = load_file(out / "model.safetensors"), to_fp8(plain, (128, 128))
    assert torch.equal(made["lm_head.weight"].view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(made["lm_head.weight_scale"], wanted.scales)


def test_sglang_does_not_read_a_draft_in_fp8_as_plain(tmp_path: Path) -> None:
    """Its option for plain drafts would drop the scales. A target in FP8 asks for it only beside a plain draft."""
    target = tmp_path / "target"
    RoundedModel(target, "qwen3", FORMS["blocks"], hidden_size=support.SMALL.hidden, vocab_size=support.SMALL.vocab)
    plain = support.make_native(tmp_path / "plain")
    packed = tmp_path / "packed"
    outcome = invoke("convert", plain, packed, "--to", "sglang", "--quantize", "fp8")
    assert outcome.code == 0, outcome.err
    commands = [
        invoke("serve-command", draft, "--target", target, "--engine", "sglang").out for draft in (plain, packed)
    ]
    assert ["unquant" in command for command in commands] == [True, False]


@pytest.mark.parametrize("value", [-0.1, 0.0, torch.nan])
def test_a_scale_that_is_no_positive_number_is_reported(value: float, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    assert invoke("convert", "tiny", draft, "--to", "native", "--quantize", "fp8").code == 0
    file = draft / "model.safetensors"
    stored = load_file(file)
    stored["fc.weight_scale"].view(-1)[0] = value
    save_file(stored, file, {"format": "pt"})
    findings = json.loads(invoke("validate", draft, "--level", "weights", "--json").out)["findings"]
    assert any(item["id"] == "N13" and "fc.weight_scale" in item["location"] for item in findings)
    with refuses(CheckpointError, "scale-invalid", path=draft, field="fc.weight_scale"):
        load_draft(open_draft(draft).source, bundled_target_model(torch.float32), placement())


def test_a_quantised_draft_is_not_rounded_again(draft: Path, tmp_path: Path) -> None:
    outcome = invoke("convert", draft, tmp_path / "again", "--to", "native", "--quantize", "fp8")
    assert outcome.code == 5
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("to", "options", "code"),
    [("speculators", ["--quantize", "fp8", "--target-name", "a/b"], 5), ("native", ["--quantize-all"], 2)],
)
def test_refusals(to: str, options: list[str], code: int, tmp_path: Path) -> None:
    assert invoke("convert", "tiny", tmp_path / "out", "--to", to, *options).code == code


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    outcome = invoke("convert", "tiny", tmp_path / "out", "--to", "native", "--quantize", "fp8", "--dry-run")
    assert outcome.code == 0
    assert "derived  fc.weight" in outcome.out
    assert not (tmp_path / "out").exists()
