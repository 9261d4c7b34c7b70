"""What `dflash generate` refuses: one line that says what is wrong, the exit code that is documented, and no result."""

import json
import re
from pathlib import Path

import pytest

from dflash_testing import checkpoints as support


def test_json_and_rows_on_stdout_exclude_each_other() -> None:
    done = support.run_main("generate", "x", "--json", "--output", "-")
    assert (done.code, done.out) == (2, "")
    assert (done.error_id, done.field) == ("two-results-on-stdout", "--output")


def test_other_forms_of_prompt_files_are_answered_with_how_to_change_them(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    for text, hint in (
        ('[{"prompt": "x"}]', "jq -c '.[]'"),
        ('{"question": "x"}', "prompt"),
    ):
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
        (["x", "-k", "8"], 2, "num_draft_tokens: found 8"),
        (["x", "--top-p", "0"], 2, "--top-p: found 0.0"),
        (["x", "--device", "tpu"], 2, "device: found 'tpu'"),
        (["x", "--kv-memory", "20K"], 6, "one request needs 2 pages of 16 tokens, 147456 bytes"),
        (["x", "--kv-memory", "lots"], 2, "--kv-memory: found 'lots'"),
        (["x", "--max-model-len", "999999"], 2, "max_model_len: found 999999"),
        (["x", "--output", "README.md"], 2, "README.md: exists already"),
        (["x", "--output", "no/such/dir/rows.jsonl"], 2, "no/such/dir: no such directory"),
        (["x", "--chat-template-kwargs", "{"], 2, "--chat-template-kwargs: found '{'"),
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


@pytest.mark.triton
def test_kernels_that_cannot_run_are_refused() -> None:
    """In a process of its own, since the interpreter is switched on in this one."""
    env = {"TRITON_INTERPRET": "0"}
    done = support.launch("generate", "x", "--kernels", "triton", "--device", "cpu", env=env)
    assert (done.code, done.out) == (5, "")
    assert "error: --kernels: " in done.err


def test_a_request_too_large_for_the_pool_exits_6_with_the_arithmetic() -> None:
    done = support.run_main("generate", "x", "-n", "2000", "--kv-memory", "1M")
    assert done.code == 6
    assert all(re.search(rf"\b{number}\b", done.err) for number in (126, 16, 2001, 8, 13)), "pages, tokens, the pool"


def test_prompts_that_are_typed_are_counted_from_1_as_headings_do() -> None:
    done = support.run_main("generate", "x", "", "-n", "1")
    assert (done.code, "error: prompt 2: " in done.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify-width", "9"], "--verify-width: found 9, expected at most 8"),
        (["--verify-width", "4", "-k", "2"], "--verify-width: found 4, expected at most 3"),
        (["--stop-token-id", "99999"], "--stop-token-id: found 99999, expected an id in [0, 2048)"),
        (["--stop-token-id", "-1"], "--stop-token-id: found -1"),
        (["--seed", "-1"], "--seed: found -1"),
        (["--seed", str(2**63)], "--seed: found 9223372036854775808"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["eval-acceptance", "--num-prompts", "1"]])
def test_settings_that_mean_nothing_are_refused(command: list[str], options: list[str], message: str) -> None:
    done = support.run_main(*command, *options)
    assert (done.code, done.out) == (2, "")
    assert f"error: {message}" in done.err


def test_an_empty_prompt_leaves_stdout_empty() -> None:
    done = support.run_main("generate", "")
    assert (done.code, done.out) == (2, "")
    assert "error: " in done.err


def test_transformers_does_not_speak_to_users(tmp_path: Path) -> None:
    """A text longer than the tokenizer says it takes is refused by us, in one line."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x = 1\n" * 3000}))
    done = support.launch("generate", "--prompts", prompts, "-n", "2")
    assert done.code == 2
    assert {line.split(" ")[0] for line in done.err.splitlines()} <= {"loading", "error:", "0"}, "0 tokens"
    assert "error: " in done.err
