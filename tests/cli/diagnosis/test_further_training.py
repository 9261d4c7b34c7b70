"""A step of training gains little on a sound draft, and much on a draft with a damaged part."""

from collections.abc import Mapping
from typing import Any

import pytest
from plant_kinds import directory
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import Role
from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.alternatives import AlternativeReading
from dflash_cli.diagnosis.further_training import halves, training_gain
from dflash_cli.diagnosis.reading_doubts import TRAINABLE
from dflash_cli.diagnosis.reading_runner import ReadingRunner
from dflash_cli.diagnosis.reading_screen import ReadingScreen
from dflash_cli.diagnosis.run_settings import SearchBudget
from dflash_cli.diagnosis.suspect_parts import most_pulled
from dflash_runtime.engine_config import EngineConfig

ANCHORS = 96


@pytest.fixture(scope="module")
def pair() -> tuple[ReadingRunner, ReadingScreen, AlternativeReading]:
    draft = open_draft(directory("windowed", Role.DRAFT))
    budget = SearchBudget(num_prompts=8, max_new_tokens=40, lead_len=24)
    target = open_target(directory("windowed", Role.TARGET))
    runner = ReadingRunner(draft, target, EngineConfig(device="cpu"), budget, longest=None)
    own = AlternativeReading("", "as it is", draft.config)
    outputs = runner.run(runner.build(own), runner.make_prompts(range(8)))
    return runner, runner.screen(outputs, draft.config.target_layer_ids), own


def changed(own: AlternativeReading, **fields: Any) -> AlternativeReading:
    return AlternativeReading("", "changed", own.config, **fields)


def test_a_sound_draft_gains_little(pair: tuple[ReadingRunner, ReadingScreen, AlternativeReading]) -> None:
    runner, screen, own = pair
    assert screen.training_gain(runner.trainable(own), ANCHORS) < TRAINABLE / 2


@pytest.mark.parametrize(
    "change",
    [
        rewrites.exchange(("mlp.down_proj", 0), ("mlp.down_proj", 1)),
        pytest.param(rewrites.change_parts({"self_attn.q_norm": rewrites.scale(3.0)}), marks=pytest.mark.slow),
        pytest.param(rewrites.change_parts({"self_attn.v_proj": rewrites.scale(-1.0)}, (1,)), marks=pytest.mark.slow),
    ],
)
def test_a_damaged_draft_gains(
    change: rewrites.Rewrite, pair: tuple[ReadingRunner, ReadingScreen, AlternativeReading]
) -> None:
    runner, screen, own = pair
    assert screen.training_gain(runner.trainable(changed(own, rewrite=change)), ANCHORS) > 1.5 * TRAINABLE


def test_the_scaled_part_is_pulled(pair: tuple[ReadingRunner, ReadingScreen, AlternativeReading]) -> None:
    runner, screen, own = pair
    scaled = changed(own, rewrite=rewrites.change_parts({"self_attn.v_proj": rewrites.scale(4.0)}, (1,)))
    found = most_pulled(screen.pulls(runner.trainable(scaled), ANCHORS), own.config, 3)
    assert ("self_attn.v_proj", 1) in found or ("self_attn.o_proj", 1) in found
    assert len(found) == 6


def test_a_step_is_judged_on_the_other_half() -> None:
    """A loss whose halves pull in opposite directions gains nothing."""
    import torch

    weights: Mapping[str, Tensor] = {"w": torch.tensor([1.0, 2.0])}
    assert training_gain(weights, lambda item, half: (item["w"] * (1 if half else -1)).sum() + 9) == 0
    assert training_gain(weights, lambda item, half: item["w"].square().sum()) > 0.5


def test_halves_share_no_text() -> None:
    first, second = halves([(text, at) for text in range(4) for at in range(10)], 8)
    assert {text for text, _ in first} == {0, 2}
    assert {text for text, _ in second} == {1, 3}
    assert len(first) == len(second) == 4
