"""Rope frequencies equal transformers', bit for bit, for every rope type that the runtime computes."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.errors import InvalidConfig, UnsupportedError
from dflash_runtime.models.rope import KINDS, rope_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 1.0}),
    ("linear", {"factor": 3}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32, "original_max_position_embeddings": 512}),
    ("llama3", {**LLAMA3, "original_max_position_embeddings": None}),
    ("llama3", {**LLAMA3, "low_freq_factor": 4.0}),
    ("yarn", YARN),
    ("yarn", {"factor": 4.0}),
    ("yarn", {"factor": None, "original_max_position_embeddings": 4096}),
    ("yarn", {**YARN, "factor": 0.5}),
    ("yarn", {**YARN, "truncate": False}),
    ("yarn", {**YARN, "beta_fast": 8, "beta_slow": 8}),
    ("yarn", {**YARN, "beta_fast": 0, "beta_slow": None}),
    ("yarn", {**YARN, "beta_fast": 64.0, "beta_slow": 2.5, "attention_factor": 1.25}),
    ("yarn", {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707}),
    ("yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 0}),
]


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (128, 5e5), (80, 1e6)])
@pytest.mark.parametrize(("kind", "params"), CASES)
def test_frequencies_equal_transformers(kind: str, params: dict[str, Any], head_dim: int, theta: float) -> None:
    rope = RopeConfig(theta=theta, kind=kind, params=params)
    stated = {key: value for key, value in rope.to_parameters().items() if key != "original_max_position_embeddings"}
    if (trained := params.get("original_max_position_embeddings")) is not None:
        stated["original_max_position_embeddings"] = trained
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=32768, rope_parameters=stated)
    wanted, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    found, found_scale = rope_frequencies(rope, head_dim, 32768)
    assert torch.equal(found, wanted)
    assert found_scale == scale


def test_types_that_depend_on_the_length_are_refused() -> None:
    for kind in ROPE_INIT_FUNCTIONS.keys() - KINDS:
        with pytest.raises(UnsupportedError) as caught:
            rope_frequencies(RopeConfig(theta=1e4, kind=kind), 64, 4096)
        assert (caught.value.id, caught.value.found) == ("rope-not-run", kind)


@pytest.mark.parametrize(
    ("kind", "params", "field"),
    [
        ("linear", {}, "rope_parameters.factor"),
        ("linear", {"factor": "4"}, "rope_parameters.factor"),
        ("llama3", {**LLAMA3, "high_freq_factor": None}, "rope_parameters.high_freq_factor"),
        ("yarn", {}, "rope_parameters.factor"),
        ("yarn", {**YARN, "original_max_position_embeddings": 0}, "rope_parameters.original_max_position_embeddings"),
        ("yarn", {**YARN, "beta_slow": -1}, "rope_parameters.beta_slow"),
    ],
)
def test_a_parameter_that_is_missing_or_no_number_is_named(kind: str, params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        rope_frequencies(RopeConfig(theta=1e4, kind=kind, params=params), 64, 4096)
    assert caught.value.field == field


def test_yarn_needs_a_base_above_one() -> None:
    with pytest.raises(InvalidConfig) as caught:
        rope_frequencies(RopeConfig(theta=1.0, kind="yarn", params=YARN), 64, 4096)
    assert caught.value.field == "rope_theta"
