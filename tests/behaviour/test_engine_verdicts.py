"""Our verdicts equal what the engines' own code makes of configs with absent, null, mistyped and contradictory keys.

tests/golden/engine_verdicts.py recorded what each engine loads, or the error by which it stops. For a release of vLLM
before 0.33 only the cases are recorded in which it differs from 0.33.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import EngineReading
from dflash_cli.engines.serving_engine import ServingEngine, parse_engines
from dflash_cli.rules.subject import Subject, ValidationPlan, open_subject
from dflash_cli.rules.validator import validate_subject
from dflash_testing import config_cases
from dflash_testing.config_cases import ConfigCase
from dflash_testing.paths import GOLDEN
from dflash_testing.published_pairs import write_headers

RECORDED: dict[str, Any] = json.loads((GOLDEN / "engine_verdicts.json").read_text(encoding="utf-8"))
CASES = config_cases.all_cases()
ENGINES = {
    "z-lab 0.1.0": "transformers", "sglang 0.5.23": "sglang", "vllm 0.33.0": "vllm@0.33", "llama.cpp": "llama.cpp",
}  # fmt: skip
FIELDS = (
    "taps", "block_size", "mask_token_id", "windows", "causal", "rope", "eps", "neox", "gemma_norms", "sinks",
    "value_scale", "logit_scale", "output_multiplier", "final_logit_softcapping",
)  # fmt: skip
STOPS_LATER = {
    "vllm": {"full: intermediate_size=0", "full: num_attention_heads=0"},
    "llama.cpp": {
        "full: dflash_config.mask_token_id=64", 'sliding: layer_types=["sliding_attention"]',
        'mixed: layer_types=["sliding_attention"]',
    },
}  # fmt: skip
"""Engine -> the cases in which it loads, and its first step stops, which the recordings do not reach."""
OTHER_KIND = {"full: mask_hidden"}
"""The tensor is P-EAGLE's, so the draft is not judged as DFlash."""
SAMPLED = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's config and the header of its embedding."""
    path = tmp_path_factory.mktemp("pair") / "target"
    shape = config_cases.SHAPE
    write_headers(path, config_cases.TARGET, {"model.embed_tokens.weight": ("F32", (shape.vocab, shape.hidden))})
    return path


def open_case(case: ConfigCase, target: Path, engines: str) -> Subject:
    """The case as a draft with headers and without weights."""
    draft = target.parent / f"draft-{len(list(target.parent.iterdir()))}"
    write_headers(draft, case.config, {name: ("F32", shape) for name, shape in case.shapes.items()})
    return open_subject(ValidationPlan(draft=draft, target=target, engines=parse_engines(engines)))


def expected(name: str, engine: ServingEngine) -> Mapping[str, Any]:
    """The recording of a case by one engine: its values, or `stops`."""
    reader = next(key for key, text in ENGINES.items() if parse_engines(text) == (engine,))
    found = RECORDED[reader]["cases"][name]
    return (
        {"stops": ""}
        if name in STOPS_LATER.get(engine.name, ())
        else found
        if "stops" in found
        else {**RECORDED[reader]["plain"], **found}
    )


def plain(value: Any) -> Any:
    """A value in which tuples are lists, as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def judged(names: list[str], target: Path) -> Iterator[tuple[str, Subject, ServingEngine, Mapping[str, Any]]]:
    for name in names:
        subject = open_case(CASES[name], target, ",".join(ENGINES.values()))
        for engine in subject.plan.engines:
            assert isinstance(engine, ServingEngine)
            if engine.name == "llama.cpp" and not CASES[name].is_read_by_llama:
                continue
            yield name, subject, engine, expected(name, engine)


def test_each_reading_is_the_engines_own(target: Path) -> None:
    """The value of every field, or a stop."""
    for name, subject, engine, found in judged([name for name in CASES if not CASES[name].tensor], target):
        reading = engine.read_config(subject)
        assert isinstance(reading, EngineStops) == ("stops" in found), (engine, name, reading, found)
        if isinstance(reading, EngineReading):
            is_late = engine.name == "llama.cpp" and reading.block_size is None  # S26 reports the block
            fields = [field for field in FIELDS if field in found and not (is_late and field == "block_size")]
            read = {field: plain(getattr(reading, field)) for field in fields}
            wanted = {field: found[field] for field in read}
            assert read == {**wanted, **({"neox": bool(found["neox"])} if "neox" in read else {})}, (engine, name)


@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.slow)])
def test_each_verdict_is_the_engines_own(step: int, target: Path) -> None:
    """`stops` where the engine stops. `serves` only where the engine reads what the config means."""
    names = [name for name in CASES if name not in OTHER_KIND]
    chosen = [name for at, name in enumerate(names) if at % step == 0 or CASES[name].tensor]
    for name, subject, engine, found in judged(chosen, target):
        verdict = next(item for item in validate_subject(subject).verdicts if item.name == engine.name)
        assert (verdict.outcome == "stops") == ("stops" in found), (engine, name, verdict, found)
        if verdict.outcome == "serves" and subject.parsed is not None and subject.stated.states_kinds:
            config = subject.parsed.config
            meant = {
                "windows": list(config.windows), "taps": list(config.target_layer_ids),
                "mask_token_id": config.mask_token_id, "eps": config.rms_norm_eps,
                **({"causal": list(config.causal)} if subject.stated.states_causality else {}),
            }  # fmt: skip
            assert {key: found[key] for key in meant if key in found} == {
                key: value for key, value in meant.items() if key in found
            }, (engine, name)


def test_every_case_is_recorded() -> None:
    assert len(CASES) >= 400
    for reader in ENGINES:
        names = {name for name, case in CASES.items() if reader != "llama.cpp" or case.is_read_by_llama}
        assert RECORDED[reader]["cases"].keys() == names, reader


def test_windows_that_follow_from_other_keys_are_read_as_transformers_fills_them_in(target: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    subject = open_case(ConfigCase(base="bare", changes=changes), target, "vllm")
    assert subject.parsed is not None
    assert subject.parsed.config.windows == (16, 16)
    assert subject.parsed.config.causal == (True, True)
    assert validate_subject(subject).verdicts[0].causal == (True, True)
