"""Chat answers: their types by OpenAI's protocol, and streams that are cut."""

from typing import Any

import pytest

from dflash_cli.probing.served.chat_answers import read_streamed_call, verb_of_stream
from dflash_cli.probing.served.chat_protocol import stream_faults, whole_faults

CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def changed(place: str, value: object) -> dict[str, Any]:
    """An answer with one tool call and one changed field."""
    call: dict[str, Any] = {**CALL, "function": dict(CALL["function"])}
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice: dict[str, Any] = {"message": message, "finish_reason": "tool_calls"}
    holders = {"choice": choice, "message": message, "call": call, "function": call["function"]}
    if place:
        holder, _, name = place.partition(".")
        holders[holder][name] = value
    return {"choices": [choice]}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("", None, ""),
        ("message.content", "", ""),
        ("message.tool_calls", None, ""),
        ("message.tool_calls", [], ""),
        ("choice.finish_reason", "length", ""),
        ("message.content", [{"type": "text"}], "content is a list"),
        ("message.role", "tool", "role"),
        ("message.tool_calls", CALL, "tool_calls is an object"),
        ("message.tool_calls", [CALL, CALL], "share an id"),
        ("call.id", "", "id of a tool call"),
        ("call.id", None, "id of a tool call"),
        ("call.type", None, "type of a tool call"),
        ("function.name", None, "function.name"),
        ("function.arguments", {"x": 1}, "arguments is an object"),
        ("function.arguments", None, "arguments is null"),
        ("function.arguments", '"{}"', "encoded twice"),
        ("choice.finish_reason", "stop", "finish_reason"),
        ("choice.finish_reason", None, "finish_reason is null"),
    ],
)
def test_a_field_of_another_type_than_the_protocol_says_is_found(place: str, value: object, words: str) -> None:
    found = whole_faults(changed(place, value))
    assert bool(found) == bool(words)
    assert words in "".join(found)


FIRST = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
REST = {"index": 0, "function": {"arguments": "{}"}}


@pytest.mark.parametrize(
    ("pieces", "reason", "words"),
    [
        ([FIRST, REST], "tool_calls", ""),
        ([FIRST, {**REST, "id": None, "type": None}], "tool_calls", ""),
        ([FIRST, REST, {**FIRST, "index": 1, "id": "b"}], "tool_calls", ""),
        ([], "stop", ""),
        ([FIRST, REST, {**FIRST, "index": 1}], "tool_calls", "share an id"),
        ([FIRST, {"function": {"arguments": "{}"}}], "tool_calls", "lacks its index"),
        ([{**FIRST, "id": None}, REST], "tool_calls", "id of a tool call"),
        ([{**FIRST, "type": "tool"}, REST], "tool_calls", "type of a tool call"),
        ([FIRST, {"index": 0, "function": {"arguments": {"x": 1}}}], "tool_calls", "arguments is an object"),
        ([FIRST, REST], "stop", "finish_reason"),
        ([FIRST, REST], None, "finish_reason is null"),
    ],
)
def test_a_streamed_field_of_another_type_is_found(pieces: list[Any], reason: str | None, words: str) -> None:
    deltas: list[Any] = [{"role": "assistant", "content": None}, *({"tool_calls": [piece]} for piece in pieces), {}]
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    events[-1]["choices"][0]["finish_reason"] = reason
    found = stream_faults([*events, {"choices": [], "usage": {}}])
    assert bool(found) == bool(words)
    assert words in "".join(found)


STREAM = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


@pytest.mark.parametrize(
    ("more", "is_cut"),
    [
        ("", True),
        (": ping\r\n\r\n", True),
        ('data: {"choices": [{"del', True),
        ("data: [DONE]\n\n", False),
        ('data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n', False),
        ('data: {"error": {"message": "out of memory"}}\n\n', False),
        ('error: {"message": "out of memory"}\n\n', False),
    ],
)
def test_a_stream_without_any_end_is_cut(more: str, is_cut: bool) -> None:
    found = read_streamed_call(STREAM + more)
    assert (found.is_cut, found.text) == (is_cut, "a")


def test_a_stream_may_hold_line_separators_inside_a_text() -> None:
    assert read_streamed_call(STREAM.replace('"a"', '"a\u2028\x85b"')).text == "a\u2028\x85b"


def test_an_answer_that_is_no_stream_is_not_cut() -> None:
    assert not read_streamed_call('{"choices": []}').is_cut
    with pytest.raises(ValueError, match="Unterminated"):
        read_streamed_call('data: {"choices\n\n')


@pytest.mark.parametrize(
    ("streamed", "verb"), [("abcef", "loses"), ("abcdefef", "doubles"), ("abcdefx", "changes"), ("abdcef", "changes")]
)
def test_a_stream_loses_doubles_or_changes_text(streamed: str, verb: str) -> None:
    assert verb_of_stream("abcdef", streamed) == verb
