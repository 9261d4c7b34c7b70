"""Our verdicts equal what the engines' own code makes of configs with absent, null, mistyped and contradictory keys.

tests/golden/engine_verdicts.py recorded what each engine loads, or the error by which it stops. For a release of vLLM
before 0.33 only the cases are recorded in which it differs from 0.33.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.engines.engine_reading import EngineReading
from dflash_cli.engines.serving_engine import ServingEngine
from dflash_cli.rules.subject import Subject
from dflash_cli.rules.validator import validate_subject
from dflash_testing import config_cases
from dflash_testing.config_cases import ConfigCase
from dflash_testing.paths import GOLDEN
from dflash_testing.verdict_cases import NEWEST, open_case, plain, write_target

RECORDED: dict[str, Any] = json.loads((GOLDEN / "engine_verdicts.json").read_text(encoding="utf-8"))
CASES = config_cases.all_cases()
ENGINES = {
    "z-lab 0.1.0": "transformers", "sglang 0.5.23": "sglang", NEWEST: "vllm@0.33", "llama.cpp": "llama.cpp",
}  # fmt: skip
OLDER = {f"vllm 0.{minor}.0": f"vllm@0.{minor}" for minor in range(24, 33)}
FIELDS = (
    "taps", "block_size", "mask_token_id", "windows", "causal", "rope", "eps", "neox", "gemma_norms", "sinks",
    "value_scale", "logit_scale", "output_multiplier", "final_logit_softcapping", "cut", "padded",
)  # fmt: skip
STOPS_LATER = {
    "vllm": {
        "speculators: transformer_layer_config.rms_norm_eps=null", "full: logit_scale=null", 'full: logit_scale="1"',
    },
    "sglang": {"full: num_attention_heads=3"},
}  # fmt: skip
"""Engine -> the cases in which it loads, and its first step stops, which the recordings do not reach.

SGLang's attention kernels need as many query heads for each key head.
"""
OTHER_KIND = {
    f"speculators: speculators_model_type={value}" for value in ("absent", "null", '"eagle3"', '"nonsense"')
} | {name for name in CASES if "thresh_head_direct_len=true" in name}
"""The config does not say that the draft is DFlash, or says that it is AdaFlash, so it is not judged as DFlash."""
NOT_MODELLED = {"sglang": {'sliding: model_type="qwen3_next"', 'mixed: model_type="qwen3_next"'}}
"""Engine -> the cases whose config class dflash does not model. SGLang's own class of this type has no windows."""
OLD_TEXTS = frozenset(OLDER.values())
SAMPLED = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's config and the header of its embedding."""
    return write_target(tmp_path_factory.mktemp("pair") / "target")


def expected(name: str, reader: str) -> Mapping[str, Any]:
    """The recording of a case by one engine: its values, or `stops`. An older release may lack it."""
    entry = next(RECORDED[item] for item in (reader, NEWEST) if name in RECORDED[item]["cases"])
    found = entry["cases"][name]
    if "stops" in found or name in STOPS_LATER.get(reader.partition(" ")[0], ()):
        return {"stops": ""}
    return {**entry["plain"], **found}


def is_asked(case: ConfigCase, reader: str) -> bool:
    """Whether the engine loaded the case."""
    return case.is_read_by_llama if reader == "llama.cpp" else reader not in OLDER or case not in config_cases.LATER


def judged(names: list[str], target: Path, readers: Mapping[str, str]) -> Iterator[tuple[str, Subject, str, Any]]:
    """Each case with the name of each reader, and the reader's engine. All readers share an open case."""
    engines = {reader: parse_engines(text)[0] for reader, text in readers.items()}
    for name in names:
        subject = open_case(CASES[name], target, ",".join(text for text in readers.values() if text not in OLD_TEXTS))
        for reader, engine in engines.items():
            if is_asked(CASES[name], reader):
                yield name, subject, reader, engine


@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.slow)])
def test_each_reading_is_the_engines_own(step: int, target: Path) -> None:
    """The value of every field, or a stop, for each engine and each release.

    By default an older release reads the cases in which it differs from the newest one, and a sample of the others.
    """
    names = [name for name in CASES if not CASES[name].tensor and name not in OTHER_KIND]
    sampled = set(names[::step])
    older = [name for name in names if name in sampled or any(name in RECORDED[reader]["cases"] for reader in OLDER)]
    for name, subject, reader, engine in chain(judged(names, target, ENGINES), judged(older, target, OLDER)):
        reading, found = engine.read_config(subject), expected(name, reader)
        if reading is None:  # the config's class is not modelled
            continue
        assert isinstance(reading, EngineStops) == ("stops" in found), (engine, name, reading, found)
        if isinstance(reading, EngineReading):
            is_late = engine.name == "llama.cpp" and reading.block_size is None  # S26 reports the block
            fields = [field for field in FIELDS if field in found and not (is_late and field == "block_size")]
            read = {field: plain(getattr(reading, field)) for field in fields}
            wanted = {field: found[field] for field in read}
            assert read == {**wanted, **({"neox": bool(found["neox"])} if "neox" in read else {})}, (engine, name)


def check_verdict(name: str, subject: Subject, engine: ServingEngine, found: Mapping[str, Any]) -> None:
    """`stops` where the engine stops. `serves` only where the engine reads what the config means."""
    verdict = next(item for item in validate_subject(subject).verdicts if item.name == engine.name)
    assert (verdict.outcome == "stops") == ("stops" in found), (engine, name, verdict, found)
    if name in NOT_MODELLED.get(engine.name, ()):
        return
    assert not found.get("cut") or verdict.outcome == "drops", (engine, name, verdict, found)
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


@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.slow)])
def test_each_verdict_is_the_engines_own(step: int, target: Path) -> None:
    names = [name for name in CASES if name not in OTHER_KIND]
    chosen = [name for at, name in enumerate(names) if at % step == 0 or CASES[name].tensor]
    for name, subject, reader, engine in judged(chosen, target, ENGINES):
        check_verdict(name, subject, engine, expected(name, reader))


@pytest.mark.parametrize("step", [SAMPLED // 2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", OLDER)
def test_each_verdict_on_an_older_release_is_its_own(reader: str, step: int, target: Path) -> None:
    """The cases in which the release differs from the newest one."""
    names = [name for name in RECORDED[reader]["cases"] if name not in OTHER_KIND]
    chosen = [name for at, name in enumerate(names) if at % step == 0 or CASES[name].tensor]
    for name in chosen:
        subject = open_case(CASES[name], target, OLDER[reader])
        engine = subject.plan.engines[0]
        assert isinstance(engine, ServingEngine)
        check_verdict(name, subject, engine, expected(name, reader))


def test_every_case_is_recorded() -> None:
    assert len(CASES) >= 1000
    for reader in ENGINES:
        names = {name for name, case in CASES.items() if is_asked(case, reader)}
        assert RECORDED[reader]["cases"].keys() == names, reader
    for reader in OLDER:
        assert RECORDED[reader]["cases"].keys() <= CASES.keys(), reader
        assert RECORDED[reader]["plain"] == RECORDED[NEWEST]["plain"], reader


def test_windows_that_follow_from_other_keys_are_read_as_transformers_fills_them_in(target: Path) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    subject = open_case(ConfigCase(base="bare", changes=changes), target, "vllm")
    assert subject.parsed is not None
    assert subject.parsed.config.windows == (16, 16)
    assert subject.parsed.config.causal == (True, True)
    assert validate_subject(subject).verdicts[0].causal == (True, True)


@pytest.mark.parametrize("engine", ["vllm@0.33", "sglang"])
def test_a_tensor_that_an_engine_cuts_lowers_acceptance(engine: str, target: Path) -> None:
    """A size below the stored one: the engine loads the first rows and columns without a message."""
    case = ConfigCase(base="full", changes={"num_attention_heads": 2})
    report = validate_subject(open_case(case, target, engine))
    assert report.verdicts[0].outcome == "drops"
    assert any(item.id == "S33" and "_proj" in item.location for item in report.findings)


@pytest.mark.parametrize(
    ("case", "outcome", "severity"),
    [
        (ConfigCase(base="full", changes={"intermediate_size": 128}), "serves", "warning"),
        (ConfigCase(base="full", tensor="layers.0.mlp.up_proj.weight", shape=(64, 64)), "drops", "error"),
        (ConfigCase(base="full", tensor="layers.0.self_attn.o_proj.weight", shape=(64, 96)), "drops", "error"),
    ],
    ids=str,
)
def test_zeros_that_sglang_adds_are_harmless_in_a_whole_mlp_only(
    case: ConfigCase, outcome: str, severity: str, target: Path
) -> None:
    """Zeros in gate, up and down cancel out. Zeros in one of them, or in o, replace inputs of the other ones."""
    report = validate_subject(open_case(case, target, "sglang"))
    assert report.verdicts[0].outcome == outcome
    assert {item.severity for item in report.findings if item.id == "S33"} == {severity}


def test_a_stray_tensor_of_a_relative_does_not_change_the_kind_of_a_draft(target: Path) -> None:
    report = validate_subject(open_case(CASES["full: mask_hidden"], target, "vllm@0.33,sglang"))
    assert [item.outcome for item in report.verdicts] == ["stops", "serves"]


@pytest.mark.parametrize(("base", "key"), [("full", ""), ("speculators", config_cases.BODY)])
def test_a_huge_number_of_layers_stops_every_engine(base: str, key: str, target: Path) -> None:
    """No engine's reading lists the layers first."""
    subject = open_case(ConfigCase(base=base, changes={f"{key}num_hidden_layers": 10**12}), target, "")
    for text in (*ENGINES.values(), *OLDER.values()):
        (engine,) = parse_engines(text)
        assert not isinstance(engine.read_config(subject), EngineReading), text


def test_llama_counts_the_layers_of_the_draft_and_not_of_the_list(target: Path) -> None:
    subject = open_case(ConfigCase(base="full", changes={"layer_types": [config_cases.FULL] * 5}), target, "llama.cpp")
    assert validate_subject(subject).verdicts[0].causal == (False, False)
