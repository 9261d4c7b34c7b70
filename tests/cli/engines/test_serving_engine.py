"""Engines are found through their registry, and no other file depends on an engine's name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.engines.engine_names import known_engines, parse_engines
from dflash_cli.engines.serving_engine import ServedPair, all_engines
from dflash_cli.rules.rule import all_rules
from dflash_runtime.documents import to_json
from dflash_runtime.errors import UsageError
from dflash_testing.pairs import bundled_draft
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses

PRODUCT = ROOT / "dflash_cli"
OTHER_MEANINGS = {
    "acceptance/intervals/statistics.py": "names of definitions of acceptance",
    "comparing/measured_result.py": "names of definitions of acceptance",
    "comparing/importers": "names of formats, and of definitions of acceptance",
    "acceptance/dumps": "names of formats",
    "probing": "names of definitions of acceptance",
    "probing/runs": "names of definitions of acceptance",
    "probing/servers": "names of engines with servers to probe",
    "generation/datasets": "names of projects that turn rows into prompts",
    "terminal/environment.py": "names of Python packages",
    "generation/loaded_pair.py": "names of Python packages",
    "generation/run_facts.py": "names of Python packages",
    "engines/engine_reading.py": "names of Python packages",
    "comparing/result_comparison.py": "names of Python packages",
    "acceptance/acceptance_report.py": "definitions of acceptance",
    "main.py": "names of Python packages",
    "formats/gguf.py": "the engine whose format it is",
    "terminal/options.py": "names of the code that runs a target",
    "commands/tune.py": "engines with settings that are printed by default",
    "formats/draft_kinds": "the engines that serve a kind of draft, so that a kind is one file",
    "commands/card.py": "engines with commands on a card by default",
}
"""Files and folders in which a word that is also an engine's name means something else."""


def literals(file: Path) -> Iterator[str]:
    """Yield the string constants of a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_only_the_files_of_an_engine_depend_on_its_name() -> None:
    names = {engine.name for engine in all_engines()}
    for file in PRODUCT.rglob("*.py"):
        place = file.relative_to(PRODUCT).as_posix()
        foreign = {name for name in names if not place.startswith(f"engines/{re.sub('[.-]', '_', name)}")}
        found = {text for text in literals(file) if text.partition("@")[0] in foreign}
        is_other = not OTHER_MEANINGS.keys().isdisjoint((place, place.rpartition("/")[0]))
        assert not found or is_other, f"{place}: {sorted(found)}"


def test_each_engine_has_releases_in_order_and_a_rule() -> None:
    for engine in all_engines():
        assert engine.name in known_engines()
        assert list(engine.releases) == sorted(engine.releases)
        assert any(engine.name in rule.engines for rule in all_rules())


def test_each_engine_has_a_command() -> None:
    pair = ServedPair(
        draft="org/draft",
        target="org/target",
        max_position_embeddings=bundled_draft().config.max_position_embeddings,
        target_facts=open_target(fetch_directory(TINY, Role.TARGET)).config,
        num_draft_tokens=7,
        flags=frozenset(),
    )
    for engine in all_engines():
        command = engine().serve_command(pair)
        assert command.num_draft_tokens == 7
        assert to_json(command)["commands"] == list(command.commands)
        assert "org/draft" in command.text


def test_release_numbers() -> None:
    assert parse_engines("vllm, sglang@0.5.23")[1].release == (0, 5, 23)
    assert str(parse_engines("vllm")[0]) == "vllm 0.33"
    assert parse_engines("vllm@0.26.1")[0].release == (0, 26, 1)
    assert parse_engines("llama.cpp")[0].release == ()
    assert parse_engines("vLLM==0.30, SGLang") == parse_engines("vllm@0.30,sglang")
    assert parse_engines("vllm:v0.33.0") == parse_engines("vllm==0.33.0.post1+cu129") == parse_engines("vllm@0.33.0")


@pytest.mark.parametrize(
    ("text", "judged"), [("vllm@0.34", "vllm 0.33"), ("vllm@1", "vllm 0.33"), ("sglang@0.5.24", "sglang 0.5.23")]
)
def test_a_newer_release_is_judged_as_the_newest_known_one(
    text: str, judged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning, although a command reads its engines several times."""
    parse_engines.cache_clear()
    assert str(parse_engines(text)[0]) == str(parse_engines(text)[0]) == judged
    assert [(item.levelname, judged in item.getMessage()) for item in caplog.records] == [("WARNING", True)]
    caplog.clear()
    assert str(parse_engines("vllm@0.33.7")[0]) == "vllm 0.33.7"
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "id", "found"),
    [
        ("trtllm", "unknown-engine", "trtllm"),
        ("vllm@0.20", "unknown-release", "vllm@0.20"),
        ("sglang@0.5", "unknown-release", "sglang@0.5"),
        ("llama.cpp@b9000", "unknown-release", "llama.cpp@b9000"),
        ("vllm,vllm", "engine-twice", "vllm"),
    ],
)
def test_unknown_engines_are_refused_with_the_known_engines(text: str, id: str, found: str) -> None:
    with refuses(UsageError, id, field="--engine", found=found, expected=known_engines()):
        parse_engines(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("vlm", "vllm?"), ("vllm-0.33", "vllm?"), ("trtllm", "tensorrt-llm?"), ("hf", "transformers?"), ("exl", "")],
)
def test_a_close_name_is_suggested(text: str, meant: str) -> None:
    with refuses(UsageError, "unknown-engine") as error:
        parse_engines(text)
    assert re.findall(r"[\w.-]+\?", error.value.message) == [meant] * bool(meant)
