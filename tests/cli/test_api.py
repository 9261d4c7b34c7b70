"""The Python surface: its names, that importing it costs nothing, and that each function does what its command does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_cli
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.scheduling.request import SamplingParams
from dflash_testing.paths import ROOT

NAMES = {
    "LLM", "SamplingParams", "__version__", "convert_draft", "evaluate", "load_pair", "open_draft", "open_target",
    "validate_draft",
}  # fmt: skip


def test_the_names_are_these() -> None:
    assert set(dflash_cli.__all__) == NAMES == set(dir(dflash_cli))


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_every_name_can_be_imported_and_is_documented(name: str) -> None:
    assert getattr(dflash_cli, name).__doc__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'open_drafts'"):
        dflash_cli.open_drafts  # noqa: B018


def test_importing_it_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import dflash_cli\n"
        "print(' '.join(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "runtime", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert not {"torch", "typer", "rich", "transformers", "numpy", "dflash_runtime"} & set(done.stdout.split())


def test_a_draft_is_validated() -> None:
    report = dflash_cli.validate_draft("tiny", engines=["vllm@0.33", "sglang"])
    assert not report.fails()
    assert len(report.verdicts) == 2
    with pytest.raises(UsageError):
        dflash_cli.validate_draft("tiny", engines=["no-such-engine"])


def test_a_draft_is_converted(tmp_path: Path) -> None:
    manifest = dflash_cli.convert_draft("tiny", tmp_path / "out", to="speculators", verifier="org/name")
    assert manifest["destination_dialect"] == "speculators"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["speculators_model_type"] == "dflash"
    assert dflash_cli.open_draft(tmp_path / "out").config == dflash_cli.open_draft(str(tmp_path / "out")).config
    with pytest.raises(UsageError):
        dflash_cli.convert_draft("tiny", tmp_path / "out", to="native")


def test_a_pair_is_measured_on_texts_ids_or_a_file(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f("}\n{"prompt_token_ids": [5, 6, 7]}\n')
    params = SamplingParams(max_new_tokens=16)
    by_file = dflash_cli.evaluate("tiny", prompts=prompts, params=params)
    by_value = dflash_cli.evaluate("tiny", "tiny", prompts=["def f(", [5, 6, 7]], params=params)
    assert by_file.total.counts == by_value.total.counts
    assert by_file.total.num_requests == 2


def test_acceptance_is_measured_on_whole_blocks_whatever_the_config_says(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(device="cpu", adaptive_width=True)
    found = dflash_cli.evaluate("tiny", prompts=["def f("], params=SamplingParams(max_new_tokens=8), config=config)
    assert found.measured["adaptive_width"] is False
    assert not found.total.counts.is_capped
    assert "adaptive width" not in caplog.text  # it was not even tried
