"""Several answers have headings on a terminal, but not in a pipe."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dflash_cli.generation.answers import Answer, Event
from dflash_cli.generation.outputs import POSITION_STYLES, RowSink, TextSink, trace_lines, visible
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_runtime.scheduling.request import DraftStep, FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput


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
    monkeypatch.setattr("dflash_cli.terminal.console.is_terminal", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("terminal")
def test_a_heading_stands_before_each_of_several_answers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = prompts(2)
    text = shown(rows, [finished(rows[1], "two"), finished(rows[0], "one")], capsys)
    first, one, second, two = text.splitlines()
    assert (one, two) == ("one", "two")
    assert [re.findall(r"\d", heading) for heading in (first, second)] == [["1", "2"], ["2", "2"]]


@pytest.mark.usefixtures("terminal")
def test_turns_have_headings_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PromptRow(index=0, kind="turns", value=["a", "b"])]
    text = shown(rows, [finished(rows[0], "one"), finished(rows[0], "two", turn=1)], capsys)
    first, one, second, two = text.splitlines()
    assert (one, two) == ("one", "two")
    assert [re.findall(r"turn (\d)", heading) for heading in (first, second)] == [["1"], ["2"]]


@pytest.mark.usefixtures("terminal")
def test_one_answer_has_no_heading(capsys: pytest.CaptureFixture[str]) -> None:
    rows = prompts(1)
    assert shown(rows, [finished(rows[0], "one")], capsys) == "one\n"


def test_a_pipe_has_no_headings(capsys: pytest.CaptureFixture[str]) -> None:
    rows = prompts(2)
    assert shown(rows, [finished(rows[0], "one"), finished(rows[1], "two")], capsys) == "one\ntwo\n"


def test_text_of_a_later_row_waits_for_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PromptRow(index=index, kind="prompt", value="") for index in range(2)]
    sink = TextSink(rows)
    sink(Event(rows[1], (1,), "second", answer(rows[1])))
    sink(Event(rows[0], (1,), "first "))
    assert capsys.readouterr().out == "first "
    sink(Event(rows[0], (1,), "row", answer(rows[0])))
    assert capsys.readouterr().out == "row\nsecond\n"


def test_rows_wait_for_earlier_rows() -> None:
    rows = [PromptRow(index=index, kind="prompt", value="") for index in range(3)]
    written: list[str] = []
    sink = RowSink(rows, written.append, 7)
    for index in (2, 0, 1):
        sink(Event(rows[index], (1,), "x", answer(rows[index])))
        assert len(written) == {2: 0, 0: 1, 1: 3}[index]
    assert [json.loads(line)["index"] for line in written] == [0, 1, 2]


def test_text_of_tokens_hides_nothing_and_acts_on_nothing() -> None:
    class Pieces(Tokenizer):
        def __init__(self) -> None:
            pass

        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join([" a", "\n\t", "\x1b[2J", "\u202e\u00e9", "", "\\"][item] for item in token_ids)

    shown = [visible((token,), Pieces()) for token in range(6)]
    assert shown == [" a", "\\n\\t", "\\x1b[2J", "\\u202eé", "<4>", "\\\\"]
    assert visible((3, 5), None) == "3 5"


def test_a_trace_has_each_accepted_token_in_the_style_of_its_position() -> None:
    steps = (DraftStep(start=0, draft_ids=tuple(range(10, 19)), num_accepted=8, num_committed=9),)
    found = replace(answer(prompts(1)[0]).output, token_ids=(*range(10, 18), 99), drafts=steps)
    (line,) = trace_lines(Answer(prompts(1)[0], 0, found, None), None)
    assert "".join(text for text, _ in line) == "8/9 [10 11 12 13 14 15 16 17][99][18]"
    styles = [style for _, style in line[2:10]]
    assert styles == [*POSITION_STYLES, POSITION_STYLES[-1], POSITION_STYLES[-1]]


def answer(row: PromptRow) -> Answer:
    output = RequestOutput(
        index=row.index, prompt_token_ids=(1,), token_ids=(1,), finish_reason=FinishReason.STOP,
        acceptance_lengths=(), committed_lengths=(),
    )  # fmt: skip
    return Answer(row, 0, output, "x")
