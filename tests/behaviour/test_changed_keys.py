"""A changed key of a config changes a native target as it changes transformers' model, or the target is refused.

The weights stay as they are. Configs that transformers refuses, or for which these weights do not suffice, are left
out.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.targets.runs_here import how_it_runs
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.errors import DFlashError, InvalidConfig
from dflash_runtime.models.target import Target
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.changed_keys import MODELS, changed_configs
from dflash_testing.hosted_models import make_model
from dflash_testing.pairs import placement, random_llm, random_prompts
from dflash_testing.refusals import refuses

FAST = ("qwen3_moe", "gemma4_text", "qwen3_next")
FAST_KEYS = ("hidden_act", "hidden_activation", "layer_types", "tie_word", "per_layer", "use_bidirectional", "swiglu")
"""Keys of the default test."""

PLACES = (5, 17, 30)
"""Lengths of texts whose next tokens are compared."""


def read_by_transformers(path: Path, text: list[int]) -> tuple[torch.Tensor, list[int]] | None:
    """The outputs of layers [T, L * hidden] and next tokens; None if transformers does not run config and weights."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        model, found = loaded
        if found["missing_keys"] or found.get("mismatched_keys"):
            return None
        with torch.no_grad():
            out = model.eval()(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    except Exception:  # each class refuses configs in its own way
        return None
    tokens = [int(out.logits[0, place - 1].argmax()) for place in PLACES]
    return torch.cat([state[0] for state in out.hidden_states[1:-1]], dim=-1), tokens


def read_natively(target: Target, text: list[int]) -> tuple[torch.Tensor, list[int]]:
    features = read_features(target, placement(), 16, text, list(range(target.config.num_layers - 1)))
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    outputs = random_llm(target, None, 0).generate([text[:place] for place in PLACES], params)
    return features, [output.token_ids[0] for output in outputs]


def check(path: Path, kind: str, *keys: str) -> dict[str, int]:
    make_model(path, kind, **{"initializer_range": 0.2, **MODELS[kind]})
    file = path / "config.json"
    counts = {"compared": 0, "refused": 0, "left out": 0}
    (text,) = random_prompts((40,), 97, seed=1)
    for name, config in changed_configs(json.loads(file.read_text())):
        if keys and not name.removeprefix("without ").startswith(keys):
            continue
        file.write_text(json.dumps(config))
        try:
            target = load_target(open_target(path), placement(), "native")
        except DFlashError:
            counts["refused"] += 1
            continue
        wanted = read_by_transformers(path, text)
        if wanted is None:
            counts["left out"] += 1
            continue
        found = read_natively(target, text)
        difference = (found[0] - wanted[0]).abs().max() / wanted[0].abs().max()
        assert difference < 1e-4, name
        assert found[1] == wanted[1], name
        counts["compared"] += 1
    return counts


@pytest.mark.parametrize("kind", FAST)
def test_a_changed_key_is_computed_or_refused(kind: str, tmp_path: Path) -> None:
    assert check(tmp_path, kind, *FAST_KEYS)["compared"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_every_changed_key_is_computed_or_refused(kind: str, tmp_path: Path) -> None:
    counts = check(tmp_path, kind)
    assert min(counts["compared"], counts["refused"]) > 10


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    """transformers computes with the stored head, and inference servers with the embedding."""
    make_model(tmp_path, "qwen3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    with refuses(InvalidConfig, field="tie_word_embeddings", found=True):
        load_target(open_target(tmp_path), placement())


def test_an_activation_that_experts_in_fp8_do_not_compute(tmp_path: Path) -> None:
    """Experts with plain weights compute it; see above."""
    make_model(tmp_path, "qwen3_moe", **MODELS["qwen3_moe"])
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}
    for activation, is_named in (("gelu_pytorch_tanh", True), ("silu", False)):
        file.write_text(json.dumps(config | {"hidden_act": activation}))
        assert ("(hidden_act)" in how_it_runs(open_target(tmp_path), "native").reason) is is_named
