"""The table of scales with the same effect, against the losses of drafts with these scales."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.alternatives import AlternativeReading
from dflash_cli.diagnosis.equal_scales import EFFECTS, EMBEDDING, LOGITS, SIGNS, equal_names, equal_scales
from dflash_cli.diagnosis.reading_runner import ReadingRunner
from dflash_cli.diagnosis.run_settings import SearchBudget
from dflash_cli.diagnosis.value_readings import scaled_parts
from dflash_cli.diagnosis.weight_orders import DOWN, GATE, OUT, UP, VALUE
from dflash_cli.diagnosis.weight_rewrites import ENDS, HEAD_NORMS, LAYER_NORMS, PARTS
from dflash_cli.diagnosis.weight_space import Where, only
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.engine_config import EngineConfig
from dflash_testing.pairs import bundled_draft

POST = LAYER_NORMS[1]
SAME = 1e-7
"""Nats, in float64 and with an eps that has no effect."""


def scaled(parts: tuple[str, ...], factor: float, where: Where, config: DraftConfig) -> AlternativeReading:
    changes = {part: rewrites.scale(factor) for part in parts if part in PARTS}
    if EMBEDDING in parts:
        config = replace(config, input_embedding_scale=config.input_embedding_scale / factor)
    if LOGITS in parts:
        config = replace(config, output_multiplier=config.output_multiplier * factor)
    return AlternativeReading("weights", "scaled", config, rewrite=rewrites.change_parts(changes, only(where)))


@pytest.mark.parametrize(
    ("name", "factor", "where"),
    [
        ("tiny", 3.0, None),
        ("tiny", 3.0, 1),
        ("tiny", -1.0, None),
        pytest.param("tiny", -1.0, 1, marks=pytest.mark.slow),
        pytest.param("tiny:dspark", 3.0, None, marks=pytest.mark.slow),
        ("tiny:dflash2", 3.0, None),
    ],
)
def test_the_table_has_every_equal_scale_of_two_parts_and_no_other(name: str, factor: float, where: Where) -> None:
    """All sets of one and two parts have the same loss exactly if the table says so."""
    draft = open_draft(fetch_directory(name, Role.DRAFT))
    config = replace(draft.config, rms_norm_eps=1e-20)
    target, budget = (
        open_target(fetch_directory(TINY, Role.TARGET)),
        SearchBudget(num_prompts=1, max_new_tokens=12, lead_len=4),
    )
    runner = ReadingRunner(draft, target, EngineConfig(device="cpu", dtype="float64"), budget, longest=None)
    outputs = runner.run(runner.build(AlternativeReading("", "", draft.config)), runner.make_prompts(range(1)))
    screen = runner.screen(outputs, config.target_layer_ids)

    def loss(parts: tuple[str, ...]) -> float:
        return float(screen.score(runner.build(scaled(parts, factor, where, config)), 4).loss)

    own = loss(())
    table = EFFECTS if factor > 0 else SIGNS
    able = [part for part in table if where is None or part not in (*ENDS, EMBEDDING, LOGITS)]
    alone = {part: loss((part,)) for part in able}
    for part in able:
        assert (abs(alone[part] - own) < SAME) == (not table[part]), part
    able = [part for part in able if abs(alone[part] - own) >= SAME]
    sets = [chosen for count in (1, 2) for chosen in combinations(able, count)]
    losses = {chosen: loss(chosen) for chosen in sets}
    for chosen in sets:
        if abs(losses[chosen] - own) < SAME:
            continue
        same = {frozenset(other) for other in sets if abs(losses[other] - losses[chosen]) < SAME}
        assert {frozenset(item) for item in equal_scales(chosen, factor, where, config)} == same, chosen


@pytest.mark.parametrize(
    ("parts", "where", "equal"),
    [
        ((POST,), 1, {(GATE, UP), (GATE, DOWN)}),
        ((HEAD_NORMS[0],), None, {(HEAD_NORMS[1],)}),
        ((VALUE,), None, {(OUT,), (LAYER_NORMS[0], "hidden_norm")}),
        ((VALUE,), 0, {(OUT,)}),
        ((OUT, DOWN), None, {(EMBEDDING,), (VALUE, UP), (VALUE, DOWN), (OUT, UP)}),
        ((GATE,), None, set()),
    ],
)
def test_equal_scales(parts: tuple[str, ...], where: Where, equal: set[Any]) -> None:
    found = equal_scales(parts, 0.25, where, bundled_draft().config)
    assert set(found) == {parts, *equal}


def test_a_scale_names_its_equals_and_they_have_one_cause() -> None:
    config = bundled_draft().config
    ways = [scaled_parts(config, parts, 0.25, 1) for parts in ((POST,), (GATE, UP), (GATE, DOWN))]
    assert len({item.cause for item in ways}) == 1
    for item in ways:
        assert {item.name, *item.equal} == {other.name for other in ways}
        assert all(part.rpartition(".")[2] in item.cause for part in (POST, GATE, UP, DOWN))


def test_other_readers_of_a_value_end_an_equality() -> None:
    """The kernels of DFlash 2 read the rows behind layer norms, and a norm scales no bias."""
    assert equal_names((POST,), 2.0, None, bundled_draft("tiny:dflash2").config) == ()
    biased = replace(bundled_draft().config, attention_bias=True)
    assert equal_names((VALUE,), 2.0, None, biased) == ()
    assert equal_names((LOGITS,), 2.0, None, bundled_draft("tiny:dspark").config) == ("norm times 2",)
    assert equal_names((LOGITS,), 2.0, None, bundled_draft("tiny:dflash2").config) == ()
