"""`dflash schema`: every document that a command prints or writes follows its schema.

`run_main` and `invoke` also check every document that other tests print.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.documents.kinds import KINDS, read_schema
from dflash_cli.main import COMMANDS
from dflash_testing.command_line import run_main
from dflash_testing.documents import check_document

FEW = ["--num-prompts", "2", "-n", "8"]
DOCUMENTS: dict[str, list[str]] = {
    "eval-acceptance": ["eval-acceptance", "tiny", "--num-prompts", "12", "-n", "8"],
    "bench": ["bench", "tiny", "--concurrency", "1", "-n", "16", "--rounds", "1"],
    "tune": ["tune", "tiny", *FEW, "--num-speculative-tokens", "7", "--step-times", "times.json"],
    "generate": ["generate", "def f", "-n", "8", "--check-lossless", "--trace", "1"],
    "generate plainly": ["generate", "def f", "-n", "4", "-k", "0"],
    "inspect": ["inspect", "tiny", "--tensors"],
    "inspect two": ["inspect", "tiny", "tiny:reduced"],
    "validate": ["validate", "tiny:reduced", "--target", "tiny", "--engine", "vllm,sglang"],
    "convert": ["convert", "tiny", "out", "--to", "speculators", "--target", "tiny"],
    "convert dry": ["convert", "tiny", "out", "--to", "speculators", "--dry-run"],
    "serve-command": ["serve-command", "tiny", "--target", "tiny", "--engine", "vllm"],
    "explain": ["explain", "C20"],
    "explain all": ["explain"],
    "env": ["env"],
    "lock": ["lock", "tiny"],
    "dump": ["dump", "tiny", "--taps", "0,2", "--output", "out", *FEW],
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_printed_documents_follow_their_schema(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("times.json").write_text('{"plain": {"1": 5}, "resized": {"7": {"1": 6}}}')
    document = json.loads(run_main(*DOCUMENTS[name], "--json").out)
    assert (document["kind"], document["schema_version"]) == (name.split()[0], 1)
    check_document(document)


def test_written_documents_follow_their_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_main("lock", "tiny")
    run_main("convert", "tiny", "out", "--to", "speculators", "--verify", "logits", "--target", "tiny")
    run_main("eval-acceptance", "tiny", *FEW, "--output", "rows.jsonl")
    run_main("generate", "def f", "-n", "8", "--handoff-out", "handed")
    (handed,) = Path("handed").iterdir()
    texts = {
        "handoff": (handed / "handoff.json").read_text(),
        "lock": Path("dflash.lock").read_text(),
        "conversion": Path("out", "conversion.json").read_text(),
        "answers": Path("rows.jsonl").read_text().splitlines()[0],
    }
    for kind, text in texts.items():
        document = json.loads(text)
        assert document["kind"] == kind
        check_document(document)


def test_a_key_that_is_missing_or_not_in_the_schema_is_noticed() -> None:
    document: dict[str, Any] = json.loads(run_main("validate", "tiny", "--json").out)
    for wrong in (document | {"extra": 1}, document | {"passed": "yes"}, {**document, "findings": [{}]}):
        with pytest.raises(AssertionError):
            check_document(wrong)
    del document["num_rules"]
    with pytest.raises(AssertionError) as caught:
        check_document(document)
    assert "'num_rules'" in str(caught.value)


def test_every_command_that_prints_a_document_has_a_schema() -> None:
    printing = {name for name, entry in COMMANDS.items() if entry.has_json}
    assert printing <= KINDS.keys()


def test_a_schema_is_printed_whole_and_all_are_listed() -> None:
    listed = run_main("schema").out.splitlines()
    assert [line.split()[0] for line in listed] == list(KINDS) == sorted(KINDS)
    printed = json.loads(run_main("schema", "eval-acceptance").out)
    assert printed == read_schema("eval-acceptance")
    assert {"Interval", "EvaluationRun", "Identity", "ConversationCounts"} <= set(printed["$defs"])
    wrong = run_main("schema", "evaluation")
    assert (wrong.code, wrong.field) == (2, "KIND")
    assert wrong.error_id == "unknown-kind"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_names_classes_that_state_it_and_describe_every_part(kind: str) -> None:
    assert {item.KIND for item in KINDS[kind].loaded} == {kind}  # type: ignore[attr-defined]
    schema = read_schema(kind)
    assert schema["title"] == KINDS[kind].title
    assert all("description" in part for part in schema.get("$defs", {}).values())


def test_listing_the_kinds_loads_no_class_of_them() -> None:
    code = "import sys; from dflash_cli.commands import schema; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "dflash_cli.acceptance.acceptance_report"} & set(loaded)
