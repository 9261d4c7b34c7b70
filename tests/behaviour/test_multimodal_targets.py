"""The text part of a multimodal model generates the whole model's text, and only the text part is loaded."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import TensorMismatch
from dflash_runtime.llm import LLM
from dflash_runtime.models.hosting.hosted import HostedTarget
from dflash_runtime.models.hosting.hosted_loading import load_model
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.models.target_loading import find_target_runtime, target_bytes
from dflash_runtime.models.text_part import OTHER_PARTS, causal_part
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.edits import edit_tensors
from dflash_testing.hosted_models import (
    KnowingDraft,
    Known,
    WindowedAttention,
    host,
    plain_text,
    run_auto,
)
from dflash_testing.multimodal_models import WITH_OWN_CACHE, WRAPPERS, make_wrapper
from dflash_testing.pairs import placement, random_draft, random_llm, random_prompts
from dflash_testing.paths import ROOT

KINDS = [kind if index < 2 else pytest.param(kind, marks=pytest.mark.slow) for index, kind in enumerate(WRAPPERS)]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a multimodal model, its directory, and its text part as a target."""
    if request.param == "inkling_mm_model" and find_spec("scipy") is None:
        pytest.skip("transformers makes its vision tower with scipy")
    path = tmp_path_factory.mktemp("wrapper")
    return make_wrapper(path, request.param), path, run_auto(path)


def draft_of(target: HostedTarget | OwnCacheTarget) -> Draft:
    return random_draft(target, rope=RopeConfig(theta=10_000.0))


@pytest.mark.parametrize("is_right", [False, True], ids=["random", "right"])
def test_text_equals_the_whole_models_text(models: Any, is_right: bool) -> None:
    """A text token has the same position on all axes of a multi-axis rope, which therefore acts as a plain rope."""
    model, _, target = models
    prompts = random_prompts((1, 17, 33, 9), target.config.vocab_size)
    texts = [plain_text(model, prompt, 20) for prompt in prompts]
    known = [Known([*prompt, *text], 7) for prompt, text in zip(prompts, texts, strict=True)]
    draft = KnowingDraft(draft_of(target), known) if is_right else draft_of(target)
    outputs = random_llm(target, draft, 7, max_num_requests=4).generate(prompts, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [text[:12] for text in texts]
    assert not is_right or max(length for output in outputs for length in output.acceptance_lengths) == 8


def test_taps_are_its_hidden_states(models: Any) -> None:
    model, _, target = models
    ids = torch.tensor(random_prompts((15,), target.config.vocab_size)[0])
    tapped: list[torch.Tensor] = []

    def keep(module: object, given: object, out: Any) -> None:
        rows = (out if isinstance(out, torch.Tensor) else out[0])[0]
        tapped.append(rows if rows.dim() == 2 else rows.sum(1) / rows.shape[1])  # a draft reads the mean of streams

    decoder = causal_part(model).get_decoder()
    decoder = decoder if hasattr(decoder, "layers") else decoder.model
    hook = decoder.layers[1].register_forward_hook(keep)
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        hidden, features = target(ids, torch.arange(15), WindowedAttention(target.config.windows), (1,))
        torch.testing.assert_close(features, tapped[0], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(target.head(hidden)[:, : logits.shape[1]], logits, rtol=1e-4, atol=1e-3)
    hook.remove()


def test_other_parts_are_neither_made_nor_counted(models: Any) -> None:
    model, path, target = models
    parts = (causal_part(model).get_decoder(), causal_part(model).get_output_embeddings())
    text = sum(item.numel() for part in parts for item in part.state_dict().values())
    whole = sum(item.numel() for item in model.parameters())
    counted = target_bytes(open_target(path), torch.float32, "transformers") // 4
    assert counted <= text
    assert counted < whole
    assert any(OTHER_PARTS.match(name) for name in load_file(path / "model.safetensors"))
    runtime, config = find_target_runtime(open_target(path), "transformers")
    is_cached = open_target(path).checkpoint.config["model_type"] in WITH_OWN_CACHE
    assert runtime == ("transformers-cache" if is_cached else "transformers")
    assert isinstance(target, OwnCacheTarget) == is_cached
    loaded = load_model(open_target(path), config, placement(), "eager")
    assert not [name for name, _ in loaded.named_parameters() if OTHER_PARTS.match(name)]


@pytest.mark.gpu
def test_the_text_part_runs_on_a_gpu(tmp_path: Path) -> None:
    model = make_wrapper(tmp_path, "qwen3_vl")
    pair = load_pair(open_target(tmp_path), None, EngineConfig(device="cuda", dtype="float32", max_model_len=64))
    (prompt,) = random_prompts((17,), pair.target.config.vocab_size)
    (output,) = LLM(pair).generate([prompt], PARAMS)
    assert list(output.token_ids) == plain_text(model, prompt, 12)


@pytest.mark.parametrize("kind", ["gemma4_unified", "inkling2", "llama4", "nemotron_h_omni"])
def test_models_of_other_layouts_run(kind: str, tmp_path: Path) -> None:
    """Masks from the tokens of one call, a cap in its own module, a text-only class, and a head in a language model."""
    make_wrapper(tmp_path, kind)
    assert isinstance(run_auto(tmp_path), OwnCacheTarget) == (kind in WITH_OWN_CACHE)


def test_a_missing_tensor_of_the_text_part_is_named(tmp_path: Path) -> None:
    make_wrapper(tmp_path, "qwen3_vl")
    edit_tensors(tmp_path, **{"model.language_model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(TensorMismatch) as refused:
        host(tmp_path)
    assert refused.value.missing == ("model.language_model.layers.1.mlp.up_proj.weight",)


def test_the_document_names_every_tested_wrapper() -> None:
    text = (ROOT / "docs" / "reference" / "hosted-targets.md").read_text()
    assert not [kind for kind in WRAPPERS if f"`{kind}`" not in text]
