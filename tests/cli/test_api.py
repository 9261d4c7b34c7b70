"""The Python surface: its names, that importing it costs nothing, and that each function does what its command does."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import dflash_cli
from dflash_cli.acceptance.prompt_options import PromptOptions
from dflash_cli.commands.bench import bench
from dflash_cli.commands.convert import convert
from dflash_cli.commands.eval_acceptance import eval_acceptance
from dflash_cli.commands.generate import generate
from dflash_cli.commands.probe import probe
from dflash_cli.commands.tune import tune
from dflash_cli.commands.validate import validate
from dflash_cli.handoff.disaggregation_options import DisaggregationOptions
from dflash_cli.terminal.options import EngineOptions, SamplingOptions
from dflash_cli.terminal.parameters import Typed
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.scheduling.request import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT

NAMES = {
    "LLM", "SamplingParams", "__version__", "convert_draft", "evaluate", "load_pair", "measure_speed", "open_draft",
    "open_target", "probe_server", "tune", "validate_draft",
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


RENDERED = "(what a function returns is not printed or written: each result has to_json)"
CALLERS = "(the caller's: torch.set_num_threads)"
OPENED = "(of open_draft, open_target)"
LOCKED = "(dflash_cli.checkpoints.lock: read_lock, then check)"
COUNTERPARTS: dict[Callable[..., Any], tuple[Callable[..., Any], dict[str, str]]] = {
    validate: (
        dflash_cli.validate_draft,
        {
            "engine": "engines",
            "ignore": "ignored",
            "kv_transfer": "(dflash_cli.handoff.two_servers.transfer_report)",
            "lock": LOCKED,
            "strict": "(of Report.fails)",
            "fix_out": "(dflash_cli.rules.repair writes files, as convert_draft does)",
            "force": "(of fix_out)",
        },
    ),
    convert: (
        dflash_cli.convert_draft,
        {"dry_run": "(of plan_conversion)", "max_shard_size": "max_shard_bytes"},
    ),
    eval_acceptance: (
        dflash_cli.evaluate,
        {
            "max_new_tokens": "params",
            "rows_file": "journal",
            "bootstrap": "num_resamples",
            "min_acceptance": "(a comparison with Evaluation.total)",
            "gate": "(a comparison with Evaluation.total)",
            "lock": LOCKED,
            "report": "(of dflash_cli.acceptance.acceptance_report.to_markdown)",
            "allow_failed": "(Evaluation.failures)",
            "show_all": RENDERED,
            "trace": RENDERED,
            "force": "(of the command's outputs)",
        },
    ),
    bench: (
        dflash_cli.measure_speed,
        {"rounds": "num_rounds", "min_speedup": "(a comparison with BatchSpeed.speedup)"},
    ),
    tune: (
        dflash_cli.tune,
        {
            "max_new_tokens": "params",
            "batch_sizes": "batches",
            "rounds": "num_rounds",
            "what_if": "what_ifs",
            "bootstrap": "num_resamples",
            "engines": "(of dflash_cli.tuning.tuned_engines)",
            "force": "(of the command's outputs)",
        },
    ),
    probe: (
        dflash_cli.probe_server,
        {
            "rows_file": "journal",
            "min_acceptance": "(a comparison with ServerRun.total)",
            "gate": "(a comparison with ServerRun.total)",
            "allow_failed": "(ServerRun.failures)",
        },
    ),
    generate: (
        dflash_cli.LLM.generate,
        {
            "prompt": "prompts",
            "dataset": "(LLM takes token ids)",
            "dataset_format": "(LLM takes token ids)",
            "max_new_tokens": "params",
            "draft": OPENED,
            "target": OPENED,
            "causality": OPENED,
            "chat": "(LLM takes token ids)",
            "chat_template_kwargs": "(LLM takes token ids)",
            "adaptive_width": "(of EngineConfig)",
            "trace": "(RequestOutput.drafts)",
            "check_lossless": "(of LLM)",
            "output": RENDERED,
            "force": "(of output)",
        },
    ),
}
"""Command -> its function, and under which name that takes an option, or in brackets where it is instead."""


def options_of(command: Callable[..., Any]) -> Iterator[str]:
    """The parameters of a command but for groups of them, whose fields are those of a config, and what was typed."""
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if not is_dataclass(parameter.annotation) and parameter.annotation is not Typed:
            yield name


@pytest.mark.parametrize("command", COUNTERPARTS, ids=lambda command: command.__name__)
def test_every_option_has_a_counterpart(command: Callable[..., Any]) -> None:
    function, names = COUNTERPARTS[command]
    taken = inspect.signature(function).parameters.keys()
    general = {"threads": CALLERS, "as_json": RENDERED}
    missing = {
        name
        for name in options_of(command)
        if (counterpart := {name: name, **general, **names}[name]) not in taken and not counterpart.startswith("(")
    }
    assert not missing


@pytest.mark.parametrize("options", [PromptOptions, DisaggregationOptions])
def test_evaluating_takes_the_options_about_prompts_and_hand_offs(options: type[Any]) -> None:
    assert {item.name for item in fields(options)} <= inspect.signature(dflash_cli.evaluate).parameters.keys()


@pytest.mark.parametrize(
    ("options", "config"),
    [(EngineOptions, EngineConfig), (SamplingOptions, SamplingParams)],
    ids=["engine", "sampling"],
)
def test_groups_of_options_are_those_of_a_config(options: type[Any], config: type[Any]) -> None:
    other_names = {
        "num_speculative_tokens": "num_draft_tokens", "kv_memory": "kv_memory_bytes", "stop_token_id": "stop_token_ids"
    }  # fmt: skip
    named = {other_names.get(item.name, item.name) for item in fields(options)}
    assert named <= {item.name for item in fields(config)}


def test_validating_takes_what_the_command_takes(tmp_path: Path) -> None:
    found = dflash_cli.validate_draft("tiny", engines=["vllm"], num_speculative_tokens=9).findings
    assert "S02" in {item.id for item in found}
    ignoring = dflash_cli.validate_draft("tiny", engines=["vllm"], num_speculative_tokens=9, ignored=["s02"])
    assert "S02" not in {item.id for item in ignoring.findings}
    with pytest.raises(UsageError, match="no rule X99"):
        dflash_cli.validate_draft("tiny", ignored=["X99"])


def test_the_run_level_runs_the_target_as_it_is_told(tmp_path: Path) -> None:
    draft, target = support.make_native(tmp_path / "draft"), support.make_target(tmp_path / "t", model_type="olmo2")
    with pytest.raises(UnsupportedError, match="does not run olmo2 targets: it runs llama"):
        dflash_cli.validate_draft(draft, target, level="run", prompts=[[5, 6]] * 4, target_runtime="native")


def test_a_draft_that_would_be_misread_is_not_run(tmp_path: Path) -> None:
    """As an opened draft is handed to `LLM`, whose config has no place for what it would be refused by."""
    draft, target = support.make_native(tmp_path / "draft", is_neox_style=False), support.make_target(tmp_path / "t")
    with pytest.raises(UnsupportedError, match="is_neox_style is false, which this runtime does not compute"):
        dflash_cli.LLM(dflash_cli.open_target(target), dflash_cli.open_draft(draft))


def test_speed_is_measured() -> None:
    (speed,) = dflash_cli.measure_speed("tiny", prompts=[[5, 6, 7]], batches=[1], num_rounds=1, max_new_tokens=40)
    assert (speed.batch, speed.speedup > 0) == (1, True)
    with pytest.raises(UsageError, match="nothing to compare"):
        dflash_cli.measure_speed("tiny", config=EngineConfig(num_draft_tokens=0))
    with pytest.raises(UsageError, match="expected numbers of requests"):
        dflash_cli.measure_speed("tiny", batches=[])


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
    journal = tmp_path / "answers.jsonl"
    by_value = dflash_cli.evaluate(
        "tiny", "tiny", prompts=["def f(", [5, 6, 7]], params=params, num_resamples=0, journal=journal
    )
    assert by_value.total.interval is None
    assert len(journal.read_text().splitlines()) >= 2
    assert by_file.total.counts == by_value.total.counts
    assert by_file.total.num_requests == 2


def test_acceptance_is_measured_on_whole_blocks_whatever_the_config_says(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(device="cpu", adaptive_width=True)
    found = dflash_cli.evaluate("tiny", prompts=["def f("], params=SamplingParams(max_new_tokens=8), config=config)
    assert found.measured["adaptive_width"] is False
    assert not found.total.counts.is_capped
    assert "adaptive width" not in caplog.text  # it was not even tried
