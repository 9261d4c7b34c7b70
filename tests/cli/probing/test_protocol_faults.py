"""Faults of queues, single counters, log-probabilities, chat answers and active adapters: named, and nothing else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dflash_cli.probing.counters.counter_agreement import Answered, describe_odd, is_of_others
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.served.chat_answers import read_streamed_call
from dflash_cli.probing.served.chat_protocol import stream_faults, whole_faults
from dflash_cli.probing.served.told_logprobs import ToldLogprobs
from dflash_testing.scripted_faults import WithDefaults
from dflash_testing.scripted_operations import Adapted
from dflash_testing.scripted_protocols import (
    ActiveAdapter,
    CutStreams,
    Miscounting,
    OddChats,
    OffSchema,
    PartlyTold,
    Queued,
)
from dflash_testing.scripted_servers import STEPS, L, S, Script, V, named, probe_script

FAULTS: dict[str, tuple[Callable[[], Script], str, str]] = {
    "61 vllm": (partial(Queued, **STEPS), "requests-run-in-turn", "1 running and 7 waiting"),
    "61 llama.cpp": (partial(Queued, **L, shows_queue=False), "requests-run-in-turn", "one after another"),
    "61 two at a time": (partial(Queued, **S, at_once=2), "requests-queue", "in the server's queue"),
    "62 vllm": (partial(Miscounting, **V), "counters-miscount", "rejected draft tokens"),
    "62 llama.cpp": (partial(Miscounting, **L), "counters-miscount", "rejected draft tokens"),
    "62 steps": (partial(Miscounting, **STEPS, counts_wrong="steps"), "counters-miscount", "steps"),
    "62 requests": (partial(Miscounting, **S, counts_wrong="requests"), "counters-miscount", "32 requests"),
    "62 half": (partial(Miscounting, **S, counts_wrong="half"), "counters-miscount", "512 tokens of answers"),
    "63 vllm": (partial(PartlyTold, **STEPS), "logprobs-missing", "tokens per step"),
    "63 sglang": (partial(PartlyTold, **S), "logprobs-missing", "tokens per step"),
    "63 llama.cpp": (partial(PartlyTold, **L, has_metrics=False), "logprobs-missing", "for the 128 tokens"),
    "64 llama.cpp": (partial(OddChats, **L, has_metrics=False), "chat-protocol-broken", "in one piece: function.arg"),
    "64 vllm": (partial(OddChats, **STEPS, odd="no id"), "chat-protocol-broken", "streamed: id of a tool call"),
    "64 sglang": (partial(OddChats, **S, odd="stop"), "chat-protocol-broken", "finish_reason is 'stop'"),
    "65 llama.cpp": (partial(ActiveAdapter, **L), "active-adapter-lowers-acceptance", "support.gguf at scale 1"),
    "54 sglang": (partial(Adapted, **S), "adapter-lowers-acceptance", "with sql"),
    "74 llama.cpp": (partial(CutStreams, **L, has_metrics=False), "streams-cut", "5 of 5 streams of chats end without"),
    "74 vllm": (partial(CutStreams, **STEPS, part=0.9), "streams-cut", "5 of 5"),
    "74 sglang": (partial(CutStreams, **S, cuts="every second"), "streams-cut", "3 of 5"),
    "74 bytes": (partial(CutStreams, **S, cuts="bytes"), "streams-cut", "5 of 5"),
    "75 sglang": (partial(OffSchema, **S), "tool-call-off-schema", "6 of 6 required tool calls"),
    "75 vllm": (partial(OffSchema, **STEPS, off="streams"), "tool-call-off-schema", "3 of 6"),
    "75 llama.cpp": (partial(OffSchema, **L, off="drafted"), "tool-call-off-schema", "days is a string, expected"),
    "75 keys": (partial(OffSchema, **S, arguments='{"city": 3, "when": 1}'), "tool-call-off-schema", "days is missing"),
    "14 keys": (partial(OffSchema, **S, arguments="{}", off="streams"), "tool-call-stream-broken", "'{}'"),
}


SLOW = {"61 two at a time", "62 vllm", "62 half", "63 vllm", "64 vllm", "64 sglang", "74 vllm", "74 bytes", "75 keys"}
"""Variants of other engines or of one rule."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_a_fault_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, id, words = FAULTS[name]
    found = probe_script(monkeypatch, make())
    assert named(found) == {id}, [(item.id, item.seen) for item in found.findings]
    assert words in found.findings[0].seen


@pytest.mark.parametrize("style", [STEPS, S], ids=["vllm", "sglang"])
def test_an_adapter_that_is_asked_for_is_compared_with_its_model(
    style: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probe_script(monkeypatch, Adapted(**style), served_model="sql")
    assert named(found) == {"active-adapter-lowers-acceptance"}, [(item.id, item.seen) for item in found.findings]
    assert found.server.active_adapter == "sql"


SOUND: dict[str, Script] = {
    "time shared by all requests": Queued(**STEPS, at_once=8, shares=True),
    "all requests at once": Queued(**S, at_once=8),
    "streams without a mark of their end": CutStreams(**L, cuts="mark"),
    "one call of six off its schema": OffSchema(**S, off="once"),
    "a whole number as a fraction of zero": OffSchema(**S, arguments='{"days": 3.0, "city": "Lisbon"}'),
    "an adapter at scale 0": ActiveAdapter(**L, scale=0.0),
    "an adapter that the draft follows": ActiveAdapter(**L, adapter_rate=0.7),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_server_has_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_script(monkeypatch, SOUND[name])
    assert named(found) == set(), [(item.id, item.seen) for item in found.findings]


def test_one_slot_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_script(monkeypatch, Script(**L, num_slots=1), questions=False)
    assert [(item.id, item.severity) for item in found.findings] == [("requests-run-in-turn", "info")]


class Penalised(WithDefaults):
    """Its documents show the penalty."""

    def as_document(self, path: str, document: Any) -> Any:
        if path == "/props":
            document["default_generation_settings"]["params"] |= {"repeat_penalty": 1.2, "presence_penalty": 0.0}
        if path == "/server_info" and document:
            document["preferred_sampling_params"] = {"repetition_penalty": 1.2}
        return document


@pytest.mark.parametrize("style", [L, S], ids=["llama.cpp", "sglang"])
def test_a_default_penalty_is_quoted(style: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_script(monkeypatch, Penalised(**style, penalised=1.5))
    (item,) = found.findings
    assert item.id == "default-settings-change-answers"
    assert str(found.server.own_penalties) in item.seen
    assert str(found.server.own_penalties).endswith("penalty 1.2")


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


def test_log_probabilities_are_paired_with_the_tokens_they_name() -> None:
    sound = ToldLogprobs.of([5, 6, 5], [-1.0, -2.0, -3.0], [5, 6, 5])
    assert (sound.by_place, sound.num_missing, sound.num_of_others) == ({0: -1.0, 1: -2.0, 2: -3.0}, 0, 0)
    unnamed = ToldLogprobs.of([5, 6], [-1.0, -2.0])
    assert unnamed.by_place == {0: -1.0, 1: -2.0}
    fewer = ToldLogprobs.of([7, 5, 6, 5, 8], [-1.0, -2.0, -3.0], [7, 5, 8])
    assert (fewer.by_place, fewer.num_missing) == ({0: -1.0, 4: -3.0}, 2), "5 stands at two places"
    shifted = ToldLogprobs.of([5, 6, 7], [-1.0, -2.0, -3.0], [6, 7, 8])
    assert (shifted.by_place, shifted.num_of_others) == ({}, 3)
    assert ToldLogprobs.of([5, 6], [None, -2.0]).num_missing == 1
    assert ToldLogprobs.of([5, 6, 7], [-1.0]).by_place == {}, "an entry without a name may be of any token"


OWN = Answered(num_answers=10, num_tokens=640, num_prompt_tokens=900)
SOUND_RISE: dict[str, Any] = {
    "num_drafts": 200, "num_draft_tokens": 1400, "num_accepted_tokens": 430, "per_pos_accepted": (180, 150, 100),
    "num_requests": 10, "num_tokens": 640,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words", "is_foreign"),
    [
        ({}, "", False),
        ({"num_tokens": 640 + 970}, "rejected draft tokens", False),
        ({"num_tokens": 640 + 1400}, "answers and draft tokens", False),
        ({"num_tokens": 640 + 900}, "prompts and answers", False),
        ({"num_tokens": 200}, "verify steps", False),
        ({"num_tokens": 900, "num_requests": None}, "", True),
        ({"num_tokens": 640 + 970, "num_requests": None}, "rejected draft tokens", False),
        ({"num_requests": 20}, "20 requests", False),
        ({"num_requests": 12}, "", True),
        ({"num_requests": 20, "num_tokens": 1280}, "", True),
        ({"num_drafts": 400, "num_tokens": 1280}, "", True),
        ({"num_drafts": 400}, "400 steps", False),
    ],
)
def test_one_counter_that_differs_is_wrong_and_several_are_of_other_clients(
    changes: dict[str, Any], words: str, is_foreign: bool
) -> None:
    risen = ServerCounters(**SOUND_RISE | changes)
    odd = describe_odd(risen, OWN)
    assert (bool(odd), is_of_others(risen, OWN)) == (bool(words), is_foreign)
    assert words in (odd or "")
    assert describe_odd(risen, OWN) is None or not is_of_others(risen, OWN)


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


def test_an_answer_that_is_no_stream_is_not_cut() -> None:
    assert not read_streamed_call('{"choices": []}').is_cut
    with pytest.raises(ValueError, match="Unterminated"):
        read_streamed_call('data: {"choices\n\n')
