"""`dflash eval-acceptance` on sets of prompts with a name, and under several conditions in one run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.acceptance import acceptance_report
from dflash_cli.acceptance.exact_match import final_number
from dflash_cli.checkpoints.references import tiny_directory
from dflash_testing.command_line import Outcome, run_main

SWITCH = "{% if enable_thinking is defined and not enable_thinking %}{{ '# no thoughts\n' }}{% endif %}"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target under another name, with a template that reads enable_thinking."""
    folder = tmp_path_factory.mktemp("pair") / "other"
    shutil.copytree(tiny_directory() / "target", folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + SWITCH)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short prompts, the fewest for which there is an interval."""
    path = tmp_path_factory.mktemp("prompts") / "rows.jsonl"
    lines = [{"prompt": f"def f{n}(x):\n    return x + {n}\n\ndef g{n}(", "category": "ab"[n % 2]} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


def run(*arguments: object) -> Outcome:
    return run_main("eval-acceptance", "tiny", *arguments, "--num-resamples", "200")


def document(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def test_another_target_is_measured_on_the_mix_and_says_so(other: Path, tmp_path: Path) -> None:
    result, report = tmp_path / "result.json", tmp_path / "report.md"
    asked = ["--target", other, "--num-prompts", "3", "--sample", "head", "-n", "4"]
    found = document(*asked)
    result.write_text(json.dumps(found))
    assert run_main("report", result, "-o", report).code == 0
    assert report.read_text().splitlines()[2].endswith(", on mix-64**")
    assert "\nthe first 3 of 64 " in report.read_text()
    assert "- prompts.version: `1`" in report.read_text()
    assert found["settings"]["chat"] is True
    assert found["prompts"]["sample"] == "head"
    assert found["prompts"]["sample_seed"] is None
    assert (found["prompts"]["name"], found["prompts"]["version"], found["prompts"]["is_bundled"]) == (
        "mix-64", "1", False,
    )  # fmt: skip
    assert len(found["prompts"]["sha256"]) == 64
    assert set(found["categories"]) == {"code", "mathematics", "chat"}


def test_without_a_template_the_mix_is_asked_as_text_and_that_is_said(other: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(other, base)
    (base / "chat_template.jinja").unlink()
    asked = ["--target", base, "--num-prompts", "2", "--sample", "head", "-n", "4"]
    done = run(*asked, "--json")
    assert "questions-as-text" in done.notices
    found = json.loads(done.out)
    assert found["settings"]["chat"] is False
    assert "mix-64" in found["prompts"]["warning"]


def test_the_bundled_target_keeps_its_own_prompts(tmp_path: Path) -> None:
    """With any draft."""
    shutil.copytree(tiny_directory() / "draft", tmp_path / "mine")
    done = run_main("eval-acceptance", tmp_path / "mine", "-t", "tiny", "--num-prompts", "4", "-n", "8", "--json")
    found = json.loads(done.out)
    assert (found["prompts"]["name"], found["prompts"]["is_bundled"], found["settings"]["chat"]) == (
        "bundled", True, False,
    )  # fmt: skip


def test_thinking_on_and_off_are_two_conditions_of_the_same_prompts(other: Path, prompts: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    asked = ["--target", other, "--prompts", prompts, "--chat", "-n", "4", "--thinking", "on,off", "--output", rows]
    found = document(*asked)
    on, off = found["conditions"]
    assert (on["name"], off["name"], on["num_conversations"], off["num_pairs"]) == (
        "thinking on", "thinking off", 12, 12,
    )  # fmt: skip
    assert on["difference"] is None
    assert off["difference"] == pytest.approx(off["acceptance_len"] - on["acceptance_len"])
    assert (off["difference_interval"], "12" in off["difference_no_interval"]) == (None, True)
    assert off["prompt_len"] > on["prompt_len"]
    assert (found["num_conversations"], found["num_drafts"]) == (12, on["num_drafts"] + off["num_drafts"])
    assert [item["condition"] for item in found["conversations"]].count("thinking off") == 12
    assert found["categories"]["a"]["num_conversations"] == 6
    lines = [json.loads(line) for line in rows.read_text().splitlines()[1:]]
    assert {line["condition"] for line in lines} == {"thinking on", "thinking off"}
    assert {line["prompt_index"] for line in lines} == set(range(12))

    whole = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(whole[:7]))
    again = document(*asked, "--resume")
    assert sorted(rows.read_text().splitlines()) == sorted(line.rstrip("\n") for line in whole)
    assert again["conditions"] == found["conditions"]
    compared = run_main("compare", rows, rows)
    assert compared.code == 0
    assert "12 prompts" in compared.out  # a prompt counts once, under any number of conditions
    (tmp_path / "found.json").write_text(json.dumps(found))
    from_document = run_main("compare", tmp_path / "found.json", rows, "--json")
    assert json.loads(from_document.out)["comparisons"][0]["verdict"] == "same"


def test_one_table_has_a_line_for_each_condition(other: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []

    def find(counts: Any, conversations: Any, settings: Any) -> list[Any]:
        judged.append(len(conversations))
        return []

    monkeypatch.setattr(acceptance_report, "find_shapes", find)
    asked = ["--target", other, "--prompts", prompts, "--chat", "-n", "2", "--thinking", "off,on"]
    text = run(*asked, "--context-lengths", "80,100").out
    assert text.splitlines()[0].endswith(", over 4 conditions")
    table = text[text.index("\nby condition\n") + 1 :].split("\n\n")[0].splitlines()[1:]
    assert [line.split("  ")[0] for line in table] == [
        "condition", "thinking off, 80", "thinking on, 80", "thinking off, 100", "thinking on, 100",
    ]  # fmt: skip
    assert all(len(line) <= 80 for line in table)
    assert [len(re.findall(r" [+-]\d", line)) for line in table] == [0, 0, 1, 1, 1], "12 prompts have no intervals"
    assert set(judged) == {12}, "the shape is that of the first condition"


def test_a_gate_holds_under_every_condition(other: Path, prompts: Path) -> None:
    asked = ["--target", other, "--prompts", prompts, "--chat", "-n", "4", "--thinking", "on,off"]
    done = run(*asked, "--min-acceptance", "7.9")
    assert (done.code, done.error_id) == (3, "acceptance-too-low")
    assert str(done.field).startswith("thinking on: ")


def test_contexts_have_exactly_the_length_that_was_asked_for(tmp_path: Path) -> None:
    prompts = tmp_path / "rows.jsonl"
    texts = ["def f(x):", "x = 1\n" * 80, "import os\n"]  # the second has more than 256 tokens and fewer than 512
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    found = document("--prompts", prompts, "-n", "4", "--context-lengths", "256,512")
    short, long = found["conditions"]
    assert [short["context_len"], long["context_len"]] == [short["prompt_len"], long["prompt_len"]] == [256, 512]
    assert (found["prompts"]["num_cut"], found["prompts"]["num_too_long"]) == (1, 0)
    assert (short["num_conversations"], long["num_conversations"]) == (3, 3)
    assert found["context"]["falls"] == []
    assert found["context"]["no_test"].startswith("3 distinct prompts"), "three prompts show no fall"
    assert [mark["num_tokens"] for mark in found["context"]["marks"]] == [2048]
    done = run("--prompts", prompts, "-n", "4", "--context-lengths", "256")
    assert "\n1 prompt cut " in done.out
    assert "\nno comparison: only one length" in done.out
    assert "2,048 the draft's positions" in done.out
    long = [{"role": "system", "content": "be brief " * 40}, {"role": "user", "content": "hi"}]
    with prompts.open("a") as rows:
        rows.write(json.dumps({"messages": long}) + "\n")
    found = document("--prompts", prompts, "-n", "1", "--context-lengths", "16")
    assert (found["prompts"]["num_cut"], found["prompts"]["num_too_long"]) == (1, 1)


def test_a_context_that_the_pair_does_not_read_is_counted_and_reported(tmp_path: Path) -> None:
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"prompt": "import os"}\n')
    asked = ["--prompts", prompts, "-n", "4", "--context-lengths", "256,4k", "--json"]
    done = run(*asked)
    assert done.code == 2
    assert "prompts-failed" in done.notices
    assert "error: 2 of 4 " in done.err
    found = json.loads(done.out)
    assert [item["num_failed"] for item in found["conditions"]] == [0, 2]
    assert {item["condition"] for item in found["failed"]} == {"4k"}
    assert run(*asked, "--allow-failed").code == 0


@pytest.mark.parametrize(
    ("options", "id", "field"),
    [
        (["--thinking", "on,off"], "thinking-without-template", "--thinking"),
        (["--thinking", "on,off", "--chat"], "thinking-ignored", "--thinking"),
        (["--thinking", "on,"], "usage-error", "--thinking"),
        (["--context-lengths", "1x"], "usage-error", "--context-lengths"),
        (["--context-lengths", "2", "--chat"], "prompts-too-long", "--context-lengths"),
        (["--exact-match", "both"], "no-reference-numbers", "--exact-match"),
        (["--dataset", "gsm8k"], "two-prompt-sources", None),
    ],
)
def test_impossible_conditions_are_refused(options: list[str], id: str, field: str | None, prompts: Path) -> None:
    done = run("--prompts", prompts, "-n", "4", *options)
    assert (done.code, done.error_id, done.field) == (2, id, field)


def test_a_row_of_token_ids_takes_no_filler(tmp_path: Path) -> None:
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2]}\n')
    done = run("--prompts", prompts, "--context-lengths", "256")
    assert done.code == 2
    assert (done.error_id, done.field) == ("padding-needs-text", "--context-lengths")
    assert f"error: {prompts}:1: " in done.err


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up rows in the layout of GSM8K. Four of them have the number that the bundled pair answers."""
    folder = tmp_path_factory.mktemp("gsm8k")
    rows = [{"question": f"PRIMES = [2, 3, 5, 7, 1{n}, ", "answer": "#### 0"} for n in range(1, 9)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    asked = ["--dataset", f"gsm8k={folder}", "--dataset-format", "vllm", "--raw", "-n", "24"]
    assert run(*asked, "--output", answers).code == 0
    texts = [json.loads(line)["text"] for line in sorted(answers.read_text().splitlines()[1:])]
    for row, text in zip(rows[:4], texts, strict=False):
        row["answer"] = f"steps\n#### {final_number(text) or 0}"
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_final_number_is_scored_with_the_draft_and_without(gsm8k: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    asked = ["--dataset", f"gsm8k={gsm8k}:8", "--dataset-format", "vllm", "--raw", "-n", "24", "--output", rows]
    done = run(*asked, "--exact-match", "both", "--json")
    found = json.loads(done.out)
    assert f" length {found['acceptance_len']:.2f}, " in done.err
    (match,) = found["exact_match"]
    assert match["num_scored"] == 8
    assert match["num_correct"] >= 1
    plain = match["plain"]
    assert (plain["num_pairs"], plain["num_correct"], plain["num_same_text"]) == (8, match["num_correct"], 8)
    assert (plain["num_only_draft"], plain["num_only_plain"], plain["difference"], plain["p_value"]) == (0, 0, 0, 1)
    assert found["prompts"]["dataset"] == {
        "source": str(gsm8k), "commit": None, "files": ["test.jsonl"], "subset": "main", "format": "vllm",
    }  # fmt: skip
    lines = [json.loads(line) for line in rows.read_text().splitlines()[1:]]
    assert [line.get("is_plain", False) for line in lines].count(True) == 8
    assert all(line["verify_widths"] == [] for line in lines if line.get("is_plain"))

    # The answers with the draft equal the answers of a run without plain decoding, which can resume from this file.
    alone = document(*asked, "--exact-match", "draft", "--resume")
    for key in ("acceptance_len", "num_drafts", "histogram", "num_conversations"):
        assert alone[key] == found[key]
    assert alone["exact_match"][0]["plain"] is None
    text = run(*asked, "--exact-match", "both", "--resume").out
    assert "\nexact match " in text
    assert ": 8 of 8\n" in text
    assert document(*asked, "--exact-match", "none", "--resume")["exact_match"] == []
    compared = run_main("compare", rows, rows)
    assert compared.code == 0
    assert "8 prompts" in compared.out


def test_other_commands_take_a_dataset_too(gsm8k: Path, tmp_path: Path) -> None:
    asked = ["--dataset", f"gsm8k={gsm8k}:2", "--raw", "-n", "4"]
    generated = run_main("generate", *asked, "--json")
    assert generated.code == 0
    assert len(json.loads(generated.out)["rows"]) == 2
    dumped = run_main("dump", "tiny", "--taps", "1", *asked, "--output", tmp_path / "dump")
    assert dumped.code == 0, dumped.err
    assert "2 answers written" in dumped.err
    refused = run_main("generate", "x", *asked)
    assert (refused.code, refused.error_id) == (2, "two-prompt-sources")


@pytest.mark.parametrize("option", ["--dataset=gsm8k", "--thinking=on,off", "--context-lengths=1k"])
def test_a_dump_has_its_own_prompts(option: str, tmp_path: Path) -> None:
    done = run("--mode", "replay", "--dump", tmp_path, option)
    assert (done.code, done.error_id, done.field) == (2, "options-exclude-each-other", option.partition("=")[0])
    assert "--mode replay" in done.err


def test_sampled_text_is_the_same_with_and_without_the_draft(gsm8k: Path) -> None:
    """A prompt draws the same random numbers under every condition."""
    asked = ["--dataset", f"gsm8k={gsm8k}:4", "--dataset-format", "vllm", "--raw", "-n", "16", "--temperature", "0.8"]
    (match,) = document(*asked, "--exact-match", "both")["exact_match"]
    assert match["plain"]["num_same_text"] == match["plain"]["num_pairs"] == 4


def test_an_unknown_dataset_is_refused_before_anything_is_loaded() -> None:
    done = run("--dataset", "gsm9k")
    assert done.code == 2
    assert done.err.startswith("error: --dataset gsm9k: no such dataset")
