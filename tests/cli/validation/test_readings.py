"""`--level run`: a draft whose config is falsified is caught by what it accepts, and a sound one is not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.evaluation.statistics import Interval
from dflash_cli.validation.reading_runner import AnchorFirst
from dflash_cli.validation.readings import (
    AlternativeReading,
    ReadingResult,
    ReadingSearch,
    SearchBudget,
    alternative_readings,
    find_specials,
)
from dflash_cli.validation.report import Report
from dflash_cli.validation.rule import all_rules
from dflash_cli.validation.run_settings import RunSettings
from dflash_cli.validation.subject import Subject
from dflash_cli.validation.validator import ValidationRequest, validate_draft
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_testing import checkpoints as support
from dflash_testing.pairs import bundled_draft, random_draft, random_target

TARGET = fetch_directory(TINY, Role.TARGET)


def run(draft: Path, *factors: str, num_prompts: int = 16, prompts: Any = None, max_new_tokens: int = 48) -> Report:
    budget = SearchBudget(
        num_prompts=num_prompts, max_new_tokens=max_new_tokens, factors=frozenset(factors) if factors else None
    )
    settings = RunSettings(EngineConfig(max_num_requests=32), budget, lambda *_: None, lambda: prompts)
    return validate_draft(
        ValidationRequest(draft=draft, target=TARGET, target_reference=TINY, level="run", run=settings)
    )


def falsify(path: Path, change: Callable[[dict[str, Any]], object], name: str = TINY) -> Path:
    """The bundled draft with another config."""
    shutil.copytree(fetch_directory(name, Role.DRAFT), path)
    config = json.loads((path / "config.json").read_text())
    change(config)
    support.write_config(path, config)
    return path


@pytest.mark.parametrize("num_prompts", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tiny", "tiny:reduced"])
def test_sound_drafts_pass(name: str, num_prompts: int) -> None:
    report = run(fetch_directory(name, Role.DRAFT), num_prompts=num_prompts)
    assert report.findings == ()
    assert report.search is not None
    assert report.search.acceptance_len > 2
    assert {item.reading.factor for item in report.search.results} == {"taps", "causality", "anchor", "rope", "mask"}
    assert all(item.difference < 0 for item in report.search.results)


@pytest.mark.parametrize(
    ("rule", "factor", "location", "change", "message"),
    [
        (
            "R01", "taps", "config.json:dflash_config.target_layer_ids",
            lambda config: config["dflash_config"].update(target_layer_ids=[1, 3, 4, 5]),
            "with tapped layers one earlier [0, 2, 3, 4] a step commits",
        ),
        ("R04", "rope", "config.json:rope_theta", lambda config: config.update(rope_theta=10000.0), "rope base 1e+06"),
        (
            "R03", "mask", "config.json:dflash_config.mask_token_id",
            lambda config: config["dflash_config"].update(mask_token_id=4), "mask <|mask|> (3)",
        ),
    ],
    ids=["taps", "rope", "mask"],
)  # fmt: skip
def test_a_falsified_config_is_caught(
    rule: str, factor: str, location: str, change: Any, message: str, tmp_path: Path
) -> None:
    report = run(falsify(tmp_path / "draft", change), factor)
    found = [item for item in report.findings if item.id == rule]
    assert [(item.severity, item.location) for item in found] == [("error", location)]
    assert message in found[0].message
    assert "16 prompts" in found[0].message
    assert report.fails()


def test_a_causal_flag_is_caught(tmp_path: Path) -> None:
    """The smallest effect of all: the bundled draft loses 4 % of its accepted tokens."""
    draft = falsify(tmp_path / "draft", lambda config: config.update(is_causal=True))
    report = run(draft, "causality", num_prompts=32, max_new_tokens=96)
    assert [item.id for item in report.findings if item.severity == "error"] == ["R02"]


def test_through_the_command(tmp_path: Path) -> None:
    """With prompts of ids, exit 3, the table on stdout and progress on stderr."""
    draft = falsify(tmp_path / "draft", lambda config: config.update(rope_theta=10000.0))
    rows = [{"prompt_token_ids": list(range(30 + index, 60 + index))} for index in range(6)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    outcome = support.invoke(
        "validate", draft, "--target", TINY, "--level", "run", "--prompts", prompts, "-n", 24, "--device", "cpu"
    )
    assert outcome.code == 3
    assert "R04 error" in outcome.out
    assert "95% interval" in outcome.out
    assert outcome.err.startswith(f"loading draft {draft} and target tiny on cpu ...\n")


def test_a_pair_that_cannot_run_is_not_run(tmp_path: Path) -> None:
    draft = falsify(tmp_path / "draft", lambda config: config.update(hidden_size=100))
    report = run(draft)
    assert report.search is None
    assert "not run" in report.notes[0]
    assert "P01" in report.notes[0]


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 4"):
        run(fetch_directory(TINY, Role.DRAFT), prompts=[[1, 2, 3]])


def test_no_target_is_refused(tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft")
    assert support.invoke("validate", draft, "--level", "run").code == 2


def test_readings_change_one_factor() -> None:
    config, target = bundled_draft().config, open_target(TARGET)
    for reading in alternative_readings(config, target, find_specials(target)):
        names = {"taps": "target_layer_ids", "causality": "causal", "rope": "rope", "mask": "mask_token_id"}
        key = names.get(reading.factor)
        kept = replace(reading.config, **{key: getattr(config, key)}) if key is not None else reading.config
        assert kept == config, reading.name
        assert key is None or getattr(reading.config, key) != getattr(config, key)


def test_special_tokens_put_masks_first() -> None:
    assert next(iter(find_specials(open_target(TARGET)).items())) == (3, "<|mask|>")


def test_anchor_first_reads_the_rows_before() -> None:
    """Row i of the other reading is row i - 1 of the usual one, and the anchor's row is new."""
    draft = random_draft(random_target())
    ids, positions = torch.tensor([[5, 96, 96, 96]]), torch.arange(10, 14)[None]

    def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        query, keys, values = (item.transpose(0, 1)[None] for item in (query, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        return out[0].transpose(0, 1)

    usual, shifted = draft.logits(ids, positions, attend), AnchorFirst(draft).logits(ids, positions, attend)
    torch.testing.assert_close(shifted[:, 1:], usual[:, :-1])
    assert not torch.allclose(shifted[:, 0], usual[:, 0])


def found(rule_id: str, search: ReadingSearch) -> list[str]:
    rule = next(rule for rule in all_rules() if rule.id == rule_id)
    subject = Subject(path=Path("draft"), config=support.native_config(), search=search)
    return [item.message for item in rule.findings(subject)]


def test_anchor_first_that_accepts_more_is_reported() -> None:
    reading = AlternativeReading(
        "anchor", "predictions from the last committed token on", bundled_draft().config, is_anchor_first=True
    )
    better = ReadingResult(reading, 2.8, 1.7, Interval(1.2, 2.1, 0.95))
    same = ReadingResult(reading, 1.2, 0.1, Interval(-0.1, 0.3, 0.95))
    assert "a step commits 2.80 tokens" in found("R05", ReadingSearch(16, 1000, 1.1, (better,)))[0]
    assert found("R05", ReadingSearch(16, 1000, 1.1, (same,))) == []


def test_a_draft_that_predicts_nothing_is_reported() -> None:
    assert "1.02 tokens per step over 16 prompts" in found("R06", ReadingSearch(16, 1000, 1.02, ()))[0]
    assert found("R06", ReadingSearch(16, 1000, 1.4, ())) == []
