"""Readings of DFlash 2 and DSpark drafts restore drafts with planted faults. No model runs."""

import json
from typing import Any

import plant_kinds
import pytest
import torch
from planted_faults.kinds import STRENGTHS, Kind
from planted_faults.walking_kinds import WALKING, walking_kinds
from safetensors.torch import load_file
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis.alternatives import AlternativeReading, ReadingSpace, alternative_readings
from dflash_runtime.models.weights import stack_projections

OWN = ("convolution", "selector", "markov")
"""Factors of tensors that only these families have."""


def tensors_of(family: str) -> dict[str, Tensor]:
    path = plant_kinds.directory(family, Role.DRAFT)
    return {name: item.float() for name, item in load_file(path / "model.safetensors").items()}


def space_of(family: str, tensors: dict[str, Tensor]) -> ReadingSpace:
    config = open_draft(plant_kinds.directory(family, Role.DRAFT)).config
    target = open_target(fetch_directory(TINY, Role.TARGET)).config
    return ReadingSpace(config=config, target=target, weights=stack_projections(tensors.items()), text_len=100)


OF_TENSORS = [
    (family, kind, strength)
    for kind in walking_kinds()
    for family in kind.families
    for strength in STRENGTHS
    if kind.is_undoable and not kind.right.startswith(("R", "N"))
]


@pytest.mark.parametrize(
    ("family", "kind", "strength"),
    [
        pytest.param(*case, id=f"{case[1].name}-{case[2]}", marks=[pytest.mark.slow] if index % 8 else [])
        for index, case in enumerate(OF_TENSORS)
    ],
)
def test_a_reading_restores_the_draft(family: str, kind: Kind, strength: Any) -> None:
    right, planted = tensors_of(family), tensors_of(family)
    config = json.loads((plant_kinds.directory(family, Role.DRAFT) / "config.json").read_text())
    kind.plant(config, planted, strength)
    space, sound = space_of(family, planted), stack_projections(right.items())
    wrong = {name for name in right if not torch.equal(right[name], planted[name])}
    assert wrong <= sound.keys()

    def restores(reading: AlternativeReading) -> bool:
        assert reading.rewrite is not None
        read = reading.rewrite(space.weights, space.config)
        if any(read[name] is space.weights[name] for name in wrong):
            return False
        changed = wrong | {name for name in read if read[name] is not space.weights[name]}
        return all(torch.allclose(read[name], sound[name], atol=1e-6) for name in changed)

    own = [item for item in alternative_readings(space) if item.factor in OWN and item.rewrite is not None]
    assert any(map(restores, own))


def test_names_of_readings_are_unique() -> None:
    for family in WALKING:
        names = [item.name for item in alternative_readings(space_of(family, tensors_of(family)))]
        assert len(set(names)) == len(names)
