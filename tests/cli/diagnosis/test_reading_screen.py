"""The screen counts the same accepted tokens as the engine, anchor by anchor."""

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis.alternatives import AlternativeReading
from dflash_cli.diagnosis.reading_runner import ReadingRunner
from dflash_cli.diagnosis.run_settings import SearchBudget
from dflash_runtime.config import EngineConfig


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
    anchors, accepted = [], []
    for index, output in enumerate(outputs):
        position = len(output.prompt_token_ids)
        for length in output.acceptance_lengths:
            if (index, position) in screen._anchors:
                anchors.append((index, position))
                accepted.append(length - 1)
            position += length
    assert len(anchors) > 10
    assert screen._accepted(own, anchors).tolist() == accepted
