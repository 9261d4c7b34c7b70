"""The screen takes the steps of the engine."""

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis.alternatives import AlternativeReading
from dflash_cli.diagnosis.reading_runner import ReadingRunner
from dflash_cli.diagnosis.run_settings import SearchBudget
from dflash_cli.diagnosis.weight_rewrites import order_layers
from dflash_runtime.engine_config import EngineConfig


@pytest.mark.parametrize("name", ["tiny", "tiny:reduced"])
def test_the_screen_accepts_the_same_tokens_as_the_engine(name: str) -> None:
    """In float64, because there batches of other shapes give the same tokens."""
    draft = open_draft(fetch_directory(name, Role.DRAFT))
    budget = SearchBudget(num_prompts=4, max_new_tokens=24)
    config = EngineConfig(device="cpu", dtype="float64")
    runner = ReadingRunner(draft, open_target(fetch_directory(TINY, Role.TARGET)), config, budget, longest=None)
    own = runner.build(AlternativeReading("", "as configured", draft.config))
    outputs = runner.run(own, runner.make_prompts(range(4)))
    screen = runner.screen(outputs, draft.config.target_layer_ids)
    found = screen.walk(own)
    for output, (tokens, steps) in zip(outputs, found, strict=True):
        lengths = output.acceptance_lengths
        assert steps > 2
        assert (tokens, steps) == (sum(lengths[:steps]), steps)
        assert len(lengths) - steps <= draft.config.num_draft_tokens


def test_layers_in_another_order_get_their_own_context() -> None:
    """The reading moves tensors to other names only, after a reading with the same tensors."""
    draft = open_draft(fetch_directory(TINY, Role.DRAFT))
    budget = SearchBudget(num_prompts=4, max_new_tokens=16)
    target = open_target(fetch_directory(TINY, Role.TARGET))
    runner = ReadingRunner(draft, target, EngineConfig(device="cpu"), budget, longest=None)
    own = AlternativeReading("", "as configured", draft.config)
    reversed_layers = AlternativeReading("weights", "reversed", draft.config, rewrite=order_layers((2, 1, 0)))
    outputs = runner.run(runner.build(own), runner.make_prompts(range(4)))
    after, alone = (runner.screen(outputs, draft.config.target_layer_ids) for _ in range(2))
    after.score(runner.build(own), 8)
    assert after.score(runner.build(reversed_layers), 8) == alone.score(runner.build(reversed_layers), 8)
