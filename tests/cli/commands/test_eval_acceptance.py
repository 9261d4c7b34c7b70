"""`dflash eval-acceptance`: figures, definitions, intervals, the gate, failed prompts and reports."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.prompts import PromptRow, gather_rows
from dflash_runtime.errors import GateFailed, UsageError
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.command_line import run_main
from dflash_testing.edits import edited_config
from dflash_testing.eval_runs import ENOUGH, SMALL, run_eval
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts
from dflash_testing.refusals import refuses


def bundled_rows() -> list[PromptRow]:
    return gather_rows([], str(tiny_directory() / "prompts.jsonl"))


def test_the_figures_are_the_runtimes(enough: Path) -> None:
    document = json.loads(enough.with_name("result.json").read_text())
    params = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(document["settings"]["stop_token_ids"]))
    outputs = bundled_llm(bundled_draft_model(), 7, max_num_requests=8).generate(bundled_prompts(), params)
    steps = [length for item in outputs for length in item.acceptance_lengths]
    assert document["num_drafts"] == len(steps)
    assert document["num_draft_tokens"] == 7 * len(steps)
    assert document["num_accepted_tokens"] == sum(steps) - len(steps)
    assert document["acceptance_len"] == pytest.approx(sum(steps) / len(steps))
    assert document["per_pos_accepted"] == [sum(length > place + 1 for length in steps) for place in range(7)]
    assert document["histogram"] == [steps.count(length) for length in range(1, 9)]
    assert document["settings"]["num_speculative_tokens"] == 7
    low, high = (document["acceptance_len_interval"][end] for end in ("low", "high"))
    assert low < document["acceptance_len"] < high


def test_tables_name_every_definition(rows: Path) -> None:
    text = run_eval(*SMALL, "--output", str(rows), "--resume", "--all").stdout
    assert text.startswith("acceptance length ")
    for word in ("by position", "\nvllm ", "zlab", "sglang", "mlx_ratio", "committed", "by category"):
        assert word in text


def test_steps_of_the_first_prompts_are_shown() -> None:
    text = run_eval(*SMALL, "--trace", "1").stdout
    (steps,) = re.findall(r"^steps of \S+:\d+\n((?:\d/7 .*\n)+)$", text, re.MULTILINE)
    assert re.match(r"\d/7 (\[.*\])+$", steps.splitlines()[0])
    assert "often rejected" in run_eval(*SMALL, "--all").stdout
    refused = run_main("eval-acceptance", *SMALL, "--trace", "1", "--json")
    assert (refused.code, refused.out) == (2, "")
    assert (refused.error_id, refused.field) == ("two-results-on-stdout", "--trace")


def test_one_definition_leads_and_says_what_it_counts(enough: Path) -> None:
    text = run_eval("tiny", *ENOUGH, "--output", str(enough), "--resume").stdout
    headline, definition, legend = text.splitlines()[:3]
    assert re.fullmatch(r"acceptance length [\d.]+ \[[\d., ]+\], at most 8", headline)
    assert "vLLM" in definition
    assert legend.startswith("at most 8: 7 ")
    assert "95%" in legend
    assert "zlab" not in text


@pytest.mark.parametrize(("minimum", "gate"), [("1.0", "point"), ("1.0", "lower")])
def test_a_gate_that_is_met_passes(minimum: str, gate: str, enough: Path) -> None:
    resumed = [*ENOUGH, "--output", str(enough), "--resume"]
    assert run_eval(*resumed, "--min-acceptance", minimum, "--gate", gate).exit_code == 0


def test_a_gate_that_is_missed_exits_3_after_the_result(rows: Path) -> None:
    resumed = [*SMALL, "--output", rows, "--resume"]
    done = run_main("eval-acceptance", *resumed, "--min-acceptance", "7.9", "--json")
    assert done.code == 3
    assert json.loads(done.out)["acceptance_len"] < 7.9
    assert (done.error_id, done.field) == ("acceptance-too-low", "acceptance length")
    with refuses(GateFailed, "too-few-prompts", field="num_prompts", found=1, expected="64 or more"):
        run_eval("--num-prompts", "1", "-n", "8", "--min-acceptance", "1", "--gate", "lower")


def write_prompts(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def mixed_prompts(path: Path) -> Path:
    """Two good rows, an unknown id, a row that is too long, and a conversation with a second turn that is too long."""
    good = [list(prompt) for prompt in bundled_prompts()[:2]]
    return write_prompts(
        path,
        [
            {"prompt_token_ids": good[0]},
            {"prompt_token_ids": [99_999], "id": "unknown"},
            {"prompt_token_ids": good[1]},
            {"prompt_token_ids": [1] * 5000},
            {"turns": ["Write a function.", "x = 1\n" * 3000]},
        ],
    )


def test_prompts_that_fail_are_named_counted_and_left_out(tmp_path: Path) -> None:
    prompts, rows = mixed_prompts(tmp_path / "p.jsonl"), tmp_path / "rows.jsonl"
    options = ["--prompts", prompts, "-n", "8", "--num-resamples", "0"]
    done = run_main("eval-acceptance", *options, "--json", "--output", rows)
    assert done.code == 2
    document = json.loads(done.out)
    assert (document["num_failed"], document["num_conversations"], document["num_requests"]) == (3, 2, 2)
    assert [item["id"] for item in document["failed"]] == ["unknown", None, None]
    assert document["failed"][0]["error"].startswith(f"{prompts}:2: ")
    assert "99999" in document["failed"][0]["error"]
    # It is the only prompt in the pass over second turns. An index in that pass would be 0.
    assert [item["index"] for item in document["failed"]] == [1, 3, 4]
    assert document["failed"][2]["error"].startswith(f"{prompts}:5: turn 2: ")
    good = write_prompts(tmp_path / "good.jsonl", [json.loads(prompts.read_text().splitlines()[n]) for n in (0, 2)])
    alone = json.loads(run_eval("--prompts", str(good), "-n", "8", "--num-resamples", "0", "--json").stdout)
    assert document["acceptance_len"] == alone["acceptance_len"]
    assert any(line.startswith("error: 3 of 5 prompts ") for line in done.err.splitlines())
    result, report = tmp_path / "result.json", tmp_path / "report.md"
    result.write_text(done.out)
    assert run_main("report", result, "-o", report).code == 0
    assert "3 of 5 prompts" in report.read_text()
    # The answered turn stays in the file, but its conversation is not measured.
    assert len(rows.read_text().splitlines()) == 4
    again = run_main("eval-acceptance", *options, "--output", rows, "--resume")
    assert again.code == 2
    assert "3 of 5 prompts " in again.out.splitlines()[0]
    allowed = run_main("eval-acceptance", *options, "--allow-failed")
    assert allowed.code == 0
    assert allowed.notices.count("prompts-failed") == 1
    assert "warning: 3 of 5 prompts " in allowed.err


def test_a_run_in_which_every_prompt_fails_is_a_failure(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x = 1\n" * 2000}] * 7)  # longer than the target allows
    done = run_main("eval-acceptance", "--prompts", prompts, "--allow-failed")
    assert done.code == 2
    assert re.search(r"^    and 2 more.* --json", done.err, re.MULTILINE)


def test_a_sample_is_said_to_be_one() -> None:
    document = json.loads(run_eval(*SMALL, "--seed", "5", "--json").stdout)
    assert (document["prompts"]["sample_seed"], document["prompts"]["num_available"]) == (5, 64)
    assert {name: item["num_conversations"] for name, item in document["categories"].items()} == {
        "numpy": 1, "stdlib": 1, "torch": 1, "transformers": 1,
    }  # fmt: skip


def test_given_and_rendered_prompts_have_digests_of_their_own(tmp_path: Path) -> None:
    """The same prompts, as text and as conversations."""
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "def f("}])
    options = ["--prompts", str(prompts), "-n", "8", "--json"]
    plain, chat = (json.loads(run_eval(*options, *more).stdout)["measured"] for more in ([], ["--chat"]))
    assert plain["prompts_digest"] == chat["prompts_digest"]
    assert plain["rendered_prompts_digest"] != chat["rendered_prompts_digest"]


def test_a_result_says_what_was_measured() -> None:
    document = json.loads(run_eval("tiny:reduced", *SMALL, "--json").stdout)
    assert document["kind"] == "eval-acceptance"
    measured, settings = document["measured"], document["settings"]
    assert (measured["draft"]["name"], measured["target"]["name"]) == ("tiny:reduced", "tiny")
    assert re.fullmatch("[0-9a-f]{16}", measured["draft"]["digest"])
    assert measured["draft"]["digest"] == settings["draft_digest"] != settings["target_digest"]
    assert re.match(r"\d{4}-\d\d-\d\dT", measured["date"])
    assert measured["packages"]["torch"] == settings["torch"]
    assert (settings["kernels"], settings["draft_sampling"]) == ("reference", "greedy")
    assert (measured["max_num_requests"], measured["num_prompts"]) == (16, 4)
    assert measured["device_name"].startswith("cpu")
    assert measured["argv"][1:] == sys.argv[1:]
    assert (measured["engine"]["page_size"], measured["engine"]["graphs"]) == (16, True)
    assert re.fullmatch("[0-9a-f]{16}", measured["template_digest"])
    assert re.fullmatch("[0-9a-f]{16}", measured["rendered_prompts_digest"])
    assert str(tiny_directory()) not in json.dumps(document)


def test_a_draft_is_an_argument_or_an_option() -> None:
    by_argument, by_option = (
        json.loads(run_eval(*given, *SMALL, "--json").stdout) for given in (["tiny"], ["-d", "tiny"])
    )
    assert by_argument["settings"]["draft"] == by_option["settings"]["draft"] == "tiny"
    with refuses(UsageError, "draft-given-twice", field="--draft", found="tiny"):
        run_eval("tiny", "--draft", "tiny", *SMALL)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--confidence", "1"], "--confidence"),
        (["-k", "0"], "--num-speculative-tokens"),
        (["--verify-width", "1"], "--verify-width"),
        (["--resume"], "--resume"),
    ],
)
def test_missing_and_contradicting_options_are_refused(options: list[str], field: str) -> None:
    with refuses(UsageError, field=field):
        run_eval(*options)


def test_a_narrow_verification_is_called_capped_and_leaves_out_other_positions(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    done = run_eval(*SMALL, "--verify-width", "3", "--output", str(rows))
    assert re.search(r" at most 8, capped: of 7 .* 2 ", done.stdout)
    positions = done.stdout.split("by position")[1].split("\n\n")[0].split("\n")[2:]
    assert [line.split()[0] for line in positions if line.strip()] == ["1", "2"]
    resumed = run_eval(*SMALL, "--verify-width", "3", "--output", str(rows), "--resume", "--json")
    document = json.loads(resumed.stdout)
    assert document["is_capped"] is True
    assert document["per_pos_verified"][2:] == [0] * 5
    assert document["per_pos_conditional_rates"][2:] == [None] * 5


def test_sampled_acceptance_is_lower_and_seeded() -> None:
    first, again = (
        json.loads(run_eval(*SMALL, "--temperature", "1", "--json").stdout)["acceptance_len"] for _ in range(2)
    )
    assert first == again


def test_a_trial_reading_changes_acceptance_and_not_the_text() -> None:
    """The reduced draft was trained without causality, and loses most from causal attention."""
    options = ["--draft", "tiny:reduced", "--num-prompts", "12", "-n", "32", "--num-resamples", "0", "--json"]
    as_trained = json.loads(run_eval(*options).stdout)
    causal = json.loads(run_eval(*options, "--causality", "causal").stdout)
    assert causal["settings"]["causality"] == "causal"
    assert causal["acceptance_len"] < as_trained["acceptance_len"] - 0.05
    assert causal["num_tokens"] == as_trained["num_tokens"]


def test_a_curve_that_shows_a_fault_is_named(tmp_path: Path) -> None:
    """With another mask token than in training, almost no first token is accepted. A sound draft lacks this shape."""
    draft, report = tmp_path / "draft", tmp_path / "report.md"
    result_file = tmp_path / "result.json"
    shutil.copytree(tiny_directory() / "draft", draft)
    with edited_config(draft) as config:
        config["dflash_config"]["mask_token_id"] = 5
    rows = str(tmp_path / "rows.jsonl")
    asked = [str(draft), "--target", "tiny", "--num-prompts", "4", "-n", "32", "--output", rows]
    result = run_eval(*asked)
    result_file.write_text(run_eval(*asked, "--resume", "--json").stdout)
    assert run_main("report", result_file, "-o", report).code == 0
    (shape,) = json.loads(result_file.read_text())["shapes"]
    for text in (result.stdout, report.read_text()):
        assert f"shape: {shape['name']} (" in text
    assert f"dflash diagnose {draft} --target tiny\n" in result.stdout
    document = json.loads(run_eval("--num-prompts", "4", "-n", "32", "--json").stdout)
    assert document["shapes"] == []


def test_a_lookup_is_measured_without_a_draft_and_compares_with_one(rows: Path, answered: Path, tmp_path: Path) -> None:
    """The draft and the lookup give equal answers. A run with the draft does not continue the run of the lookup."""
    own = tmp_path / "lookup.jsonl"
    done = run_eval(*SMALL, "--drafting", "suffix", "--output", str(own), "--json")
    document, drafted = json.loads(done.stdout), json.loads(answered.with_name("result.json").read_text())
    settings = document["settings"]
    assert (settings["draft"], settings["drafting"], document["shapes"]) == (None, "suffix", [])
    assert document["measured"]["draft"] is None
    assert document["num_draft_tokens"] == 7 * document["num_drafts"]
    assert 1 <= document["acceptance_len"] < drafted["acceptance_len"]
    answers = [[json.loads(line) for line in file.read_text().splitlines()] for file in (rows, own)]
    texts = [{row["index"]: row["token_ids"] for row in found if "token_ids" in row} for found in answers]
    assert len(texts[0]) == 4
    assert texts[0] == texts[1]
    with refuses(UsageError):
        run_eval(*SMALL, "--output", str(own), "--resume")


@pytest.mark.parametrize(
    "options", [["--draft", "tiny"], ["--draft-sampling", "probabilistic"], ["--causality", "causal"]]
)
def test_options_of_a_draft_do_not_go_with_a_lookup(options: list[str]) -> None:
    with refuses(UsageError, "options-exclude-each-other", found=options[1]):
        run_eval("--drafting", "ngram", *options)


def test_calibration_is_reported_on_demand(answered: Path) -> None:
    """Four prompts: two fit the regression that predicts the other two."""
    document = json.loads(run_eval(*SMALL, "--calibration", "--json").stdout)
    plain = json.loads(answered.with_name("result.json").read_text())
    assert (plain["calibration"], plain["draft_confidence"]) == (None, None)
    found = document["calibration"]
    assert (found["num_prompts"], len(found["biases"]), len(found["bins"])) == (4, 7, 15)
    assert found["num_tokens"] == sum(item["num_tokens"] for item in found["bins"])
    assert found["num_tokens"] == sum(document["draft_confidence"]["per_pos_judged"])
    assert 0 <= found["ece"] < 1
    assert document["acceptance_len"] == plain["acceptance_len"]
