"""Every fault in the order, owner, layout or scale of tensors has a reading that restores the draft bit for bit.

No model runs. `examples/planted_faults/kinds.py` has the faults, and docs/measurements/planted-kinds.md their table.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import plant_kinds
import pytest
import torch
from planted_faults.kinds import STRENGTHS, Kind, kinds, order_kinds, owner_kinds, size_kinds
from planted_faults.layout_kinds import layout_kinds
from planted_faults.regrouped_kinds import regrouped_kinds
from safetensors.torch import load_file
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.references import Role
from dflash_cli.diagnosis.weight_readings import weight_readings
from dflash_cli.diagnosis.weight_space import WeightSpace
from dflash_runtime.draft_config import DraftConfig

UNLIKE_THE_REST = ("v_proj scaled in all layers but one",)
"""Faults whose factor is read off other layers: in a draft of three layers the two scaled ones are the rule."""

UNDONE: list[tuple[Kind, Any]] = [
    (kind, strength)
    for group in (layout_kinds, regrouped_kinds, order_kinds, owner_kinds, size_kinds)
    for kind in group()
    for strength in STRENGTHS
    if kind.is_undoable and kind.name not in UNLIKE_THE_REST
]
BY_CONFIG = ("blocks of fc rotated",)
"""Faults that another order of the tapped layers undoes."""


def stacked(tensors: Mapping[str, Tensor], config: DraftConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint as the runtime holds them."""
    found = {name: item.float() for name, item in tensors.items()}
    for layer in range(config.num_layers):
        for name, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            folder = f"layers.{layer}.{name.split('.')[0]}"
            pieces = [found.pop(f"{folder}.{part}_proj.weight") for part in parts]
            found[f"layers.{layer}.{name}.weight"] = torch.cat(pieces)
    return found


@cache
def sound(family: str) -> tuple[dict[str, Any], dict[str, Tensor], DraftConfig]:
    path = plant_kinds.directory(family, Role.DRAFT)
    tensors = {name: item.float() for name, item in load_file(path / "model.safetensors").items()}
    return json.loads((path / "config.json").read_text()), tensors, open_draft(path).config


def undoing(kind: Kind, strength: Any, family: str) -> list[str]:
    """Readings that restore the draft."""
    stated, tensors, config = sound(family)
    changed = dict(tensors)
    kind.plant(json.loads(json.dumps(stated)), changed, strength)
    right, weights = stacked(tensors, config), stacked(changed, config)
    wrong = {name for name in right if not torch.equal(right[name], weights[name])}
    found = []
    for reading in weight_readings(WeightSpace(config, weights)):
        read = reading.rewrite(weights, config)
        if any(read[name] is weights[name] for name in wrong):
            continue
        if all(torch.allclose(read[name], right[name], atol=1e-6) for name in wrong) and all(
            read[name] is weights[name] or torch.equal(read[name], right[name]) for name in right
        ):
            found.append(reading.name)
    return found


@pytest.mark.parametrize(
    ("kind", "strength"),
    [
        pytest.param(*case, id=f"{case[0].name}-{case[1]}", marks=[pytest.mark.slow] if index % 48 else [])
        for index, case in enumerate(UNDONE)
    ],
)
def test_a_reading_restores_the_draft(kind: Kind, strength: Any) -> None:
    family = "bundled" if "tiled" in kind.name and "bundled" in kind.families else "windowed"
    if kind.name not in BY_CONFIG:
        assert undoing(kind, strength, family)


def test_the_wrong_number_of_heads_in_the_way_back_from_pairs_is_undone() -> None:
    """k_proj was brought from interleaved pairs to halves with the number of query heads."""

    def plant(_: Any, tensors: dict[str, Tensor], __: Any) -> None:
        config = sound("hybrid")[2]
        name = "layers.1.self_attn.k_proj.weight"
        rows = torch.arange(config.num_kv_heads * config.head_dim)
        pairs = rows.view(config.num_kv_heads, 2, -1).transpose(1, 2).flatten()
        halves = rows.view(config.num_heads, -1, 2).transpose(1, 2).flatten()
        tensors[name] = tensors[name][pairs][halves]

    assert undoing(Kind("", plant, ""), "mild", "hybrid")


@pytest.mark.parametrize("strength", STRENGTHS)
def test_parts_of_both_fused_matrices_are_exchanged_back(strength: Any) -> None:
    def plant(_: Any, tensors: dict[str, Tensor], strength: Any) -> None:
        for layer in range(3) if strength == "strong" else (1,):
            for one, other in (("self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
                first, second = (f"layers.{layer}.{part}_proj.weight" for part in (one, other))
                tensors[first], tensors[second] = tensors[second], tensors[first]

    assert any("k_proj and v_proj, and" in name for name in undoing(Kind("", plant, ""), strength, "windowed"))


def test_an_offset_of_one_layer_is_tried_although_no_probe_makes_it_suspect() -> None:
    _, tensors, config = sound("windowed")
    names = [f"layers.1.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
    space = WeightSpace(config, stacked({**tensors, **{name: tensors[name] - 1 for name in names}}, config))
    tried = [item for item in weight_readings(space) if item.shift == 1.0 and not item.is_guess]
    assert "layer norm weights read as 1 + w in layer 1" in {item.name for item in tried}


def test_an_offset_norm_is_not_read_as_folded() -> None:
    """Gate and up divided by a norm around 0 make the norm even, which gains as much as the offset."""
    _, tensors, config = sound("windowed")
    name = "layers.1.post_attention_layernorm.weight"
    for norm, is_tried in ((tensors[name], True), (tensors[name] - tensors[name].mean(), False)):
        space = WeightSpace(config, stacked({**tensors, name: norm}, config))
        names = {reading.name for reading in weight_readings(space)}
        assert ("gate_proj and up_proj divided by the norm before in layer 1" in names) is is_tried


def test_there_are_enough_kinds_in_two_strengths_and_three_families() -> None:
    found = list(kinds())
    assert len({kind.name for kind in found}) == len(found) >= 120
    assert {family for kind in found for family in kind.families} == {"bundled", "windowed", "hybrid"}


@pytest.mark.parametrize("parts", ["queries, keys and values", "keys and values", "gate and up"])
def test_a_stacked_projection_of_two_layers_is_exchanged_back(parts: str) -> None:
    kind = next(kind for kind in owner_kinds() if kind.name == f"{parts} of two layers exchanged")
    assert undoing(kind, "strong", "windowed")
