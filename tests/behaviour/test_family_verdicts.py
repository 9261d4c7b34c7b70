"""Our verdicts on DFlash 2 and DSpark drafts equal what the engines' own code makes of their configs.

tests/golden/family_verdicts.py recorded what each engine loads, or the error by which it stops. Of the oldest release
of vLLM that serves a family only the cases are recorded in which it differs from the newest one.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import EngineReading
from dflash_cli.engines.serving_engine import ServingEngine
from dflash_cli.rules.subject import Subject
from dflash_cli.rules.validator import validate_subject
from dflash_testing import family_cases
from dflash_testing.family_cases import FamilyCase
from dflash_testing.paths import GOLDEN
from dflash_testing.verdict_cases import NEWEST, open_case, plain, write_target

RECORDED: dict[str, Any] = json.loads((GOLDEN / "family_verdicts.json").read_text(encoding="utf-8"))
CASES = family_cases.all_cases()
ENGINES = {"z-lab 0.1.0": "transformers", "sglang 0.5.23": "sglang", NEWEST: "vllm@0.33"}
OLDEST = {"vllm 0.25.0": "vllm@0.25", "vllm 0.28.0": "vllm@0.28", "vllm 0.29.0": "vllm@0.29"}
"""The oldest release that serves DSpark, DFlash 2, and DFlash 2 in the speculators dialect."""
FIELDS = (
    "taps", "block_size", "mask_token_id", "windows", "causal", "rope", "eps", "neox", "value_scale", "logit_scale",
    "output_multiplier", "final_logit_softcapping", "input_embedding_scale", "conv_kernel_size", "conv_group_size",
    "selector_rank", "selector_top_k", "markov_rank", "markov_head_type", "dspark_draft_topk",
)  # fmt: skip
STOPS_LATER = {
    f"{dialect}selector_top_k={value}"
    for dialect in ("dflash2: dflash_config.", "dflash2-speculators: ")
    for value in (0, -1)
} | {
    "dspark: dspark_draft_topk=3.0", "dspark: dspark_draft_topk=true", "dspark: logit_scale=null",
    'dspark: logit_scale="x"', "dflash2: dflash_config.output_multiplier=0",
    "dflash2: dflash_config.output_multiplier=-1",
}  # fmt: skip
"""The cases in which vLLM loads the draft, and its first step stops, which the recordings do not reach."""
OTHER_KIND = {
    'dflash2: dflash_config.projector_type="domino"', 'dspark: architectures=["Gemma4DSparkModel"]',
    'dflash2: architectures=["DFlash2BeamDraftModel"]',
    *(f"{dialect}: speculators_model_type={value}" for value in ("null", '"nonsense"', '"dflash"')
      for dialect in ("dflash2-speculators", "dspark-speculators")),
}  # fmt: skip
"""The config does not say that the draft is of the family, or says that it has other layers."""
SAMPLED = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's config and the header of its embedding."""
    return write_target(tmp_path_factory.mktemp("pair") / "target")


def is_read(case: FamilyCase, reader: str) -> bool:
    """Whether the engine was asked."""
    if reader.startswith("vllm"):
        return True
    return not case.is_speculators and (reader.startswith("sglang") or case.family == "dflash2")


def expected(case: FamilyCase, reader: str) -> Mapping[str, Any]:
    """The recording of a case by one engine: its values, or `stops`. An older release may lack it."""
    entry = next(RECORDED[item] for item in (reader, NEWEST) if case.name in RECORDED[item]["cases"])
    found: dict[str, Any] = entry["cases"][case.name]
    is_new = "topk" not in case.name or reader != "vllm 0.25.0"
    if reader.startswith("vllm") and case.name in STOPS_LATER and is_new:
        return {"stops": ""}
    return found if "stops" in found else {**entry["plain"][case.family], **found}


def compared(
    names: list[str], target: Path, readers: Mapping[str, str]
) -> Iterator[tuple[FamilyCase, Subject, Any, Any]]:
    """Each case with each engine, and the engine's recording."""
    for name in (name for name in names if name not in OTHER_KIND):
        case = CASES[name]
        for reader, text in readers.items():
            if is_read(case, reader):
                subject = open_case(case, target, text)
                (engine,) = subject.plan.engines
                yield case, subject, engine, expected(case, reader)


def read_field(reading: EngineReading, field: str) -> Any:
    """Our value of a field."""
    return reading.own[field] if field in reading.own else getattr(reading, field, None)


def difference(case: FamilyCase, subject: Subject, engine: ServingEngine, found: Mapping[str, Any]) -> str:
    """How our reading and our verdict differ from a recording; empty if they do not."""
    reading = engine.read_config(subject)
    if reading is not None and isinstance(reading, EngineStops) != ("stops" in found):
        return f"reading {reading}"
    if isinstance(reading, EngineReading):
        read = {field: plain(read_field(reading, field)) for field in FIELDS if field in found}
        wrong = {field: (value, found[field]) for field, value in read.items() if value != found[field]}
        if wrong:
            return f"values {wrong}"
    verdict = next(item for item in validate_subject(subject).verdicts if item.name == engine.name)
    if (verdict.outcome == "stops") != ("stops" in found):
        return f"verdict {verdict}"
    if "sample_from_anchor" in found and engine.served_layout(subject) is not found["sample_from_anchor"]:
        return f"layout {engine.served_layout(subject)}"
    wrong = meant_otherwise(subject, found) if verdict.outcome == "serves" else {}
    return f"serves {wrong}" if wrong else ""


def meant_otherwise(subject: Subject, found: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> the meaning of the config and the engine's value, where they differ."""
    if subject.parsed is None:
        return {}
    config, is_known = subject.parsed.config, not subject.parsed.has_unknown_layout
    meant: dict[str, Any] = {
        "taps": list(config.target_layer_ids), "mask_token_id": config.mask_token_id, "eps": config.rms_norm_eps,
        "output_multiplier": config.output_multiplier, "input_embedding_scale": config.input_embedding_scale,
        **({"logit_scale": config.logit_scale} if config.family == "dspark" else {}),
        "final_logit_softcapping": config.final_logit_softcapping,
        **({"windows": list(config.windows)} if subject.stated.states_kinds else {}),
        **({"causal": list(config.causal)} if subject.stated.states_causality else {}),
        **({"sample_from_anchor": config.sample_from_anchor} if is_known else {}),
    }  # fmt: skip
    if config.convolution is not None and config.selector is not None:
        meant |= {"conv_kernel_size": config.convolution.kernel_size, "selector_top_k": config.selector.top_k}
        meant |= {"conv_group_size": config.convolution.group_size, "selector_rank": config.selector.rank}
    if config.markov is not None:
        meant |= {"markov_rank": config.markov.rank, "markov_head_type": config.markov.head_type}
        meant |= {"dspark_draft_topk": config.markov.top_k}
    return {key: (value, found[key]) for key, value in meant.items() if key in found and found[key] != value}


@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.slow)])
def test_each_verdict_is_the_engines_own(step: int, target: Path) -> None:
    """The value of every field, the layout, and the verdict, for each engine."""
    for case, subject, engine, found in compared(list(CASES)[::step], target, ENGINES):
        assert not difference(case, subject, engine, found), (str(engine), case.name, found)


@pytest.mark.parametrize("step", [SAMPLED, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", OLDEST)
def test_each_verdict_on_the_oldest_release_is_its_own(reader: str, step: int, target: Path) -> None:
    """The cases in which the release differs from the newest one."""
    names = list(RECORDED[reader]["cases"])[::step]
    for case, subject, engine, found in compared(names, target, {reader: OLDEST[reader]}):
        assert not difference(case, subject, engine, found), (str(engine), case.name, found)


@pytest.mark.parametrize("key", ["projector_type", "target_layer_ids", "markov_rank", "selector_rank", "block_size"])
@pytest.mark.parametrize("value", [[], {}, [None], 10**12, float("inf"), "x"], ids=repr)
def test_no_value_ends_a_reader_with_an_exception(key: str, value: Any, target: Path) -> None:
    for base in ("dflash2", "dspark"):
        case = FamilyCase(base=base, changes={f"dflash_config.{key}": value})
        subject = open_case(case, target, ",".join(ENGINES.values()))
        assert {item.name for item in validate_subject(subject).verdicts} == {"transformers", "sglang", "vllm"}


def test_every_case_is_recorded() -> None:
    for reader in ENGINES:
        assert RECORDED[reader]["cases"].keys() == {name for name, case in CASES.items() if is_read(case, reader)}
    for family in ("dflash2", "dspark"):
        assert sum(case.family == family for case in CASES.values()) >= 100
