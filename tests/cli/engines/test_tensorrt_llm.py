"""TensorRT-LLM: verdicts as its code was read, "not known" for code that was not read, and its commands."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_cli.engines.engine_names import parse_engines
from dflash_cli.rules.subject import ValidationPlan
from dflash_cli.rules.validator import validate_draft
from dflash_testing import checkpoints as support
from dflash_testing import habits
from dflash_testing.command_line import run_main
from dflash_testing.families import FAMILIES, write_draft
from dflash_testing.kinds import CASES
from dflash_testing.rule_cases.base import MIXED, SLIDING, Case, build, top, without

TABLE = {
    "plain": "serves",
    "model-prefix": "drops",
    "other-prefix": "drops",
    "encoder-names": "drops",
    "fused-projections": "drops",
    "interleaved-rope": "drops",
    "interleaved-rope-by-its-name": "drops",
    "gemma-norms": "drops",
    "nested-style": "drops",
    "unsorted-taps": "drops",
    "repeated-taps": "drops",
    "use-swa": "drops",
    "mask-pickle": "drops",
    "mask-safetensors": "drops",
}
"""Habit -> the outcome. Source: modeling_dflash.py at 009d8fa4 and speculative/dflash.py at 00679c66."""


def verdict_on(draft: Path) -> Any:
    (verdict,) = validate_draft(ValidationPlan(draft=draft, engines=parse_engines("tensorrt-llm"))).verdicts
    return verdict


@pytest.mark.parametrize("habit", TABLE)
def test_habits_of_exporters(habit: str, tmp_path: Path) -> None:
    assert verdict_on(habits.make(tmp_path / "dflash-draft", habit)).outcome == TABLE[habit]


@pytest.mark.parametrize(
    ("case", "causal"),
    [
        (Case(), (False, False)),
        (Case(shape=MIXED, config=without("is_causal")), (True, False)),
        (Case(shape=SLIDING, config=without("is_causal")), (True, True)),
        (Case(config=top(is_causal=True)), (False, False)),
        (Case(shape=SLIDING, config=top(use_sliding_window=False)), (False, False)),
    ],
)
def test_causality_follows_the_windows(case: Case, causal: tuple[bool, ...], tmp_path: Path) -> None:
    assert verdict_on(build(case, tmp_path / "dflash-draft")).causal == causal


def test_the_speculators_dialect_is_not_read(tmp_path: Path) -> None:
    verdict = verdict_on(support.make_speculators(tmp_path / "draft"))
    assert (verdict.outcome, verdict.reasons) == ("stops", ("S14",))


@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_families_whose_code_was_not_read_are_not_known(name: str, tmp_path: Path) -> None:
    """Neither "serves" nor "does not serve"; other engines keep their verdicts, and no command is printed."""
    draft = write_draft(tmp_path / "draft", FAMILIES[name](support.SMALL), support.SMALL)
    target = support.make_target(tmp_path / "target")
    done = run_main("validate", draft, "--target", target, "--engine", "tensorrt-llm,vllm", "--json")
    assert done.code == 0, done.out
    own, other = json.loads(done.out)["verdicts"]
    assert (own["outcome"], own["reasons"], other["outcome"]) == ("unknown", [], "serves")
    assert "not known" in own["text"]
    refused = run_main("serve-command", draft, "--target", target, "--engine", "tensorrt-llm")
    assert refused.error is not None
    assert (refused.code, refused.error.id) == (5, "no-serve-command")


def test_other_kinds_are_not_known(tmp_path: Path) -> None:
    case = next(item for item in CASES.values() if item.kind == "eagle3")
    verdict = verdict_on(case.write(tmp_path / "draft"))
    assert verdict.outcome == "unknown"
    assert "not known" in verdict.text


def test_the_command_states_what_the_server_would_look_for(tmp_path: Path) -> None:
    """A draft that reaches less far than its target limits the length."""
    draft = support.make_native(tmp_path / "it's a draft", max_position_embeddings=32)
    target = support.make_target(tmp_path / "target")
    done = run_main("serve-command", draft, "--target", target, "--engine", "tensorrt-llm", "--json")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["serve_commands"]
    write, serve = (shlex.split(line) for line in found["commands"])
    assert write[:2] == ["printf", "%s\\n"]
    assert yaml.safe_load("\n".join(write[2:-2])) == {
        "speculative_config": {
            "decoding_type": "DFlash", "speculative_model": str(draft), "max_draft_len": 3,
            "target_layer_ids": [0, 2], "mask_token_id": 31,
        },
        "kv_cache_config": {"enable_block_reuse": False},
    }  # fmt: skip
    assert serve == ["trtllm-serve", str(target), "--config", write[-1], "--max_seq_len", "32"]
    assert found["num_draft_tokens"] == 3
