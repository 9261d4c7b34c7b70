"""Stacked projections: the rows of the parts in their order, and nothing lost."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.models.weights import load_weights, stack_projections
from dflash_testing.pairs import bundled_draft, placement, random_draft_config, random_target, random_weights


def draft_weights(**changes: Any) -> dict[str, Tensor]:
    config = random_draft_config(random_target().config, **changes)
    return random_weights(owned_shapes(config), torch.float32, 0)


@pytest.mark.parametrize("order", [1, -1], ids=["as they come", "reversed"])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_parts_are_stacked_in_their_own_order(kind: str, order: int) -> None:
    parts = draft_weights(attention_bias=True)
    weights = stack_projections(list(parts.items())[::order])
    for layer in range(2):
        name = f"layers.{layer}.self_attn"
        wanted = torch.cat([parts[f"{name}.{part}_proj.{kind}"] for part in "qkv"])
        assert torch.equal(weights[f"{name}.qkv_proj.{kind}"], wanted)
    gate_up = torch.cat([parts[f"layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(weights["layers.1.mlp.gate_up_proj.weight"], gate_up)


def test_every_number_is_there_once() -> None:
    parts = draft_weights()
    weights = stack_projections(parts.items())
    assert sum(tensor.numel() for tensor in weights.values()) == sum(tensor.numel() for tensor in parts.values())
    assert not any(f"{part}_proj" in name.split(".") for name in weights for part in ("q", "k", "v", "gate", "up"))


def test_a_stack_that_is_not_complete_keeps_its_parts() -> None:
    parts = draft_weights()
    del parts["layers.0.mlp.up_proj.weight"]
    weights = stack_projections(parts.items())
    assert "layers.0.mlp.gate_proj.weight" in weights
    assert "layers.0.mlp.gate_up_proj.weight" not in weights


def test_weights_are_loaded_in_the_dtype_of_the_run_and_ids_as_they_are() -> None:
    checkpoint = bundled_draft("tiny:reduced").checkpoint
    weights = load_weights(checkpoint, ["fc.weight", "d2t"], placement(torch.float64))
    assert weights["fc.weight"].dtype == torch.float64
    assert weights["d2t"].dtype == torch.int64
    assert torch.equal(weights["fc.weight"], checkpoint.load("fc.weight").double())
