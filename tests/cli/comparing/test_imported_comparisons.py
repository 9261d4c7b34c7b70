"""`dflash compare` on results of other tools: totals, pairs by request, and other definitions."""

import json
from pathlib import Path

import pytest

from dflash_cli.comparing.measured_result import read_result
from dflash_testing.command_line import run_main
from dflash_testing.result_samples import SPECFORGE, VLLM, specdec_bench


def test_totals_are_compared_without_an_interval_and_with_the_reason(tmp_path: Path) -> None:
    better = VLLM | {"spec_decode_acceptance_length": 3.3, "spec_decode_accepted_tokens": 2300}
    for name, content in (("a.json", VLLM), ("b.json", better)):
        (tmp_path / name).write_text(json.dumps(content))
    arguments = "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")
    (found,) = json.loads(run_main(*arguments, "--json").out)["comparisons"]
    assert found["difference"] == pytest.approx(0.2)
    assert (found["interval"], found["verdict"], found["num_conversations"]) == (None, None, 0)
    assert found["reason"] == f"{arguments[1]}: {read_result(tmp_path / 'a.json').why_no_rows}"
    outcome = run_main(*arguments)
    assert outcome.code == 0
    assert "+0.200" in outcome.out
    assert found["reason"] in outcome.out


def test_runs_of_specdec_bench_are_paired_by_request(tmp_path: Path) -> None:
    lengths = [2.0 + 0.3 * (index % 7) for index in range(64)]
    better = [length + 0.2 + 0.01 * (index % 3) for index, length in enumerate(lengths)]
    for name, content in (("a.json", specdec_bench(*lengths)), ("b.json", specdec_bench(*better))):
        (tmp_path / name).write_text(json.dumps(content))
    outcome = run_main("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json")
    (found,) = json.loads(outcome.out)["comparisons"]
    assert (found["is_paired"], found["verdict"]) == (True, "higher")
    assert found["difference"] == pytest.approx(0.21, abs=0.01)


def test_another_definition_gives_a_warning(tmp_path: Path) -> None:
    for name, content in (("a.json", VLLM), ("b.json", SPECFORGE)):
        (tmp_path / name).write_text(json.dumps(content))
    outcome = run_main("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json")
    assert outcome.notices == ("measured-otherwise",)
    (found,) = json.loads(outcome.out)["comparisons"]
    assert found["unlike"]["definition"] == ["vllm", "sglang"]
