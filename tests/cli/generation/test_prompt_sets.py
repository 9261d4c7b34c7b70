"""Named sets of prompts: the content of the bundled mix, the set of each target, and sets of chats."""

import hashlib
import re
from collections import Counter
from pathlib import Path

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.prompt_sets import PromptSet, default_prompts, gather_prompts, read_prompts
from dflash_cli.generation.prompts import PromptRow, make_row, sample_rows
from dflash_cli.generation.tokenizer import find_tokenizer
from dflash_runtime.errors import RequestError, UsageError
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses

SHARES = {"code": 12, "mathematics": 12, "chat": 12, "extraction": 10, "multilingual": 10, "long": 8}


def test_the_mix_is_64_different_prompts_of_six_categories() -> None:
    mix = default_prompts("some/target")
    assert (mix.name, mix.version, mix.for_chat) == ("mix-64", "1", True)
    assert Counter(row.category for row in mix.rows) == SHARES
    assert len({row.value for row in mix.rows}) == len({row.id for row in mix.rows}) == 64
    assert all(row.kind == "prompt" for row in mix.rows)
    assert all(len(row.value) > 3800 for row in mix.rows if row.category == "long")
    assert {row.category for row in mix.rows[:6]} == set(SHARES)
    path = ROOT / "dflash_cli" / "mix" / "mix-64.jsonl"
    assert mix.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_size < 200_000
    assert "CC0" in (path.parent / "README.md").read_text(encoding="utf-8")


def test_no_two_prompts_of_the_mix_share_a_sentence() -> None:
    sentences = [
        sentence
        for row in default_prompts("some/target").rows
        for sentence in set(re.findall(r"[^.!?\n]{40,}[.!?]", row.value))
    ]
    assert len(sentences) == len(set(sentences)) > 300


def test_the_bundled_target_keeps_its_own_prompts() -> None:
    for target in (None, "tiny"):
        bundled = default_prompts(target)
        assert (bundled.name, bundled.version, bundled.for_chat) == ("bundled", None, False)
        assert {row.category for row in bundled.rows} == {"numpy", "stdlib", "torch", "transformers"}


def test_a_file_is_text_unless_a_chat_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n')
    given, tokenizer = read_prompts(str(path)), find_tokenizer(tiny_directory() / "target")
    assert given is not None
    assert given.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not given.settle_chat(tokenizer, chat=None)
    assert given.settle_chat(tokenizer, chat=True)
    mix = default_prompts("some/target")
    assert mix.settle_chat(tokenizer, chat=None)
    assert not mix.settle_chat(tokenizer, chat=False)
    assert not mix.settle_chat(None, chat=None)


def test_as_text_a_conversation_is_its_first_question() -> None:
    rows = [
        PromptRow(index=0, kind="turns", value=["first", "second"]),
        PromptRow(index=1, kind="prompt", value="alone"),
    ]
    assert [(row.kind, row.value) for row in PromptSet(name="x", rows=rows).as_text().rows] == [
        ("prompt", "first"), ("prompt", "alone"),
    ]  # fmt: skip


def test_prompts_come_from_one_place() -> None:
    with refuses(UsageError, "two-prompt-sources"):
        read_prompts("rows.jsonl", "gsm8k")
    with refuses(UsageError, "option-needs-another", field="--dataset-format"):
        read_prompts(None, None, "vllm")
    with refuses(UsageError, "two-prompt-sources"):
        gather_prompts(["x"], str(tiny_directory() / "prompts.jsonl"))
    assert read_prompts(None) is None


def test_an_empty_file_of_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    with refuses(RequestError, "no-rows", path=tmp_path / "rows.jsonl"):
        read_prompts(str(tmp_path / "rows.jsonl"))


def test_a_sample_is_stratified_or_the_head_or_any() -> None:
    rows = [PromptRow(index=n, kind="prompt", value=str(n), category="a" if n < 90 else "b") for n in range(100)]
    assert [row.index for row in sample_rows(rows, 3, seed=0, sample="head")] == [0, 1, 2]
    shares = [Counter(row.category for row in sample_rows(rows, 10, seed=s, sample="random"))["b"] for s in range(20)]
    assert len(set(shares)) > 1
    assert {Counter(row.category for row in sample_rows(rows, 10, seed=s))["b"] for s in range(20)} == {1}


def test_a_reference_is_kept_where_it_is_one_value() -> None:
    found = [make_row({"prompt": "x", "reference": value}, "x:1", 0).reference for value in ("7", 7, ["7"], None)]
    assert found == ["7", "7", None, None]
