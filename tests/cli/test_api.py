"""The Python interface: its names, the cost of its import, and the same results as the commands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dflash_cli
from dflash_cli.terminal import console
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses
from dflash_testing.searches import shorten_search


@pytest.mark.parametrize("name", sorted(set(dflash_cli.__all__) - {"__version__"}))
def test_every_name_can_be_imported_and_is_documented(name: str) -> None:
    assert getattr(dflash_cli, name).__doc__
    assert name in dir(dflash_cli)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
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


def test_validating_takes_what_the_command_takes() -> None:
    found = dflash_cli.validate(draft="tiny", engine=["vllm"], num_speculative_tokens=9).findings  # type: ignore[call-overload]
    assert "S02" in {item.id for item in found}
    ignoring = dflash_cli.validate(draft="tiny", engine=("vllm",), num_speculative_tokens=9, ignore=("s02",))
    assert "S02" not in {item.id for item in ignoring.findings}
    with refuses(UsageError, "unknown-rule", field="--ignore", found=["X99"]):
        dflash_cli.validate(draft="tiny", ignore=("X99",))


def test_the_run_level_runs_the_target_with_the_given_code(tmp_path: Path) -> None:
    draft, target = support.make_native(tmp_path / "draft"), support.make_target(tmp_path / "t", model_type="olmo2")
    with pytest.raises(UnsupportedError):
        dflash_cli.validate(
            draft=str(draft), target=str(target), level="run", prompts=[[5, 6]] * 4, target_runtime="native"
        )


def test_a_draft_that_would_be_misread_is_not_run(tmp_path: Path) -> None:
    """`LLM` takes an opened draft. Its config cannot state settings that this runtime does not compute."""
    draft, target = support.make_native(tmp_path / "draft", is_neox_style=False), support.make_target(tmp_path / "t")
    with pytest.raises(UnsupportedError):
        dflash_cli.LLM(dflash_cli.open_target(target), dflash_cli.open_draft(draft))


def test_speed_is_measured() -> None:
    found = dflash_cli.bench(draft="tiny", prompts=[[5, 6, 7]], concurrency=(1,), rounds=1, max_new_tokens=16)
    (speed,) = found.speeds
    assert (speed.batch, speed.speedup > 0) == (1, True)
    assert found.to_json()["num_rounds"] == 1
    with refuses(UsageError, field="--num-speculative-tokens", found=0):
        dflash_cli.bench(draft="tiny", num_speculative_tokens=0)
    with refuses(UsageError, field="--concurrency"):
        dflash_cli.bench(draft="tiny", concurrency=())


def test_a_draft_is_validated() -> None:
    report = dflash_cli.validate(draft="tiny", engine=("vllm@0.33", "sglang"))
    assert not report.fails()
    assert len(report.verdicts) == 2
    with pytest.raises(UsageError):
        dflash_cli.validate(draft="tiny", engine=("no-such-engine",))


def test_a_draft_is_converted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = dflash_cli.convert(source="tiny", destination=out, to="speculators", target_name="org/name")
    assert manifest.destination_dialect == "speculators"
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] == "dflash"
    assert dflash_cli.open_draft(out).config == dflash_cli.open_draft(str(out)).config
    with pytest.raises(UsageError):
        dflash_cli.convert(source="tiny", destination=out, to="native")


def test_a_pair_is_measured_on_texts_ids_or_a_file(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f("}\n{"prompt_token_ids": [5, 6, 7]}\n')
    by_file = dflash_cli.evaluate(draft="tiny", prompts=prompts, max_new_tokens=16)
    output = tmp_path / "answers.jsonl"
    by_value = dflash_cli.evaluate(
        draft="tiny", target="tiny", prompts=["def f(", [5, 6, 7]], max_new_tokens=16, num_resamples=0, output=output
    )
    assert by_value.total.acceptance_len_interval is None
    assert len(output.read_text().splitlines()) >= 2
    assert by_file.total.counts == by_value.total.counts
    assert by_file.total.num_requests == 2


def test_settings_state_every_option_that_decides_the_result() -> None:
    request = dflash_cli.EvaluationRequest(draft="tiny", prompts=["def f("], max_new_tokens=8, top_k=3)
    found = dflash_cli.evaluate(request)
    assert request.settings().keys() <= found.settings.keys()
    assert (found.settings["top_k"], found.settings["max_new_tokens"]) == (3, 8)
    assert found.to_json()["measured"]["adaptive_width"] is False


def test_text_is_generated() -> None:
    found = dflash_cli.generate(prompt=("def f(",), max_new_tokens=8)
    assert len(found.texts) == 1
    assert found.texts[0]
    assert len(repr(found).splitlines()) == 1


def test_every_other_verb_returns_its_result(tmp_path: Path) -> None:
    evaluation = dflash_cli.evaluate(draft="tiny", num_prompts=12, max_new_tokens=16)
    results = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in results:
        path.write_text(console.json_document(evaluation))
    found: dict[str, Any] = {
        "evaluate": evaluation,
        "compare": dflash_cli.compare(results=tuple(results)),
        "report": dflash_cli.report(results=tuple(results), format="md"),
        "card": dflash_cli.card(result=results[0], engine=("none",)),
        "export": dflash_cli.export(result=results[0], to="vllm-rates"),
        "inspect": dflash_cli.inspect(reference="tiny", other="tiny:reduced"),
        "lock": dflash_cli.lock(draft="tiny", output=tmp_path / "dflash.lock"),
        "explain": dflash_cli.explain(rule="C20"),
        "explain all": dflash_cli.explain(),
        "serve_command": dflash_cli.serve_command(draft="tiny", target="tiny", engine=("vllm",)),
        "env": dflash_cli.env(),
    }
    for name, value in found.items():
        assert value is not None, name
        assert len(repr(value).splitlines()) <= 40, name
        assert len(repr(value)) <= 4000, name
        assert value._repr_html_().startswith("<p>"), name
    assert found["card"].text.startswith("---")
    assert "vllm serve" in repr(found["serve_command"])


def test_an_argument_without_its_keyword_is_refused_by_naming_it() -> None:
    with pytest.raises(TypeError, match=re.escape("inspect(reference=...)")):
        dflash_cli.inspect("tiny")  # type: ignore[call-overload]
    with refuses(UsageError, field="--engine", found="vllm") as refused:
        dflash_cli.validate(draft="tiny", engine="vllm")  # type: ignore[call-overload]
    assert refused.value.hint == "in Python: engine=['vllm']"
    with refuses(UsageError, field="--engine") as refused:
        dflash_cli.validate(draft="tiny", engine="vllm, sglang")  # type: ignore[call-overload]
    assert refused.value.hint == "in Python: engine=['vllm', 'sglang']"
    with refuses(UsageError, field="--dtype", found="bf16") as refused:
        dflash_cli.generate(prompts=["x"], dtype="bf16")  # type: ignore[call-overload]
    assert "bfloat16?" in (refused.value.hint or "")


def test_a_pair_is_diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch, "rope")
    found = dflash_cli.diagnose(draft="tiny", num_prompts=4, max_new_tokens=16)
    assert not found.cause.has_cause
    assert found.report.search is not None
