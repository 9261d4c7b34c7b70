"""`dflash generate`: text, rows, statistics, and every way a prompt can be given."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.answers import Answer, Event
from dflash_cli.generation.outputs import RowSink, TextSink
from dflash_cli.generation.prompts import PromptRow, parse_rows
from dflash_cli.generation.tokenizer import StreamDecoder
from dflash_cli.main import app
from dflash_runtime.errors import RequestError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import FinishReason, RequestOutput, SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts, bundled_tokenizer

PROMPT = "def fibonacci(n):"


def run(*arguments: str, stdin: str | None = None) -> Any:
    """The command in this process; errors that `main` would print are raised."""
    result = CliRunner().invoke(app, ["generate", *arguments], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def process(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    command = [sys.executable, "-m", "dflash_cli", "generate", *arguments]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | support.IMPORT_PATHS
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=env)


@pytest.fixture(scope="module")
def expected() -> RequestOutput:
    """What the runtime says to PROMPT."""
    ids = bundled_tokenizer().encode(PROMPT)
    return bundled_llm(bundled_draft_model(), 7).generate([ids], SamplingParams(max_new_tokens=40, ignore_eos=True))[0]


def test_text_goes_to_stdout_and_statistics_to_stderr(expected: RequestOutput) -> None:
    done = process(PROMPT, "-n", "40", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert done.stdout == bundled_tokenizer().decode(expected.token_ids) + "\n"
    assert "40 tokens" in done.stderr
    assert f"{len(expected.acceptance_lengths)} steps, acceptance length" in done.stderr


def test_rows_hold_what_the_runtime_said(expected: RequestOutput) -> None:
    done = run(PROMPT, "-n", "40", "--ignore-eos", "--output", "-")
    (row,) = map(json.loads, done.stdout.splitlines())
    assert row == {
        "index": 0,
        "prompt_token_ids": list(expected.prompt_token_ids),
        "token_ids": list(expected.token_ids),
        "text": bundled_tokenizer().decode(expected.token_ids),
        "finish_reason": "length",
        "acceptance_lengths": list(expected.acceptance_lengths),
        "verify_widths": [8] * len(expected.acceptance_lengths),
    }


def test_json_is_one_document_with_vllms_names(expected: RequestOutput) -> None:
    document = json.loads(run(PROMPT, "-n", "40", "--ignore-eos", "--json").stdout)
    assert document["schema_version"] == 1
    assert document["num_drafts"] == len(expected.acceptance_lengths)
    assert document["num_accepted_tokens"] == sum(expected.acceptance_lengths) - len(expected.acceptance_lengths)
    assert document["rows"][0]["token_ids"] == list(expected.token_ids)
    assert document["verify_width_histogram"] == {"8": len(expected.acceptance_lengths)}
    assert document["is_capped"] is False


def test_a_narrow_verification_says_that_acceptance_is_capped(expected: RequestOutput) -> None:
    done = run(PROMPT, "-n", "40", "--ignore-eos", "--verify-width", "3", "--json")
    document = json.loads(done.stdout)
    assert document["rows"][0]["token_ids"] == list(expected.token_ids)
    assert set(document["rows"][0]["verify_widths"]) == {3}
    assert document["verify_width_histogram"] == {"3": document["num_drafts"]}
    assert document["per_pos_verified"] == [document["num_drafts"]] * 2 + [0] * 5
    assert document["is_capped"] is True
    assert "(capped: 2.0 of 7 drafts verified)" in done.stderr


def test_widths_do_not_adapt_where_steps_have_no_times() -> None:
    """Silently unless it is asked for: on the CPU nobody expects it."""
    by_default, asked = (run(PROMPT, "-n", "9", "--json", *options) for options in ([], ["--adaptive-width"]))
    assert "adaptive width" not in by_default.stderr
    assert "warning: adaptive width is off because of steps without CUDA graphs" in asked.stderr
    for done in (by_default, asked):
        assert json.loads(done.stdout)["measured"]["adaptive_width"] is False


def test_a_verify_width_of_one_is_plain_decoding(expected: RequestOutput) -> None:
    document = json.loads(run(PROMPT, "-n", "40", "--ignore-eos", "--verify-width", "1", "--json").stdout)
    assert document["rows"][0]["token_ids"] == list(expected.token_ids)
    assert document["num_drafts"] == 0
    assert document["verify_width_histogram"] == {"1": 39}


def test_json_and_rows_on_stdout_exclude_each_other() -> None:
    done = process(PROMPT, "--json", "--output", "-")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --json and --output -")
    assert done.stdout == ""


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
    run("--prompts", str(prompts), "-n", "12", "--ignore-eos", "--output", str(output), "--max-num-requests", "2")
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
    by_rows = run("--prompts", "-", "-n", "40", "--ignore-eos", "-o", "-", stdin=json.dumps({"prompt": PROMPT}) + "\n")
    by_text = run("-", "-n", "40", "--ignore-eos", "-o", "-", stdin=PROMPT)
    assert by_rows.stdout == by_text.stdout
    assert json.loads(by_rows.stdout)["token_ids"] == list(expected.token_ids)


@pytest.mark.parametrize(
    "options", [["-k", "0"], ["-k", "3"], ["--draft", "tiny:reduced"], ["--target", "tiny", "-k", "0"]]
)
def test_every_draft_gives_the_same_greedy_text(options: list[str], expected: RequestOutput) -> None:
    done = run(PROMPT, "-n", "40", "--ignore-eos", *options)
    assert done.stdout == bundled_tokenizer().decode(expected.token_ids) + "\n"


def test_a_target_without_a_tokenizer_takes_ids_and_gives_ids(tmp_path: Path, expected: RequestOutput) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_directory() / "target" / name, target)
    rows = json.dumps({"prompt_token_ids": list(expected.prompt_token_ids)})
    done = run("--draft", "tiny", "--target", str(target), "-p", "-", "-n", "40", "--ignore-eos", "-o", "-", stdin=rows)
    answer = json.loads(done.stdout)
    assert answer["text"] is None
    assert answer["token_ids"] == list(expected.token_ids)
    shown = run("--draft", "tiny", "--target", str(target), "-p", "-", "-n", "40", "--ignore-eos", stdin=rows)
    assert shown.stdout.split() == [str(token) for token in expected.token_ids]
    refused = support.run_main("generate", PROMPT, "--draft", "tiny", "--target", target)
    assert (refused.code, refused.out) == (2, "")
    assert "error: prompt 1: holds text, but the target has no tokenizer" in refused.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "found a JSON list, expected an object"),
        ("{}", "found nothing, expected exactly one of prompt"),
        ('{"text": "x"}', "found text, expected exactly one of"),
        ('{"prompt": "x", "turns": ["y"]}', "found prompt and turns"),
        ('{"prompt": 5}', "prompt: found 5, expected a string"),
        ('{"prompt_token_ids": []}', "prompt_token_ids: found \\[\\], expected a list of one or more ids"),
        ('{"prompt_token_ids": [1, true]}', "expected a list of one or more ids"),
        ('{"turns": "x"}', "turns: found .x., expected a list of one or more strings"),
        ('{"messages": [{"role": "user"}]}', "expected a list of objects with role and content"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(line: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"rows.jsonl:2: .*{message}"):
        parse_rows(['{"prompt": "fine"}', line], "rows.jsonl")


def test_other_forms_of_prompt_files_are_answered_with_how_to_change_them(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    for text, hint in (('[{"prompt": "x"}]', "jq -c '.[]' makes them"), ('{"question": "x"}', "call the field that")):
        prompts.write_text(text)
        done = support.run_main("generate", "--prompts", prompts)
        assert done.code == 2
        assert f"error: {prompts}:1: " in done.err
        assert hint in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "no prompt"),
        (["x", "--prompts", "y"], 2, "both as arguments and by --prompts"),
        (["--prompts", "absent.jsonl"], 4, "absent.jsonl: no such file"),
        (["x", "--draft", "absent-dir", "--target", "tiny"], 4, "absent-dir: no such directory"),
        (["x", "--draft", "tiny", "--target", "tiny:reduced"], 2, "names a draft"),
        (["x", "--target", "tiny"], 2, "without a draft"),
        (["x", "-k", "8"], 2, "8 speculative tokens, expected at most 7"),
        (["x", "--top-p", "0"], 2, "top_p"),
        (["x", "--device", "tpu"], 2, "device 'tpu'"),
        (["x", "--kv-memory", "20K"], 6, "one request needs 2 pages of 16 tokens, 147456 bytes"),
        (["x", "--kv-memory", "lots"], 2, "--kv-memory 'lots', expected a size"),
        (["x", "--max-model-len", "999999"], 2, "max_model_len 999999"),
        (["x", "--output", "README.md"], 2, "README.md: exists already"),
        (["x", "--output", "no/such/dir/rows.jsonl"], 2, "no/such/dir: no such directory"),
        (["x", "--chat-template-kwargs", "{"], 2, "--chat-template-kwargs: not valid JSON"),
    ],
)
def test_bad_input_ends_in_one_line_and_its_exit_code(arguments: list[str], code: int, message: str) -> None:
    done = support.run_main("generate", *arguments)
    assert done.code == code
    first = next(line for line in done.err.splitlines() if not line.startswith("loading "))
    assert first.startswith("error: ")
    assert message in first
    assert "Traceback" not in done.err
    assert done.out == ""


def test_kernels_that_cannot_run_are_refused() -> None:
    """In a process of its own, since the interpreter is switched on in this one."""
    done = process("x", "--kernels", "triton", "--device", "cpu")
    assert done.returncode == 5
    assert "error: --kernels triton: its kernels do not run on cpu" in done.stderr
    assert done.stdout == ""


def test_a_request_too_large_for_the_pool_exits_6_with_the_arithmetic() -> None:
    done = support.run_main("generate", "x", "-n", "2000", "--kv-memory", "1M")
    assert done.code == 6
    assert "KV pages of 16 tokens for 2001 tokens and a block of 8 more, but the pool has" in done.err


def test_what_gives_way_is_said_once() -> None:
    done = support.run_main("generate", "x", "-k", "0", "--draft-sampling", "probabilistic", "-n", "4")
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if "probabilistic drafting is off" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: ")


def test_a_row_that_cannot_be_served_harms_no_other(tmp_path: Path, expected: RequestOutput) -> None:
    prompts = tmp_path / "prompts.jsonl"
    good = list(expected.prompt_token_ids)
    rows: list[list[int]] = [good, [99_999], good, [1] * 5000]
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": row}) for row in rows))
    done = support.run_main("generate", "--prompts", prompts, "--output", "-", "-n", "40", "--ignore-eos")
    assert done.code == 2
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["length", "error", "length", "error"]
    assert answers[0]["token_ids"] == answers[2]["token_ids"] == list(expected.token_ids)
    assert answers[1]["error"] == f"{prompts}:2: token id 99999, expected ids in [0, 2048)"
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {answer['error']}" for answer in answers if "error" in answer]


def test_prompts_that_are_typed_are_counted_from_1_as_headings_do() -> None:
    done = support.run_main("generate", "x", "", "-n", "1")
    assert (done.code, "error: prompt 2: empty, expected at least one token" in done.err.splitlines()) == (2, True)


def test_an_output_is_replaced_only_by_force(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text("mine")
    done = process(PROMPT, "-n", "4", "--output", str(output))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {output}: exists already", "hint: pass --force to replace it"]
    assert output.read_text() == "mine"
    run(PROMPT, "-n", "4", "--output", str(output), "--force")
    assert len(json.loads(output.read_text())["token_ids"]) == 4


def test_a_device_is_written_to_and_stays_one() -> None:
    null = Path(os.devnull)
    run(PROMPT, "-n", "4", "--output", str(null))
    assert null.is_char_device()


def test_a_checkpoint_as_the_only_prompt_is_pointed_out() -> None:
    done = support.run_main("generate", "tiny", "-n", "2")
    assert done.code == 0
    assert "note: tiny was read as a prompt; to run it as the draft, pass --draft tiny" in done.err.splitlines()
    words = "note: 3 prompts of one word each were read; put quotes around a text to make it one prompt"
    assert words in support.run_main("generate", "def", "fibonacci", "n", "-n", "2").err.splitlines()
    assert "one word each" not in support.run_main("generate", "def fibonacci", "n", "-n", "2").err
    assert "was read as a prompt" not in support.run_main("generate", "tiny", "-n", "2", "--draft", "tiny").err


def test_quiet_leaves_only_the_text() -> None:
    loud, quiet = support.run_main("generate", PROMPT, "-n", "4"), process("-q", PROMPT, "-n", "4")
    assert loud.err.splitlines()[0] == "loading draft tiny and target tiny ..."
    assert quiet.stderr == ""
    assert quiet.stdout == loud.out


def test_verbose_logs_what_was_loaded() -> None:
    done = process("-v", PROMPT, "-n", "2", "--threads", "1")
    assert "INFO dflash_cli.generation.loaded_pair: running on 1 CPU thread" in done.stderr


def target_without_template(path: Path) -> Path:
    """The bundled target, whose tokenizer completes text and knows no chats."""
    shutil.copytree(tiny_directory() / "target", path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings.pop("chat_template", None)
    config.write_text(json.dumps(settings))
    return path


def test_a_chat_without_a_template_fails_alone(tmp_path: Path, expected: RequestOutput) -> None:
    """Rows that need the template have errors of their own, turn by turn; the row of ids is answered."""
    target = target_without_template(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt_token_ids": list(expected.prompt_token_ids)},
        {"turns": ["a", "b"]},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    options = ["--draft", "tiny", "--target", target, "-n", "40", "--ignore-eos"]
    done = support.run_main("generate", *options, "--prompts", prompts, "--output", "-")
    assert done.code == 2
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["error", "length", "error", "error"]
    assert "prompts.jsonl:1: holds messages, but the target's tokenizer has no chat template" in answers[0]["error"]
    assert answers[1]["token_ids"] == list(expected.token_ids)
    assert "turn 2 is not asked, as turn 1 failed" in answers[3]["error"]
    text = support.run_main("generate", *options, "--prompts", prompts)
    assert text.out == bundled_tokenizer().decode(expected.token_ids) + "\n"


def test_chat_needs_a_template_for_any_prompt(tmp_path: Path) -> None:
    target = target_without_template(tmp_path / "target")
    done = support.run_main("generate", "x", "--chat", "--draft", "tiny", "--target", target)
    assert (done.code, done.out) == (2, "")
    assert "error: --chat: the target's tokenizer has no chat template" in done.err.splitlines()
    assert "hint: leave --chat out, or give a target that was trained on chats" in done.err.splitlines()
    base = support.run_main("generate", "x", "--chat", "-n", "2")
    assert "note: the bundled target is a base model" in base.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify-width", "9"], "--verify-width 9: expected at most 8, the block in use"),
        (["--verify-width", "4", "-k", "2"], "--verify-width 4: expected at most 3"),
        (["--stop-token-id", "99999"], "--stop-token-id 99999: expected an id in [0, 2048)"),
        (["--stop-token-id", "-1"], "--stop-token-id -1: expected 0 or more"),
        (["--seed", "-1"], "--seed -1: expected 0 or more"),
        (["--seed", str(2**63)], "--seed 9223372036854775808: expected 9223372036854775807 or less"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["eval-acceptance", "--num-prompts", "1"]])
def test_settings_that_mean_nothing_are_refused(command: list[str], options: list[str], message: str) -> None:
    done = support.run_main(*command, *options)
    assert (done.code, done.out) == (2, "")
    assert f"error: {message}" in done.err


def test_an_answer_that_the_model_cuts_is_pointed_out() -> None:
    done = support.run_main("generate", "x", "-n", "50", "--max-model-len", "40", "--ignore-eos")
    assert done.code == 0
    assert "note: 1 answer ends before -n 50: prompt and answer have 40 tokens at most" in done.err.splitlines()
    assert "note: 1 answer" not in support.run_main("generate", "x", "-n", "20", "--max-model-len", "40").err


def test_an_empty_prompt_leaves_stdout_empty() -> None:
    done = support.run_main("generate", "")
    assert (done.code, done.out) == (2, "")
    assert "error: " in done.err


def test_transformers_does_not_speak_to_users(tmp_path: Path) -> None:
    """A text longer than the tokenizer says it takes is refused by us, in one line."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x = 1\n" * 3000}))
    done = process("--prompts", str(prompts), "-n", "2")
    assert done.returncode == 2
    assert "Token indices sequence length" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] != []


def test_a_failed_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LLM, *_: Any) -> Any:
        raise RuntimeError("broken")
        yield

    monkeypatch.setattr(LLM, "stream", broken)
    with pytest.raises(RuntimeError, match="broken"):
        run(PROMPT, "--output", str(tmp_path / "rows.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_trace_shows_what_was_drafted_accepted_and_replaced(expected: RequestOutput) -> None:
    row = json.loads(run(PROMPT, "-n", "40", "--ignore-eos", "-o", "-", "--trace").stdout)
    assert [len(step["accepted"]) + 1 for step in row["trace"]][:-1] == row["acceptance_lengths"][:-1]
    rebuilt = [token for step in row["trace"] for token in step["accepted"] + step["bonus"]]
    assert [row["token_ids"][0], *rebuilt] == row["token_ids"]
    for step in row["trace"]:
        assert step["drafted"][: len(step["accepted"])] == step["accepted"]
        assert len(step["drafted"]) == 7
        if step["replaced"]:
            assert step["replaced"] == [step["drafted"][len(step["accepted"])]]
            assert step["replaced"] != step["bonus"]
    shown = run(PROMPT, "-n", "40", "--ignore-eos", "--trace").stdout.splitlines()
    assert len(shown) == len(expected.acceptance_lengths)
    assert all(f"{length - 1}/7 " in line for line, length in zip(shown, expected.acceptance_lengths, strict=True))


def test_lossless_output_is_found_lossless_and_a_wrong_token_is_not(expected: RequestOutput) -> None:
    document = json.loads(run(PROMPT, "-n", "40", "--ignore-eos", "--check-lossless", "--json").stdout)
    assert document["lossless"]["is_lossless"] is True
    assert document["lossless"]["num_tokens"] == 40
    llm = bundled_llm(None, 0)
    wrong = replace(expected, token_ids=(*expected.token_ids[:9], 5, *expected.token_ids[10:]))
    verdict = llm.check_lossless([expected, wrong])
    assert not verdict.is_lossless
    assert "token 10 of the answer is" in verdict.worst
    with pytest.raises(UsageError, match="--check-lossless needs --temperature 0"):
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
    options = ["-n", "9", "--max-num-requests", "1", "--output", str(output)]
    done = support.run_main("generate", "--prompts", prompts, *options)
    assert done.code == 130
    assert done.err.splitlines()[-1] == f"error: interrupted: 2 of 3 answered, which {output} holds"
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 1]


def test_sampling_is_seeded() -> None:
    options = [PROMPT, "-n", "16", "--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--ignore-eos"]
    first, again, other = (run(*options, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def test_text_of_a_later_row_waits_for_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PromptRow(index=index, kind="prompt", value="") for index in range(2)]
    sink = TextSink(rows)
    sink(Event(rows[1], (1,), "second", answer(rows[1])))
    sink(Event(rows[0], (1,), "first "))
    assert capsys.readouterr().out == "first "
    sink(Event(rows[0], (1,), "row", answer(rows[0])))
    assert capsys.readouterr().out == "row\nsecond\n"


def test_rows_wait_for_those_before_them() -> None:
    rows = [PromptRow(index=index, kind="prompt", value="") for index in range(3)]
    written: list[str] = []
    sink = RowSink(rows, written.append)
    for index in (2, 0, 1):
        sink(Event(rows[index], (1,), "x", answer(rows[index])))
        assert len(written) == {2: 0, 0: 1, 1: 3}[index]
    assert [json.loads(line)["index"] for line in written] == [0, 1, 2]


def answer(row: PromptRow) -> Answer:
    output = RequestOutput(
        index=row.index, prompt_token_ids=(1,), token_ids=(1,), finish_reason=FinishReason.STOP,
        acceptance_lengths=(), committed_lengths=(),
    )  # fmt: skip
    return Answer(row, 0, output, "x")


def test_text_is_released_only_when_it_is_certain() -> None:
    tokenizer = bundled_tokenizer()
    text = "naïve → 中文 🙂 end"
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push([token]) for token in ids]
    assert "".join(pieces) + decoder.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)
    cut = StreamDecoder(tokenizer)
    assert "".join(cut.push([token]) for token in ids[:-8]) + cut.finish() == tokenizer.decode(ids[:-8])


def test_usage_errors_are_usage_errors() -> None:
    with pytest.raises(UsageError):
        run("x", "--prompts", "y")
