"""`dflash tune`: from given step times to advice and settings of engines; resumed runs."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import dflash_cli
from dflash_cli.tuning import tuner
from dflash_cli.tuning.step_costs import StepCosts
from dflash_cli.tuning.tuned_engines import tuned_engines
from dflash_cli.tuning.tuner import STEP_TIMES_FILE
from dflash_runtime.errors import MISSING
from dflash_testing.command_line import Outcome, invoke

TIMES = {
    "plain": {"1": [10.0] * 3, "64": [10.0] * 3},
    "resized": {"3": {"1": [30.0] * 3, "64": [400.0] * 3}, "7": {"1": [8.0, 8.1, 8.2], "64": [500.0] * 3}},
    "lookups": {"ngram": {"7": {"1": [10.0] * 3}}, "suffix": {"7": {"1": [10.0] * 3, "64": [10.0] * 3}}},
    "source": "made",
}
"""At batch 1 the whole block pays. At batch 64 drafting does not pay."""


def tune(folder: Path, *more: object, times: dict[str, Any] = TIMES) -> Outcome:
    file, prompts = folder / "times.json", folder / "prompts.jsonl"
    file.write_text(json.dumps(times))
    rows = [{"prompt_token_ids": [40 + place, 50, 60], "category": "ab"[place % 2]} for place in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["--prompts", prompts, "-n", 8, "--num-resamples", 200, "--device", "cpu"]
    return invoke("tune", "tiny", *small, "--step-times", file, *more)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    outcome = tune(
        tmp_path_factory.mktemp("tune"), "--what-if", "draft=int4,kv=fp8", "--rivals", "ngram,suffix", "--json"
    )
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def test_every_k_of_the_file_is_measured_in_both_ways(document: dict[str, Any]) -> None:
    names = [(item["num_speculative_tokens"], item["way"]) for item in document["candidates"]]
    assert names == [(3, "resized"), (3, "narrowed"), (7, "whole")]
    (way,) = document["ways"]
    lengths = {item["way"]: item["acceptance_len"] for item in document["candidates"]}
    assert way["acceptance_lens"] == pytest.approx([lengths["resized"], lengths["narrowed"]])
    assert way["num_conversations"] == 12
    assert (way["interval"], "12" in way["reason"]) == (None, True)


def test_the_best_k_is_chosen_by_batch_size(document: dict[str, Any]) -> None:
    choices = {item["batch"]: item for item in document["choices"] if item["category"] is None}
    assert (choices[1]["payoff"], choices[64]["payoff"]) == ("pays", "does not pay")
    best, whole = choices[1]["speedups"][0], document["candidates"][-1]
    assert (best["num_speculative_tokens"], best["way"]) == (7, "whole")
    assert best["speedup"] == pytest.approx(whole["acceptance_len"] * 10 / 8.1)
    assert (best["interval"], "12" in best["no_interval"]) == (None, True)
    first, second = document["advice"][:2]
    assert first.startswith("batch 1: K 7 pays, ")
    assert second.startswith("batch 64: drafting does not pay: the best, K 3 resized, is ")
    assert second.endswith("decode plainly")
    categories = {item["category"] for item in document["choices"]}
    assert categories == {None, "a", "b"}


def test_lookups_compete_with_the_draft_and_never_reach_the_settings_of_engines(document: dict[str, Any]) -> None:
    """At batch 64 a drafting step takes 40 plain steps or more, and a step of the lookup takes one."""
    assert [(item["num_speculative_tokens"], item["way"]) for item in document["rivals"]] == [
        (7, "ngram"), (7, "suffix"),
    ]  # fmt: skip
    contests = {item["batch"]: item for item in document["contests"] if item["category"] is None}
    assert contests[64]["speedups"][0]["way"] == "suffix"
    best = contests[64]["speedups"][0]
    assert best["speedup"] == pytest.approx(document["rivals"][1]["acceptance_len"])
    assert {item["way"] for item in contests[1]["speedups"]} == {"whole", "resized", "ngram", "suffix"}
    assert contests[1]["speedups"][0]["way"] == "whole"
    assert {item["way"] for choice in document["choices"] for item in choice["speedups"]} == {"whole", "resized"}
    assert document["advice"][2].startswith("batch 1: K 7 beats ")
    assert document["advice"][3].startswith("batch 64: K 3 resized is slower than suffix without a draft (")
    assert document["step_times"]["lookups"] == TIMES["lookups"]


def test_engines_are_told_a_k_for_each_batch_size_where_they_can_be(document: dict[str, Any]) -> None:
    assert (document["num_speculative_tokens"], document["schedule"]) == (7, [[1, 7, 7], [8, 64, 0]])
    texts = {item["engine"].split()[0]: item["text"] for item in document["engines"]}
    assert texts.keys() == {"vllm", "sglang", "llama.cpp", "tensorrt-llm"}
    words = shlex.split(texts["vllm"])
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 7
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 7, 7], [8, 64, 0]]
    assert texts["sglang"].endswith("--speculative-num-draft-tokens 8")
    assert texts["llama.cpp"].endswith("--spec-draft-n-max 7")
    write = shlex.split(texts["tensorrt-llm"].splitlines()[0])
    settings = yaml.safe_load("\n".join(write[2:-2]))["speculative_config"]
    assert (settings["max_draft_len"], settings["draft_len_schedule"]) == (7, {7: 7, 64: 0})


def test_a_release_without_a_schedule_is_told_one_k() -> None:
    for release, is_told in (("0.27", False), ("0.28", True)):
        (row,) = tuned_engines(f"vllm@{release}", "tiny", "tiny", 3, ((1, 2, 7), (3, 8, 3)))
        assert ("num_speculative_tokens_per_batch_size" in (row.text or "")) == is_told
        assert f'"num_speculative_tokens": {7 if is_told else 3}' in (row.text or "")


def test_a_schedule_with_one_k_is_left_out() -> None:
    rows = tuned_engines("vllm,tensorrt-llm", "tiny", "tiny", 7, ((1, 8, 7),))
    assert not [row for row in rows if "per_batch_size" in str(row.text) or "schedule" in str(row.text)]


def test_what_ifs_are_compared_with_the_unchanged_pair(document: dict[str, Any]) -> None:
    assert [item["what_if"] for item in document["what_ifs"]] == ["draft=int4", "kv=fp8"]
    whole = document["candidates"][-1]["acceptance_len"]
    for item in document["what_ifs"]:
        assert item["acceptance_lens"][0] == pytest.approx(whole)
        assert item["difference"] == pytest.approx(item["acceptance_lens"][1] - whole)
        assert item["verdict"] in ("lower", "higher", "undecided")


def test_text_leads_with_advice_and_fits_80_columns(tmp_path: Path) -> None:
    batches = {str(batch): 10.0 for batch in (1, 2, 4, 8)}
    times = {"plain": batches, "resized": {"1": batches, "7": batches}, "source": "made"}
    outcome = tune(tmp_path, "--engine", "sglang", times=times)
    lines = outcome.out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["batch 1", "batch 2", "batch 4", "batch 8"]
    tables = outcome.out[outcome.out.index("\n\n") : outcome.out.index("engines resize the block")]
    assert max(map(len, tables.splitlines())) <= 80


def test_settings_of_engines_are_left_out_if_drafting_does_not_pay(tmp_path: Path) -> None:
    times = {"plain": {"1": [1.0, 1.0]}, "resized": {"7": {"1": [100.0, 100.0]}}}
    outcome = tune(tmp_path, times=times)
    assert outcome.code == 0
    assert re.search(r"^batch 1: .* not pay: .* K 7,", outcome.out, re.MULTILINE)
    assert "# vllm" not in outcome.out


def test_settings_for_a_batch_size_that_loses_carry_a_caution(document: dict[str, Any]) -> None:
    (caution,) = document["caveats"]
    assert "batch 64" in caution


def test_an_engine_that_would_not_serve_the_pair_is_told_why() -> None:
    (row,) = tuned_engines("sglang", "tiny:reduced", "tiny", 7, ())
    assert row.text is None
    assert str(row.refusal).startswith("sglang 0.5.23 cannot serve the draft: S09 ")


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    assert tune(tmp_path, "--output", rows).code == 0
    files = sorted(rows.iterdir())
    assert [file.name for file in files] == ["narrowed-3.jsonl", "resized-3.jsonl", "whole-7.jsonl"]
    again = tune(tmp_path, "--output", rows)
    assert (again.code, again.error_id) == (2, "output-exists")
    assert again.error is not None
    assert "--resume" in str(again.error.hint)
    whole = rows / "whole-7.jsonl"
    lines = whole.read_text().splitlines(keepends=True)
    whole.write_text("".join(lines[:5]))
    before = {file: file.read_bytes() for file in files if file != whole}
    resumed = tune(tmp_path, "--output", rows, "--resume")
    assert resumed.code == 0, resumed.err
    assert {file: file.read_bytes() for file in before} == before
    assert len(whole.read_text().splitlines()) == len(lines)
    assert whole.read_text().startswith("".join(lines[:5]))


def test_an_interrupted_run_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "measure_candidate", stopped)
    outcome = tune(tmp_path, "--output", tmp_path / "rows")
    assert (outcome.code, outcome.error_id) == (130, "interrupted")
    assert outcome.error is not None
    assert outcome.error.path == tmp_path / "rows"
    for done, flag in ((outcome, "--resume"), (tune(tmp_path), "--output")):
        assert done.error is not None
        assert flag in str(done.error.hint)


def test_step_times_are_kept_and_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a setting that decides the step times has changed."""
    measured: list[int] = []

    def made(*arguments: Any) -> StepCosts:
        measured.append(1)
        candidates = arguments[1]
        times = {1: (10.0, 11.0)}
        return StepCosts(plain=times, drafting=dict.fromkeys(candidates, times), source="measured here")

    monkeypatch.setattr(tuner, "measure_step_costs", made)
    options: dict[str, Any] = {
        "draft": "tiny",
        "max_new_tokens": 24,
        "prompts": [[5, 6, 7], [8, 9]],
        "concurrency": [1],
        "device": "cpu",
        "output": tmp_path,
        "num_speculative_tokens": [7],
    }
    first = dflash_cli.tune(**options)
    second = dflash_cli.tune(resume=True, **options)
    assert (len(measured), second.costs) == (1, first.costs)
    dflash_cli.tune(resume=True, **options, rounds=5)
    assert len(measured) == 2
    (tmp_path / STEP_TIMES_FILE).write_text("[1]")
    dflash_cli.tune(resume=True, **options)
    assert len(measured) == 3


def test_answers_that_a_later_k_would_overwrite_end_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "measure_candidate", None)
    (tmp_path / "rows").mkdir()
    last = tmp_path / "rows" / "what-if-draft-int4.jsonl"
    last.touch()
    outcome = tune(tmp_path, "--output", last.parent, "--what-if", "draft=int4")
    assert (outcome.code, f"error: {last}: exists already" in outcome.err) == (2, True)
    assert list(last.parent.iterdir()) == [last]


def test_a_file_with_a_k_beyond_the_draft_s_is_named_with_those_that_fit(tmp_path: Path) -> None:
    times = {"plain": {"1": 1.0}, "resized": {str(number): {"1": 1.2} for number in (3, 7, 15)}}
    outcome = tune(tmp_path, times=times)
    assert outcome.code == 2
    assert outcome.error is not None
    assert (outcome.error.path, outcome.field, outcome.error.found) == (tmp_path / "times.json", "K", 15)
    assert "--num-speculative-tokens 3,7" in str(outcome.error.hint)


@pytest.mark.parametrize(
    ("arguments", "field", "found"),
    [
        (["--num-speculative-tokens", "1,x"], "--num-speculative-tokens", "x"),
        (["--num-speculative-tokens", "9"], "num_draft_tokens", 9),
        (["--concurrency", "0"], "--concurrency", 0),
        (["--concurrency", "2"], "plain.2", MISSING),
        (["--resume"], "--resume", None),
        (["--confidence", "1"], "--confidence", 1.0),
        (["--what-if", "draft=fp7"], "--what-if", "draft=fp7"),
        (["--max-new-tokens", "1"], "--max-new-tokens", 1),
    ],
)
def test_invalid_options_are_refused(
    arguments: list[str], field: str, found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = tune(tmp_path, *arguments)
    assert (outcome.code, outcome.field) == (2, field)
    assert outcome.error is not None
    assert outcome.error.found == found


@pytest.mark.parametrize(("option", "value"), [("--verify-width", "3"), ("--engine", "vlm")])
def test_unknown_options_and_engines_are_refused(option: str, value: str, tmp_path: Path) -> None:
    outcome = tune(tmp_path, option, value)
    assert (outcome.code, option in outcome.err or value in outcome.err) == (2, True)


def test_a_row_budget_is_simulated_on_demand(tmp_path: Path) -> None:
    batches = {"1": 10.0, "8": 10.0}
    times = {"plain": batches, "narrowed": {"3": batches}, "resized": {"3": batches, "7": {"1": 12.0, "8": 20.0}}}
    outcome = tune(tmp_path, "--budget", "--engine", "sglang", "--json", times=times)
    document = json.loads(outcome.out)
    assert {item["batch"] for item in document["budget"]} == {1, 8}
    for item in document["budget"]:
        assert item["over_all_rows"] > 0.8
        assert 1 <= item["rows_per_request"] <= 8
    assert {item["feature"] for item in document["budget"]} == {"measured", "perfect", "uninformative"}
    assert document["calibration"]["num_prompts"] == 12
