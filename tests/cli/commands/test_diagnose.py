"""`dflash diagnose`: one sentence with the cause and the next step, and exit 3 if it finds a cause."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_runtime.errors import UsageError
from dflash_testing.edits import falsify
from dflash_testing.raised_errors import run_or_raise
from dflash_testing.refusals import refuses
from dflash_testing.searches import shorten_search

DRAFT = fetch_directory(TINY, Role.DRAFT)
SMALL = ["--num-prompts", "8", "-n", "32", "--device", "cpu"]


FACTORS = [
    pytest.param(("taps", "rope", "mask"), id="config"),
    pytest.param((), id="all", marks=pytest.mark.slow),
]
"""Factors of the readings that a search tries: three settings of the config, or all."""


run = partial(run_or_raise, "diagnose")


def shift_taps(config: dict[str, Any]) -> None:
    config["dflash_config"]["target_layer_ids"] = [1, 3, 4, 5]


@pytest.mark.parametrize("factors", FACTORS)
def test_a_wrong_reading_is_named_with_what_to_correct(
    factors: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_search(monkeypatch, *factors)
    draft = falsify(DRAFT, tmp_path / "draft", shift_taps)
    result = run(draft, "--target", "tiny", *SMALL)
    (sentence,) = result.stdout.splitlines()
    assert result.exit_code == 3
    assert "config.json:dflash_config.target_layer_ids" in sentence
    assert "[0, 2, 3, 4]" in sentence
    assert f"dflash diagnose {draft} --target tiny" in sentence


@pytest.mark.parametrize("factors", FACTORS)
def test_nothing_is_found_in_a_sound_draft(factors: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch, *factors)
    result = run("tiny", *SMALL, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["has_cause"] is False
    assert document["rule"] is None
    assert document["next"].split() == [
        "dflash",
        "eval-acceptance",
        "tiny",
        "--target",
        "tiny",
        "--prompts",
        "FILE.jsonl",
    ]
    assert document["report"]["num_errors"] == 0


def test_an_error_that_keeps_the_pair_from_running_is_the_cause(tmp_path: Path) -> None:
    draft = falsify(DRAFT, tmp_path / "draft", lambda config: config.update(hidden_size=100))
    result = run(draft, "--target", "tiny", *SMALL)
    assert result.exit_code == 3
    assert all(text in result.stdout for text in ("fc.weight", "[192, 768]", "[100, 400]"))


def test_a_config_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    draft = falsify(DRAFT, tmp_path / "draft", lambda config: config["dflash_config"].update(target_layer_ids="all"))
    result = run(draft, "--target", "tiny", *SMALL)
    assert result.exit_code == 3
    assert result.stdout.startswith("config.json:")


def test_a_draft_that_names_no_target_needs_one(tmp_path: Path) -> None:
    draft = falsify(DRAFT, tmp_path / "draft", lambda config: None)
    with refuses(UsageError, "target-not-named"):
        run(draft, *SMALL)


def test_the_progress_names_the_reading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dflash_cli.diagnosis.reading_progress import ReadingProgress
    from dflash_cli.terminal.progress import Meter

    monkeypatch.setattr(Meter, "SECONDS", 0.0)
    with ReadingProgress() as progress:
        for index, name in enumerate(("config as it is", "rope base 10000")):
            progress(name, index, 2 + index)
    assert capsys.readouterr().err.splitlines()[-1].startswith("1/3 readings scored  rope base 10000")
