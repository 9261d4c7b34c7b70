"""`dflash generate`: text, rows, statistics and all sources of prompts."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.terminal import console
from dflash_runtime.documents import to_json
from dflash_runtime.errors import UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.metrics import request_metrics
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.command_line import launch, run_main
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts, bundled_tokenizer
from dflash_testing.paths import ROOT
from dflash_testing.raised_errors import run_or_raise
from dflash_testing.refusals import refuses

PROMPT = "def fibonacci(n):"


run = partial(run_or_raise, "generate")


@pytest.fixture(scope="module")
def expected() -> RequestOutput:
    """The output of the runtime for PROMPT."""
    ids = bundled_tokenizer().encode(PROMPT)
    return bundled_llm(bundled_draft_model(), 7).generate([ids], SamplingParams(max_new_tokens=24, ignore_eos=True))[0]


def test_text_goes_to_stdout_statistics_and_logs_to_stderr(expected: RequestOutput) -> None:
    """The process also prints the modules that it imports: not transformers, which takes seconds."""
    environment = {"PYTHONPROFILEIMPORTTIME": "1"}
    done = launch("generate", "-v", PROMPT, "-n", "24", "--ignore-eos", "--threads", "1", env=environment)
    assert done.code == 0, done.err
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines() if line.startswith("import time:")}
    assert "torch" in imported
    assert "transformers" not in imported
    assert done.out == bundled_tokenizer().decode(expected.token_ids) + "\n"
    assert "24 tokens" in done.err
    assert "info: loaded onto cpu" in done.err
    assert f" {len(expected.acceptance_lengths)} steps, " in done.err


def test_rows_hold_the_output_of_the_runtime(expected: RequestOutput) -> None:
    done = run(PROMPT, "-n", "24", "--ignore-eos", "--output", "-")
    (row,) = map(json.loads, done.stdout.splitlines())
    assert row == {
        "index": 0,
        "prompt_token_ids": list(expected.prompt_token_ids),
        "token_ids": list(expected.token_ids),
        "text": bundled_tokenizer().decode(expected.token_ids),
        "finish_reason": "length",
        "acceptance_lengths": list(expected.acceptance_lengths),
        "verify_widths": [8] * len(expected.acceptance_lengths),
        "rejected_ids": list(expected.rejected_ids),
        "metrics": to_json(request_metrics(expected, 7)),
    }


@pytest.mark.parametrize(("option", "share"), [(None, 0.25), ("--no-prefix-cache", 0)])
def test_json_counts_prompt_tokens_found_in_the_cache_of_a_hybrid(
    option: str | None, share: float, tmp_path: Path
) -> None:
    """The second of two equal prompts of 64 tokens finds its first pages of 32."""
    pair, prompts = ROOT / "tests/data/pairs/hybrid", tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt_token_ids": [5 + index % 40 for index in range(64)]})
    prompts.write_text(f"{line}\n{line}\n")
    given = ["--draft", str(pair / "draft"), "--target", str(pair / "target"), "--prompts", str(prompts)]
    options = ["-n", "4", "--page-size", "32", "--snapshot-memory", "64M", "--concurrency", "1", "--json"]
    document = json.loads(run(*given, *options, *([option] if option else [])).stdout)
    assert document["num_prompt_tokens"] == 128
    assert document["num_cached_tokens"] == 128 * share


def test_json_is_one_document_with_vllms_names(expected: RequestOutput) -> None:
    document = json.loads(run(PROMPT, "-n", "24", "--ignore-eos", "--json").stdout)
    assert document["schema_version"] == 1
    assert document["num_drafts"] == len(expected.acceptance_lengths)
    assert document["num_accepted_tokens"] == sum(expected.acceptance_lengths) - len(expected.acceptance_lengths)
    assert document["rows"][0]["token_ids"] == list(expected.token_ids)
    assert document["verify_width_histogram"] == {"8": len(expected.acceptance_lengths)}
    assert document["is_capped"] is False


def test_a_narrow_verification_says_that_acceptance_is_capped(expected: RequestOutput) -> None:
    done = run(PROMPT, "-n", "24", "--ignore-eos", "--verify-width", "3", "--json")
    document = json.loads(done.stdout)
    assert document["rows"][0]["token_ids"] == list(expected.token_ids)
    assert set(document["rows"][0]["verify_widths"]) == {3}
    assert document["verify_width_histogram"] == {"3": document["num_drafts"]}
    assert document["per_pos_verified"] == [document["num_drafts"]] * 2 + [0] * 5
    assert document["is_capped"] is True
    assert "(capped: 2.0 of 7 " in done.stderr


def test_widths_do_not_adapt_without_step_times() -> None:
    """A warning is printed only if --verify-width auto is given."""
    by_default, asked = (
        run_main("generate", PROMPT, "-n", "9", "--json", *options) for options in ([], ["--verify-width", "auto"])
    )
    assert (by_default.notices, asked.notices) == ((), ("no-adaptive-width",))
    for done in (by_default, asked):
        assert json.loads(done.out)["measured"]["adaptive_width"] is False


def test_a_verify_width_of_one_is_plain_decoding(expected: RequestOutput) -> None:
    document = json.loads(run(PROMPT, "-n", "24", "--ignore-eos", "--verify-width", "1", "--json").stdout)
    assert document["rows"][0]["token_ids"] == list(expected.token_ids)
    assert document["num_drafts"] == 0
    assert document["verify_width_histogram"] == {"1": 23}


def test_rows_keep_input_order_and_finish_together(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": PROMPT, "id": "a"},
        {"prompt_token_ids": list(bundled_prompts()[0][:9])},
        {"messages": [{"role": "user", "content": "Write a function."}]},
        {"turns": ["Write a function.", "And a test."], "id": 7},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "rows.jsonl"
    run("--prompts", str(prompts), "-n", "12", "--ignore-eos", "--output", str(output), "--concurrency", "2")
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(answer["index"], answer.get("id"), answer.get("turn")) for answer in answers] == [
        (0, "a", None), (1, None, None), (2, None, None), (3, 7, 0), (3, 7, 1),
    ]  # fmt: skip
    assert answers[1]["prompt_token_ids"] == rows[1]["prompt_token_ids"]
    template = bundled_tokenizer().render(rows[2]["messages"], where="")
    assert answers[2]["prompt_token_ids"] == template
    # The second turn holds the first, its answer, and the next question.
    assert answers[4]["prompt_token_ids"][: len(answers[3]["prompt_token_ids"])] == answers[3]["prompt_token_ids"]
    assert len(answers[4]["prompt_token_ids"]) > len(answers[3]["prompt_token_ids"]) + 12
    assert not [item for item in tmp_path.iterdir() if "tmp" in item.name]


def test_prompts_come_from_stdin(expected: RequestOutput) -> None:
    by_rows = run("--prompts", "-", "-n", "24", "--ignore-eos", "-o", "-", stdin=json.dumps({"prompt": PROMPT}) + "\n")
    by_text = run("-", "-n", "24", "--ignore-eos", "-o", "-", stdin=PROMPT)
    assert by_rows.stdout == by_text.stdout
    assert json.loads(by_rows.stdout)["token_ids"] == list(expected.token_ids)


@pytest.mark.parametrize(
    "options", [["-k", "0"], ["-k", "3"], ["--draft", "tiny:reduced"], ["--target", "tiny", "-k", "0"]]
)
def test_every_draft_gives_the_same_greedy_text(options: list[str], expected: RequestOutput) -> None:
    done = run(PROMPT, "-n", "24", "--ignore-eos", *options)
    assert done.stdout == bundled_tokenizer().decode(expected.token_ids) + "\n"


def test_a_target_without_a_tokenizer_takes_ids_and_gives_ids(tmp_path: Path, expected: RequestOutput) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_directory() / "target" / name, target)
    rows = json.dumps({"prompt_token_ids": list(expected.prompt_token_ids)})
    done = run("--draft", "tiny", "--target", str(target), "-p", "-", "-n", "24", "--ignore-eos", "-o", "-", stdin=rows)
    answer = json.loads(done.stdout)
    assert answer["text"] is None
    assert answer["token_ids"] == list(expected.token_ids)
    shown = run("--draft", "tiny", "--target", str(target), "-p", "-", "-n", "24", "--ignore-eos", stdin=rows)
    assert shown.stdout.split() == [str(token) for token in expected.token_ids]
    refused = run_main("generate", PROMPT, "--draft", "tiny", "--target", target)
    assert (refused.code, refused.out) == (2, "")
    assert "error: prompt 1: " in refused.err
    assert "lacks a tokenizer" in refused.err


def test_a_feature_that_is_switched_off_is_named_once() -> None:
    done = run_main("generate", "x", "-k", "0", "--draft-sampling", "probabilistic", "-n", "4")
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if "probabilistic drafting is off" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: ")


def test_a_row_that_cannot_be_served_harms_no_other(tmp_path: Path, expected: RequestOutput) -> None:
    prompts = tmp_path / "prompts.jsonl"
    good = list(expected.prompt_token_ids)
    rows: list[list[int]] = [good, [99_999], good, [1] * 5000]
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": row}) for row in rows))
    done = run_main("generate", "--prompts", prompts, "--output", "-", "-n", "24", "--ignore-eos")
    assert done.code == 2
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["length", "error", "length", "error"]
    assert answers[0]["token_ids"] == answers[2]["token_ids"] == list(expected.token_ids)
    assert answers[1]["error"].startswith(f"{prompts}:2: ")
    assert "99999" in answers[1]["error"]
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {answer['error']}" for answer in answers if "error" in answer]


def test_an_output_is_replaced_only_by_force(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text("mine")
    done = run_main("generate", PROMPT, "-n", "4", "--output", output)
    assert (done.code, done.error_id) == (2, "output-exists")
    error, hint = done.err.splitlines()
    assert error.startswith(f"error: {output}: ")
    assert "--force" in hint
    assert output.read_text() == "mine"
    run(PROMPT, "-n", "4", "--output", str(output), "--force")
    assert len(json.loads(output.read_text())["token_ids"]) == 4


def test_a_device_is_written_to_and_stays_one() -> None:
    null = Path(os.devnull)
    run(PROMPT, "-n", "4", "--output", str(null))
    assert null.is_char_device()


def test_a_checkpoint_as_the_only_prompt_is_pointed_out() -> None:
    def notices(*arguments: str) -> tuple[str, ...]:
        done = run_main("generate", *arguments, "-n", "2")
        assert done.code == 0
        return done.notices

    assert notices("tiny") == ("prompt-names-a-checkpoint",)
    assert notices("def", "fibonacci", "n") == ("prompts-of-one-word",)
    assert notices("def fibonacci", "n") == notices("tiny", "--draft", "tiny") == ()


def test_quiet_leaves_only_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_is_quiet", False)  # restored after the test
    loud, quiet = (run_main("generate", PROMPT, "-n", "4", *options) for options in ([], ["-q"]))
    assert loud.err.splitlines()[0].startswith("loading ")
    assert quiet.err == ""
    assert quiet.out == loud.out


def target_without_template(path: Path) -> Path:
    """The bundled target with a tokenizer that lacks a chat template."""
    shutil.copytree(tiny_directory() / "target", path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings.pop("chat_template", None)
    config.write_text(json.dumps(settings))
    return path


def test_a_chat_without_a_template_fails_alone(tmp_path: Path, expected: RequestOutput) -> None:
    """Rows that need the template get an error for each turn. The row of ids is answered."""
    target = target_without_template(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt_token_ids": list(expected.prompt_token_ids)},
        {"turns": ["a", "b"]},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    options = ["--draft", "tiny", "--target", target, "-n", "24", "--ignore-eos"]
    done = run_main("generate", *options, "--prompts", prompts, "--output", "-")
    assert done.code == 2
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["error", "length", "error", "error"]
    assert answers[0]["error"].startswith(f"{prompts}:1: messages ")
    assert answers[1]["token_ids"] == list(expected.token_ids)
    assert answers[3]["error"].startswith(f"{prompts}:3: turn 2 ")
    text = run_main("generate", *options, "--prompts", prompts)
    assert text.out == bundled_tokenizer().decode(expected.token_ids) + "\n"


def test_chat_needs_a_template_for_any_prompt(tmp_path: Path) -> None:
    target = target_without_template(tmp_path / "target")
    done = run_main("generate", "x", "--chat", "--draft", "tiny", "--target", target)
    assert (done.code, done.out) == (2, "")
    assert (done.error_id, done.field) == ("no-chat-template", "--chat")
    base = run_main("generate", "x", "--chat", "-n", "2")
    assert base.notices == ("chat-with-base-model",)


def test_an_answer_that_the_model_cuts_is_pointed_out() -> None:
    done = run_main("generate", "x", "-n", "50", "--max-model-len", "40", "--ignore-eos")
    assert done.code == 0
    assert done.notices == ("answers-cut",)
    assert run_main("generate", "x", "-n", "20", "--max-model-len", "40").notices == ()


def test_a_failed_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LLM, *_: Any) -> Any:
        raise RuntimeError("broken")
        yield

    monkeypatch.setattr(LLM, "stream", broken)
    with pytest.raises(RuntimeError):
        run(PROMPT, "--output", str(tmp_path / "rows.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_trace_shows_what_was_drafted_accepted_and_replaced(expected: RequestOutput) -> None:
    row = json.loads(run(PROMPT, "-n", "24", "--ignore-eos", "-o", "-", "--trace", "1").stdout)
    assert [len(step["accepted"]) + 1 for step in row["trace"]][:-1] == row["acceptance_lengths"][:-1]
    rebuilt = [token for step in row["trace"] for token in step["accepted"] + step["bonus"]]
    assert [row["token_ids"][0], *rebuilt] == row["token_ids"]
    for step in row["trace"]:
        assert step["drafted"][: len(step["accepted"])] == step["accepted"]
        assert len(step["drafted"]) == 7
        if step["replaced"]:
            assert step["replaced"] == [step["drafted"][len(step["accepted"])]]
            assert step["replaced"] != step["bonus"]
    shown = run(PROMPT, "-n", "24", "--ignore-eos", "--trace", "1").stdout.splitlines()
    assert len(shown) == len(expected.acceptance_lengths)
    assert all(f"{length - 1}/7 " in line for line, length in zip(shown, expected.acceptance_lengths, strict=True))


def test_lossless_output_is_found_lossless_and_a_wrong_token_is_not(expected: RequestOutput) -> None:
    document = json.loads(run(PROMPT, "-n", "24", "--ignore-eos", "--check-lossless", "--json").stdout)
    assert document["lossless"]["is_lossless"] is True
    assert document["lossless"]["num_tokens"] == 24
    llm = bundled_llm(None, 0)
    wrong = replace(expected, token_ids=(*expected.token_ids[:9], 5, *expected.token_ids[10:]))
    verdict = llm.check_lossless([expected, wrong])
    assert not verdict.is_lossless
    assert "token 10 " in verdict.worst
    with refuses(UsageError, field="--check-lossless", found="--temperature 1"):
        run(PROMPT, "--check-lossless", "--temperature", "1")


def test_an_interruption_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "rows.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    ids = list(bundled_prompts()[0][:9])
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": ids}) for _ in range(3)))
    stream = LLM.stream

    def interrupted(self: LLM, *arguments: Any) -> Any:
        finished = 0
        for delta in stream(self, *arguments):
            yield delta
            finished += delta.output is not None
            if finished == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    options = ["-n", "9", "--concurrency", "1", "--output", str(output)]
    done = run_main("generate", "--prompts", prompts, *options)
    assert (done.code, done.error_id) == (130, "interrupted")
    assert done.error is not None
    assert (done.error.found, done.error.path) == (2, str(output))
    assert "2 of 3 " in done.err.splitlines()[-1]
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 1]


def test_sampling_is_seeded() -> None:
    options = [PROMPT, "-n", "16", "--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--ignore-eos"]
    first, again, other = (run(*options, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other
