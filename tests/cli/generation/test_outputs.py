"""Several answers on a terminal are told apart; in a pipe nothing is added to them."""

import json

import pytest

from dflash_cli.generation.answers import Answer, Event, plural
from dflash_cli.generation.outputs import RowSink, TextSink
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.scheduling.request import FinishReason, RequestOutput


def finished(row: PromptRow, text: str, turn: int = 0) -> Event:
    output = RequestOutput(
        index=row.index,
        prompt_token_ids=(1,),
        token_ids=(2,),
        finish_reason=FinishReason.STOP,
        acceptance_lengths=(),
        committed_lengths=(),
    )
    return Event(row, (2,), text, Answer(row, turn, output, text))


def prompts(count: int) -> list[PromptRow]:
    return [PromptRow(index=index, kind="prompt", value="x") for index in range(count)]


def shown(rows: list[PromptRow], events: list[Event], capsys: pytest.CaptureFixture[str]) -> str:
    sink = TextSink(rows)
    for event in events:
        sink(event)
    return capsys.readouterr().out


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_cli.console.is_terminal", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("terminal")
def test_a_heading_stands_before_each_of_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = prompts(2)
    text = shown(rows, [finished(rows[1], "two"), finished(rows[0], "one")], capsys)
    assert text == "--- prompt 1 of 2 ---\none\n--- prompt 2 of 2 ---\ntwo\n"


@pytest.mark.usefixtures("terminal")
def test_turns_have_headings_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PromptRow(index=0, kind="turns", value=["a", "b"])]
    text = shown(rows, [finished(rows[0], "one"), finished(rows[0], "two", turn=1)], capsys)
    assert text == "--- prompt 1 of 1, turn 1 of 2 ---\none\n--- prompt 1 of 1, turn 2 of 2 ---\ntwo\n"


@pytest.mark.usefixtures("terminal")
def test_one_answer_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    rows = prompts(1)
    assert shown(rows, [finished(rows[0], "one")], capsys) == "one\n"


def test_a_pipe_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    rows = prompts(2)
    assert shown(rows, [finished(rows[0], "one"), finished(rows[1], "two")], capsys) == "one\ntwo\n"


def test_one_is_singular() -> None:
    assert [plural(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_text_of_a_later_row_waits_for_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PromptRow(index=index, kind="prompt", value="") for index in range(2)]
    sink = TextSink(rows)
    sink(Event(rows[1], (1,), "second", answer(rows[1])))
    sink(Event(rows[0], (1,), "first "))
    assert capsys.readouterr().out == "first "
    sink(Event(rows[0], (1,), "row", answer(rows[0])))
    assert capsys.readouterr().out == "row\nsecond\n"


def test_rows_wait_for_those_before_them() -> None:
    rows = [PromptRow(index=index, kind="prompt", value="") for index in range(3)]
    written: list[str] = []
    sink = RowSink(rows, written.append)
    for index in (2, 0, 1):
        sink(Event(rows[index], (1,), "x", answer(rows[index])))
        assert len(written) == {2: 0, 0: 1, 1: 3}[index]
    assert [json.loads(line)["index"] for line in written] == [0, 1, 2]


def answer(row: PromptRow) -> Answer:
    output = RequestOutput(
        index=row.index, prompt_token_ids=(1,), token_ids=(1,), finish_reason=FinishReason.STOP,
        acceptance_lengths=(), committed_lengths=(),
    )  # fmt: skip
    return Answer(row, 0, output, "x")
