"""Faults of queues, single counters, log-probabilities, chat answers and active adapters: named, and nothing else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

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
from dflash_testing.scripted_servers import STEPS, L, S, Script, V, probe_named, probe_script

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
    found = probe_named(monkeypatch, make(), {id})
    assert words in found.findings[0].seen


@pytest.mark.parametrize("style", [STEPS, S], ids=["vllm", "sglang"])
def test_an_adapter_that_is_asked_for_is_compared_with_its_model(
    style: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probe_named(monkeypatch, Adapted(**style), {"active-adapter-lowers-acceptance"}, served_model="sql")
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
    probe_named(monkeypatch, SOUND[name], set())


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
