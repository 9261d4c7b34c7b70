"""Every published draft, by its config: it is read, validated, converted and run, or refused by name.

The table of docs/reference/drafts.md has the same entries. The test runs drafts with a dense Qwen3 target that has the
facts that a draft depends on; the layers of the real target do not matter to the draft.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.formats.detection import detect
from dflash_cli.formats.relatives import Relative
from dflash_cli.generation.loaded_pair import tell_notes
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.paths import ROOT
from dflash_testing.published_drafts import PUBLISHED, RUNS, PublishedDraft, table

SERVED = [item for item in PUBLISHED if item.outcome == RUNS]
REFUSED = [item for item in PUBLISHED if item.outcome != RUNS]


def write(item: PublishedDraft, folder: Path) -> tuple[Path, Path]:
    draft = support.write_checkpoint(folder / "dflash-draft", item.config, item.arrays)
    # A dense target with the heads of SMALL, which need not be the draft's.
    shape = replace(support.SMALL, target_layers=item.shape.target_layers, mask=item.shape.mask, theta=item.shape.theta)
    return draft, support.make_target(folder / "target", shape, num_hidden_layers=shape.target_layers)


@pytest.mark.parametrize("item", SERVED, ids=lambda item: item.name)
def test_it_is_read_converted_and_run(item: PublishedDraft, tmp_path: Path) -> None:
    draft, target = write(item, tmp_path)
    for command in (["inspect", draft], ["validate", draft, "--target", target]):
        outcome = invoke(*command)
        assert outcome.code == 0, outcome.out
    is_reduced = item.shape.draft_vocab != item.shape.vocab
    out = tmp_path / "out"
    to = "vllm" if is_reduced else "native"
    done = invoke("convert", draft, out, "--to", to, "--target", target, *item.options)
    assert done.code == 0, done.err
    texts = [generate(target, draft, tmp_path, *item.options), generate(target, out, tmp_path)]
    assert texts[0] == texts[1]
    assert texts[0]["token_ids"] == generate(target, None, tmp_path)["token_ids"]


def generate(target: Path, draft: Path | None, folder: Path, *options: str) -> dict[str, object]:
    """Return the token ids and acceptance lengths of one prompt."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [4, 5, 6, 7, 8]}\n')
    which = ("-k", 0) if draft is None else ("-d", draft, *options)
    done = invoke("generate", "-t", target, "-p", prompts, "-o", "-", "-n", 5, "--ignore-eos", *which)
    assert done.code == 0, done.err
    row = json.loads(done.out)
    return {key: row.get(key) for key in ("token_ids", "acceptance_lengths")}


@pytest.mark.parametrize("item", REFUSED, ids=lambda item: item.name)
def test_it_is_refused_by_name(item: PublishedDraft, tmp_path: Path) -> None:
    draft, target = write(item, tmp_path)
    is_relative = isinstance(detect(Checkpoint(draft)).format, Relative)
    assert is_relative == (item.rule == "C01")
    validated = invoke("validate", draft, "--target", target, "--json")
    assert validated.code == (5 if is_relative else 3), validated.out
    findings = [finding for finding in json.loads(validated.out)["findings"] if finding["id"] == item.rule]
    assert any(item.named in f"{finding['location']} {finding['message']}" for finding in findings), findings
    for command in (
        ["convert", draft, tmp_path / "out", "--to", "native", "--target", target],
        ["generate", "x", "-d", draft, "-t", target, "-n", "2"],
    ):
        outcome = invoke(*command)
        assert outcome.code == 5, (command, outcome.err)
        assert item.named in outcome.err, (command, outcome.err)


@pytest.mark.parametrize(
    ("kind", "scale", "is_warned"), [("gemma4_text", None, True), ("gemma4_text", 4.0, False), ("qwen3", None, False)]
)
def test_a_missing_embedding_scale_is_noted(
    kind: str, scale: float | None, is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nested = {} if scale is None else {"input_embedding_scale": scale}
    item = PublishedDraft(name="gemma", beyond="", nested=nested)
    draft, target = write(item, tmp_path)
    tell_notes(open_draft(draft), replace(open_target(target).facts, model_type=kind))
    told = capsys.readouterr().err.replace("\n", " ")
    assert ("input_embedding_scale" in told) == is_warned


def test_the_table_in_the_documents_has_the_tested_drafts() -> None:
    assert table() in (ROOT / "docs" / "reference" / "drafts.md").read_text(encoding="utf-8")
