"""Our verdicts on drafts that N GPUs share equal what the engines' own code makes of them.

tests/golden/split_verdicts.json recorded for each case whether the engine stops, or loads scales of other blocks.
"""

import json
from pathlib import Path

import pytest

from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.engines.serving_engine import ServingEngine
from dflash_cli.engines.split_model import split_models
from dflash_cli.rules.subject import ValidationPlan, open_subject
from dflash_testing.paths import GOLDEN
from dflash_testing.published_pairs import write_headers
from dflash_testing.split_cases import SplitCase, all_cases

RECORDED: dict[str, dict[str, list[str]]] = json.loads((GOLDEN / "split_verdicts.json").read_text(encoding="utf-8"))
ENGINES = {"vllm 0.33.0": "vllm@0.33", "sglang 0.5.23": "sglang"}
CASES = all_cases()
SAMPLED = 9


def outcome_of(engine: ServingEngine, case: SplitCase, folder: Path) -> str:
    """The worst outcome of the misfits of a draft."""
    draft = folder / f"draft-{len(list(folder.iterdir()))}"
    write_headers(draft, case.config, case.tensors)
    subject = open_subject(ValidationPlan(draft=draft, engines=(engine,), tensor_parallel=case.num_gpus))
    (model,) = split_models(subject)
    outcomes = {item.outcome for item in engine.split_misfits(model, case.num_gpus)}
    return next((outcome for outcome in ("stops", "drops") if outcome in outcomes), "serves")


@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", ENGINES)
def test_each_verdict_is_the_engines_own(reader: str, step: int, tmp_path: Path) -> None:
    (engine,) = parse_engines(ENGINES[reader])
    recorded = {name: key.partition(":")[0] for key, names in RECORDED[reader].items() for name in names}
    assert recorded.keys() == CASES.keys()
    for name in list(CASES)[::step]:
        assert outcome_of(engine, CASES[name], tmp_path) == recorded[name], name
