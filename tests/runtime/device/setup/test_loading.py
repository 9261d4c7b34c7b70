"""Loading a pair: what it holds, and the checkpoints that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.device.setup import loading
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.models.layers import MLP
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.pairs import bundled_draft, bundled_prompts, save_bundled_target
from dflash_testing.refusals import refuses

CONFIG = EngineConfig(device="cpu", max_model_len=256, num_pages=60)
PARAMS = SamplingParams(max_new_tokens=20)


def test_an_llm_takes_opened_checkpoints_or_a_loaded_pair() -> None:
    target = open_target(tiny_directory() / "target")
    with LLM(target, bundled_draft(), CONFIG) as llm:
        found = llm.generate(bundled_prompts()[:2], PARAMS)
    again = LLM(load_pair(target, bundled_draft().source, CONFIG)).generate(bundled_prompts()[:2], PARAMS)
    assert [output.drafts for output in found] == [output.drafts for output in again]
    assert sum(map(sum, (output.acceptance_lengths for output in found))) > 20


def test_several_llms_run_on_one_loaded_pair() -> None:
    pair = load_pair(open_target(tiny_directory() / "target"), bundled_draft(), CONFIG)
    first, second = LLM(pair), LLM(pair.without_draft())
    prompts = bundled_prompts()[:2]
    assert (first.num_draft_tokens, second.num_draft_tokens) == (7, 0)
    texts = [[output.token_ids for output in llm.generate(prompts, PARAMS)] for llm in (first, second, first)]
    assert texts[0] == texts[1] == texts[2]


def test_a_draft_gets_another_config_without_loading_its_weights_again() -> None:
    pair = load_pair(open_target(tiny_directory() / "target"), bundled_draft(), CONFIG)
    assert pair.draft is not None
    config = pair.draft.config
    other = pair.with_draft(replace(config, causal=(True,) * config.num_layers))
    assert other.draft_weights is pair.draft_weights
    assert other.target is pair.target
    prompts = bundled_prompts()[:4]
    steps = [sum(len(output.drafts) for output in LLM(item).generate(prompts, PARAMS)) for item in (pair, other)]
    same = LLM(pair.with_draft(config)).generate(prompts, PARAMS)
    assert steps[1] != steps[0] == sum(len(output.drafts) for output in same)


def test_packed_weights_of_a_draft_are_refused(tmp_path: Path) -> None:
    draft = open_draft(support.make_native(tmp_path / "draft", quantization_config={"quant_method": "fp8"}))
    target = open_target(support.make_target(tmp_path / "target"))
    for _ in range(2):
        with refuses(UnsupportedError, "quantization-without-weights"):
            LLM(target, draft, EngineConfig(device="cpu"))


def test_an_unknown_family_is_refused_by_name() -> None:
    source = bundled_draft().source
    unknown = replace(source, config=replace(source.config, family="dflsh"))
    with refuses(UnsupportedError, "unknown-draft-family", found="dflsh"):
        load_pair(open_target(tiny_directory() / "target"), unknown, CONFIG)


def test_a_wrong_draft_is_refused_before_a_target_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = support.make_native(tmp_path / "draft")
    (draft / "mask_embedding.safetensors").write_bytes(b"never read")
    target = open_target(support.make_target(tmp_path / "target"))
    monkeypatch.setattr(loading, "load_target", pytest.fail)
    with refuses(UnsupportedError, "mask-embedding", path=draft / "mask_embedding.safetensors"):
        LLM(target, open_draft(draft), EngineConfig(device="cpu"))


def test_weights_kept_for_other_configs_take_no_more_memory() -> None:
    pair = load_pair(open_target(tiny_directory() / "target"), bundled_draft(), CONFIG)
    assert isinstance(pair.draft, DFlashDraft)
    assert pair.draft_weights is not None
    layer = pair.draft._decoder.layers[0]
    assert layer.attention.qkv.weight is pair.draft_weights["layers.0.self_attn.qkv_proj.weight"]
    assert isinstance(layer.mlp, MLP)
    assert layer.mlp.gate_up.weight is pair.draft_weights["layers.0.mlp.gate_up_proj.weight"]


def fp8_tensors() -> dict[str, Tensor]:
    weights = load_file(tiny_directory() / "target" / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    return {name: weights[name].to(torch.float8_e4m3fn)}


PROJECTION = "model.layers.0.self_attn.q_proj"
SCALE, KV_SCALE = "model.layers.0.mlp.up_proj.weight_scale", "model.layers.0.self_attn.k_scale"

UNAPPLIED: dict[str, tuple[dict[str, Tensor], dict[str, Any], str, str]] = {
    "config": ({}, {"quantization_config": {"quant_method": "fp8"}}, "quantization-without-weights", "fp8"),
    "compression": ({}, {"compression_config": {"format": "int-quantized"}}, "quantised-weights", "compression_config"),
    "fp8 tensor": (fp8_tensors(), {}, "quantised-weights", "q_proj.weight is F8_E4M3"),
    "scale": ({SCALE: torch.ones(1)}, {}, "quantised-weights", SCALE),
    "KV scale": ({KV_SCALE: torch.ones(1)}, {}, "quantised-weights", KV_SCALE),
    "bias": ({f"{PROJECTION}.bias": torch.ones(64)}, {}, "tensors-not-applied", f"{PROJECTION}.bias"),
    "extra": ({f"extra.{index}": torch.ones(1) for index in range(8)}, {}, "tensors-not-applied", "extra.7"),
}
"""Tensors and config keys to add -> the id of the error, and the name in it."""


@pytest.mark.parametrize(("tensors", "config", "error_id", "named"), UNAPPLIED.values(), ids=UNAPPLIED)
def test_a_target_with_unsupported_tensors_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], error_id: str, named: str
) -> None:
    """A run without these tensors would produce noise."""
    target = open_target(save_bundled_target(tmp_path / "target", tensors, **config))
    with refuses(UnsupportedError, error_id) as refused:
        LLM(target, bundled_draft(), CONFIG)
    assert refused.value.exit_code == 5
    assert named in str(refused.value.found)


def test_known_unused_tensors_of_a_target_are_ignored(tmp_path: Path) -> None:
    source = open_target(tiny_directory() / "target")
    names = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    if source.config.tie_word_embeddings:
        names["lm_head.weight"] = source.checkpoint.load("model.embed_tokens.weight")
    LLM(open_target(save_bundled_target(tmp_path / "target", names)), bundled_draft(), CONFIG)


def test_more_requests_than_a_launch_allows_are_refused() -> None:
    with refuses(UsageError, field="max_num_requests", found=70_000) as refused:
        LLM(open_target(tiny_directory() / "target"), bundled_draft(), replace(CONFIG, max_num_requests=70_000))
    assert "65535" in str(refused.value.expected)
