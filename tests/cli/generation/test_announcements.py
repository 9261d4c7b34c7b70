"""The limit of low acceptance, and the command that is suggested then."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from dflash_cli.generation.announcements import announce_loading, is_low, suggest_diagnosis
from dflash_runtime.metrics import AcceptanceCounts


def counts(length: float, num_drafted: int = 7, num_steps: int = 100) -> AcceptanceCounts:
    return AcceptanceCounts(num_drafted, num_drafts=num_steps, num_accepted_tokens=round((length - 1) * num_steps))


@pytest.mark.parametrize(
    ("length", "num_drafted", "low"),
    [(1.99, 7, True), (2.01, 7, False), (3.9, 15, True), (4.1, 15, False), (1.45, 3, True), (1.6, 3, False),
     (1.2, 1, True), (1.3, 1, False)],
)  # fmt: skip
def test_low_is_a_quarter_of_the_block_or_one_and_a_half(length: float, num_drafted: int, low: bool) -> None:
    assert is_low(counts(length, num_drafted)) is low


def test_acceptance_over_few_steps_is_not_called_low() -> None:
    assert not is_low(counts(1.0, num_steps=19))
    assert is_low(counts(1.0, num_steps=20))
    assert not is_low(AcceptanceCounts(7))


def test_the_next_command_has_the_real_names(capsys: pytest.CaptureFixture[str]) -> None:
    suggest_diagnosis(counts(1.1), {"draft": "my draft", "target": "org/model"})
    assert capsys.readouterr().err.endswith(": dflash diagnose 'my draft' --target org/model\n")
    suggest_diagnosis(counts(3.1), {"draft": "d", "target": "t"})
    suggest_diagnosis(counts(1.1), {"draft": None, "target": "t"})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("draft", "options", "words"),
    [("org/d", {}, ["draft", "org/d", "target", "org/t"]), (None, {"device": "cpu"}, ["target", "org/t", "cpu"]),
     ("org/d", {"plain": True}, ["target", "org/t"])],
)  # fmt: skip
def test_loading_is_announced(
    draft: str | None, options: Mapping[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    announce_loading({"draft": draft, "target": "org/t"}, **options)
    assert re.findall(r"draft|target|cpu|org/\S*", capsys.readouterr().err) == words
