"""Faults of parsers, gateways and states: an answer in the reasoning, other keys than a schema's, a cache of ends."""

from collections.abc import Callable
from functools import partial

import pytest

from dflash_testing.scripted_parsers import AnyJson, KeepsEnds, Swallowing
from dflash_testing.scripted_servers import STEPS, L, S, Script, V, probe_named, probe_script

LOST = "answers-in-reasoning"
FAULTS: dict[str, tuple[Callable[[], Script], str, str]] = {
    "80 sglang": (partial(Swallowing, **S), LOST, "5 of 5 chats without a tool and 2 of 2 answers to required"),
    "80 tools": (partial(Swallowing, **V, of="tools"), LOST, "2 of 2 answers to required tool calls"),
    "80 chats": (partial(Swallowing, **L, of="chats", into="reasoning"), LOST, "5 of 5 chats"),
    "80 streams": (partial(Swallowing, **STEPS, of="streams"), LOST, "2 of 5 chats without a tool and 3 of 6 answers"),
    "80 in one piece": (partial(Swallowing, **S, of="whole", content=""), LOST, "3 of 6 answers to required"),
    "80 every second": (partial(Swallowing, **L, of="every second"), LOST, "3 of 6 answers to required"),
    "80 nowhere": (partial(Swallowing, **S, into=""), "answers-empty", "5 of 5 chats without a tool and 2 of 2"),
    "82 llama.cpp": (partial(KeepsEnds, **L, cache="unused"), "prefix-cache-unused", "its answer is found"),
}
SLOW = {"80 tools", "80 chats", "80 nowhere"}
"""Variants of one rule."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_a_fault_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, id, words = FAULTS[name]
    found = probe_named(monkeypatch, make(), {id})
    assert words in found.findings[0].seen


SOUND: dict[str, Callable[[], Script]] = {
    "thoughts that the limit cuts": partial(Swallowing, **S, of="chats", ends="length"),
    "thoughts about the tool before another answer": partial(Swallowing, **V, of="tools", content="It is sunny."),
    "thoughts that lead to no call": partial(Swallowing, **L, of="tools", written="The user asks about the weather."),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_server_has_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_named(monkeypatch, SOUND[name](), set())


@pytest.mark.parametrize("is_rewritten", [True, False])
def test_other_keys_are_no_fault_of_the_draft_if_the_own_field_keeps_the_schema(
    is_rewritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = probe_script(monkeypatch, AnyJson(**V, is_rewritten=is_rewritten)).findings
    assert finding.id == "structured-output-broken"
    assert ("structured_outputs" in finding.follows) is is_rewritten
    assert "json_object" in finding.follows
