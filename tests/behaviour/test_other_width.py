"""Drafts of another width than their target have their own embedding and head, and every command uses them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_cli.checkpoints.opening import open_draft
from dflash_runtime.errors import TensorMismatch
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke

SHAPE = replace(support.SMALL, hidden=24)
TARGET_WIDTH = 16


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return support.make_target(tmp_path / "target", target_hidden_size=support.REMOVED)


def make(path: Path, *, owned: bool = True, width: int = TARGET_WIDTH) -> Path:
    arrays = support.body_arrays(SHAPE)
    arrays["fc.weight"] = arrays["fc.weight"][:, : len(SHAPE.taps) * TARGET_WIDTH]
    if owned:
        rows = (SHAPE.vocab, SHAPE.hidden)
        arrays |= support.random_arrays({"embed_tokens.weight": rows, "lm_head.weight": rows}, seed=7)
    return support.write_checkpoint(path, support.native_config(SHAPE, target_hidden_size=width), arrays)


def test_it_is_sound_and_runs(target: Path, tmp_path: Path) -> None:
    draft = make(tmp_path / "dflash-draft")
    outcome = invoke("validate", draft, "--target", target, "--engine", "vllm", "--level", "weights")
    assert outcome.code == 0, outcome.out
    assert "lm_head" not in outcome.out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [4, 5, 6]}\n')
    ids = []
    for plain in ((), ("-k", 0)):
        args = ("generate", "-d", draft, "-t", target, "-p", prompts, "-o", "-", "-n", 6, "--ignore-eos", *plain)
        ran = invoke(*args)
        assert ran.code == 0, ran.err
        ids.append(json.loads(ran.out)["token_ids"])
    assert len(ids[0]) == 6
    assert ids[0] == ids[1]


def test_without_its_own_weights_it_is_refused(target: Path, tmp_path: Path) -> None:
    draft = make(tmp_path / "draft", owned=False)
    findings = errors(draft, target)
    assert [finding["id"] for finding in findings] == ["N01"]
    assert all(name in findings[0]["message"] for name in ("embed_tokens.weight", "lm_head.weight"))
    with pytest.raises(TensorMismatch) as refused:
        open_draft(draft).select_tensors()
    assert refused.value.missing == ("embed_tokens.weight", "lm_head.weight")
    outcome = invoke("generate", "x", "-d", draft, "-t", target, "-n", "2")
    assert outcome.code == 3
    assert refused.value.message in outcome.err


def test_a_width_that_is_not_the_targets_is_a_misfit(target: Path, tmp_path: Path) -> None:
    (finding,) = [item for item in errors(make(tmp_path / "draft", width=20), target) if item["id"] == "P01"]
    assert finding["location"] == "config.json:target_hidden_size"
    assert re.findall(r"\d+", finding["message"]) == ["20", "16"]


def errors(draft: Path, target: Path) -> list[dict[str, str]]:
    """Return the errors that `validate` finds in a pair."""
    outcome = invoke("validate", draft, "--target", target, "--json")
    assert outcome.code == 3
    return [item for item in json.loads(outcome.out)["findings"] if item["severity"] == "error"]


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_dialects_that_state_the_width_keep_its_weights(to: str, target: Path, tmp_path: Path) -> None:
    draft, out = make(tmp_path / "draft"), tmp_path / "out"
    names = ("--target", target, "--target-name", "a/b", "--verify", "logits")
    outcome = invoke("convert", draft, out, "--to", to, *names)
    assert outcome.code == 0, outcome.err
    assert open_draft(out).config.target_hidden_size == TARGET_WIDTH
    before, after = open_draft(draft).checkpoint, open_draft(out).checkpoint
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert np.array_equal(before.load(name).numpy(), after.load(name).numpy())


@pytest.mark.parametrize("to", ["native", "sglang", "mlx"])
def test_other_dialects_cannot_state_it(to: str, target: Path, tmp_path: Path) -> None:
    outcome = invoke("convert", make(tmp_path / "draft"), tmp_path / "out", "--to", to, "--target", target)
    assert outcome.code == 5
    assert "target_hidden_size 16" in outcome.err


def test_a_replay_needs_no_weights_of_its_target(target: Path, tmp_path: Path) -> None:
    draft, prompts, folder = make(tmp_path / "draft"), tmp_path / "prompts.jsonl", tmp_path / "dump"
    prompts.write_text("".join(f'{{"prompt_token_ids": [4, 5, {token}]}}\n' for token in range(6, 9)))
    options = ("-p", prompts, "-n", 24, "--ignore-eos")
    dumped = invoke("dump", target, "--taps-from", draft, *options, "--output", folder)
    assert dumped.code == 0, dumped.err
    replayed = invoke("eval-acceptance", draft, "--mode", "replay", "--dump", folder, "--json")
    run = invoke("eval-acceptance", draft, "-t", target, *options, "--json")
    assert replayed.code == run.code == 0, replayed.err + run.err
    found, expected = (json.loads(outcome.out) for outcome in (replayed, run))
    assert found["num_drafts"] == expected["num_drafts"] > 20
    assert found["histogram"] == expected["histogram"]
