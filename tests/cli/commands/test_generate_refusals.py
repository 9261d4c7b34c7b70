"""Refusals of `dflash generate`: one line with the fault, the documented exit code, and no result."""

import json
import re
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_kernels import suite
from dflash_runtime.kv_transfer.prefix_store import PrefixStore
from dflash_testing import checkpoints as support
from dflash_testing.command_line import launch, run_main


def test_json_and_rows_on_stdout_exclude_each_other() -> None:
    done = run_main("generate", "x", "--json", "--output", "-")
    assert (done.code, done.out) == (2, "")
    assert (done.error_id, done.field) == ("two-results-on-stdout", "--output")


def test_other_forms_of_prompt_files_are_answered_with_how_to_change_them(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    for text, id, hint in (
        ('[{"prompt": "x"}]', "json-not-an-object", "jq -c '.[]'"),
        ('{"question": "x"}', "not-one-prompt", "prompt"),
    ):
        prompts.write_text(text)
        done = run_main("generate", "--prompts", prompts)
        assert (done.code, done.error_id) == (2, id)
        assert f"error: {prompts}:1: " in done.err
        assert hint in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "fields"),
    [
        ([], 2, {"id": "no-prompt"}),
        (["x", "--prompts", "y"], 2, {"id": "two-prompt-sources"}),
        (["--prompts", "absent.jsonl"], 4, {"id": "no-such-file", "path": Path("absent.jsonl")}),
        (["x", "--draft", "absent-dir", "--target", "tiny"], 4, {}),
        (["x", "--draft", "tiny", "--target", "tiny:reduced"], 2, {}),
        (["x", "--target", "tiny"], 2, {}),
        (["x", "-k", "8"], 2, {"field": "num_draft_tokens", "found": 8}),
        (["x", "--top-p", "0"], 2, {"field": "--top-p", "found": 0.0}),
        (["x", "--device", "tpu"], 2, {"field": "--device", "found": "tpu"}),
        (["x", "--kv-memory", "20K"], 6, {"field": "kv_memory_bytes", "found": 20480, "expected": "147456 bytes"}),
        (["x", "--kv-memory", "lots"], 2, {"field": "--kv-memory", "found": "lots"}),
        (["x", "--max-model-len", "999999"], 2, {"field": "max_model_len", "found": 999_999}),
        (["x", "--output", "README.md"], 2, {"id": "output-exists", "path": Path("README.md")}),
        (["x", "--output", "no/such/dir/rows.jsonl"], 2, {"id": "no-parent-directory", "path": Path("no/such/dir")}),
        (["x", "--tree-candidates", "3"], 2, {"id": "option-needs-another", "field": "--tree-candidates"}),
        (["x", "--tree", "4", "--verify-width", "auto"], 2, {"id": "options-exclude-each-other"}),
        (["x", "--tree", "4", "--draft", "tiny:dspark"], 5, {"id": "tree-of-markov-draft", "field": "--tree"}),
        (["x", "--chat-template-kwargs", "{"], 2, {"field": "--chat-template-kwargs", "found": "{"}),
    ],
)
def test_bad_input_ends_in_one_line_and_its_exit_code(
    arguments: list[str], code: int, fields: dict[str, object]
) -> None:
    done = run_main("generate", *arguments)
    assert done.code == code
    assert {name: getattr(done.error, name) for name in fields} == fields
    first = next(line for line in done.err.splitlines() if not line.startswith("loading "))
    assert first.startswith("error: ")
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("option", "value"), [("--num-speculative-tokens", "8"), ("--max-model-len", "999999"), ("--device", "tpu")]
)
def test_a_wrong_field_of_the_engines_config_is_shown_as_its_option(option: str, value: str) -> None:
    done = run_main("generate", "x", option, value)
    assert done.code == 2
    assert f"error: {option}: " in done.err


@pytest.mark.triton
def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the interpreter, which this process has switched on."""
    monkeypatch.setattr(suite, "IS_INTERPRETED", False)
    done = run_main("generate", "x", "--kernels", "triton", "--device", "cpu")
    assert (done.code, done.out) == (5, "")
    assert "error: --kernels: " in done.err


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("head_dim", "options", "id"),
    [
        (16, ["--dtype", "float64"], "dtype-not-computed"),
        (520, [], "head-size-not-computed"),
    ],
)
def test_attention_that_the_kernels_do_not_compute_is_refused(
    tmp_path: Path, head_dim: int, options: list[str], id: str
) -> None:
    shape = replace(support.SMALL, head_dim=head_dim)
    draft, target = support.make_native(tmp_path / "draft", shape), support.make_target(tmp_path / "target", shape)
    pair = ["--draft", draft, "--target", target, "--device", "cpu", "--kernels", "triton"]
    done = run_main("generate", "x", *pair, *options)
    assert done.error is not None
    assert (done.code, done.out, done.error.id) == (5, "", id)


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {
        "is_available": True, "device_count": 1, "get_device_capability": (7, 5), "get_device_name": "old",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    done = run_main("generate", "x", "--device", "cuda")
    assert done.error is not None
    assert (done.code, done.error.id) == (5, "gpu-too-old")


def test_a_request_too_large_for_the_pool_exits_6_with_the_arithmetic() -> None:
    done = run_main("generate", "x", "-n", "2000", "--kv-memory", "1M")
    assert done.code == 6
    assert all(re.search(rf"\b{number}\b", done.err) for number in (126, 16, 2001, 8, 13)), "pages, tokens, the pool"


def test_statistics_are_left_out_if_no_prompt_was_answered() -> None:
    failed, mixed = run_main("generate", ""), run_main("generate", "", "x", "-n", "1")
    assert (failed.code, mixed.code) == (2, 2)
    assert "0 tokens" not in failed.err
    assert "1 tokens, " in mixed.err or "1 token, " in mixed.err


def test_prompts_that_a_store_does_not_keep_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime logs it. A warning that is only logged reaches the user too."""
    refused: Future[None] = Future()
    refused.set_exception(OSError("no room"))
    monkeypatch.setattr(PrefixStore, "keep", lambda *_: refused)
    done = run_main("generate", "x = 1; " * 20, "-n", "1", "--prefix-store", tmp_path / "store")
    assert (done.code, done.err.count("warning: ")) == (0, 1)
    assert "no room" in done.err


def test_prompts_that_are_typed_are_counted_from_1_as_headings_do() -> None:
    done = run_main("generate", "x", "", "-n", "1")
    assert (done.code, "error: prompt 2: " in done.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (["--verify-width", "9"], "8"),
        (["--verify-width", "4", "-k", "2"], "3"),
        (["--stop-token-id", "99999"], "2048"),
        (["--stop-token-id", "-1"], "0"),
        (["--seed", "-1"], "0"),
        (["--seed", str(2**63)], str(2**63 - 1)),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["eval-acceptance", "--num-prompts", "1"]])
def test_impossible_settings_are_refused(command: list[str], options: list[str], limit: str) -> None:
    done = run_main(*command, *options)
    assert (done.code, done.out, done.field) == (2, "", options[0])
    assert done.error is not None
    assert done.error.found == int(options[1])
    assert limit in re.findall(r"\d+", str(done.error.expected))


def test_an_empty_prompt_leaves_stdout_empty() -> None:
    done = run_main("generate", "")
    assert (done.code, done.out) == (2, "")
    assert "error: " in done.err


def test_transformers_does_not_speak_to_users(tmp_path: Path) -> None:
    """A text longer than the tokenizer's limit is refused in one line, without a warning of transformers."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x = 1\n" * 3000}))
    done = launch("generate", "--prompts", prompts, "-n", "2")
    assert done.code == 2
    assert {line.split(" ")[0] for line in done.err.splitlines()} <= {"loading", "error:", "0"}, "0 tokens"
    assert "error: " in done.err
