"""Our verdicts on quantised drafts equal what the engines' own code makes of them.

tests/golden/quantised_verdicts.json recorded for each case whether the engine stops, and which parts of packed weights
it leaves at random values or takes for plain numbers.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.engines.engine_reading import EngineReading
from dflash_cli.engines.serving_engine import ServingEngine
from dflash_cli.rules.subject import Subject, ValidationPlan, open_subject
from dflash_cli.rules.validator import validate_subject
from dflash_testing import quantised_cases
from dflash_testing.paths import GOLDEN
from dflash_testing.published_pairs import write_headers
from dflash_testing.quantised_cases import QuantisedCase

RECORDED: dict[str, Any] = json.loads((GOLDEN / "quantised_verdicts.json").read_text(encoding="utf-8"))
CASES = quantised_cases.all_cases()
ENGINES = {"vllm 0.33.0": "vllm@0.33", "sglang 0.5.23": "sglang", "z-lab 0.1.0": "transformers"}
FAULTS = ("unfilled", "misread", "cut", "padded")
"""Fields of a recording that name parts of packed weights. N01 reports tensors that are missing."""
SAMPLED = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's config and the header of its embedding."""
    path, shape = tmp_path_factory.mktemp("pair") / "target", quantised_cases.SHAPE
    tensors = {"model.embed_tokens.weight": ("BF16", (shape.vocab, shape.hidden))}
    write_headers(path, quantised_cases.TARGET, tensors)
    return path


def open_case(case: QuantisedCase, target: Path, engines: str) -> Subject:
    """The case as a draft beside the target."""
    draft = target.parent / f"draft-{len(list(target.parent.iterdir()))}"
    write_headers(draft, case.config, case.tensors)
    for name, content in case.files.items():
        (draft / name).write_text(json.dumps(content), encoding="utf-8")
    return open_subject(ValidationPlan(draft=draft, target=target, engines=parse_engines(engines)))


def outcome_of(recorded: dict[str, Any]) -> str:
    """The outcome of a recording."""
    if "stops" in recorded:
        return "stops"
    return "drops" if any(map(recorded.get, (*FAULTS, "missing"))) else "serves"


@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", ENGINES)
def test_each_verdict_is_the_engines_own(reader: str, step: int, target: Path) -> None:
    entry = RECORDED[reader]
    for at, (name, kept) in enumerate(entry["cases"].items()):
        if at % step:
            continue
        recorded = kept if "stops" in kept else {**entry["plain"], **kept}
        subject = open_case(CASES[name], target, ENGINES[reader])
        (engine,) = subject.plan.engines
        assert isinstance(engine, ServingEngine)
        verdict = validate_subject(subject).verdicts[0]
        assert verdict.outcome == outcome_of(recorded), (reader, name, verdict, recorded)
        reading = engine.read_config(subject)
        if isinstance(reading, EngineReading):
            assert bool(reading.packed) == any(map(recorded.get, FAULTS)), (reader, name)
        else:
            assert reading is None or isinstance(reading, EngineStops)


def test_every_case_is_recorded() -> None:
    assert len(CASES) >= 200
    assert RECORDED["vllm 0.33.0"]["cases"].keys() == CASES.keys()
    native = {name for name, case in CASES.items() if case.base == "native"}
    assert RECORDED["sglang 0.5.23"]["cases"].keys() == native
    unknown = {name for name in native if CASES[name].is_unknown_to_transformers}
    assert RECORDED["z-lab 0.1.0"]["cases"].keys() == unknown
