"""Faults of servers that a probe names, and sound servers in which it names none.

The list of faults is docs/measurements/probe-faults.md. Each server is a script with the protocol of its engine.
"""

from typing import Any

import pytest

import dflash_cli
from dflash_cli.probing import probe_options, served_answers
from dflash_cli.probing.server_probe import Probed
from dflash_testing.scripted_servers import Script, ScriptedClient

NUM_PROMPTS, ANSWER_LEN = 16, 64
PROMPTS = [[20 + place for place in range(8 + index)] + [200 + index] for index in range(NUM_PROMPTS)]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_answers, "COUNTER_PAUSE_S", 0.0)


def probe(monkeypatch: pytest.MonkeyPatch, script: Script, **options: Any) -> Probed:
    monkeypatch.setattr(probe_options, "HttpClient", lambda *args, **kwargs: ScriptedClient(script))
    return dflash_cli.probe(url="scripted", prompts=PROMPTS, max_new_tokens=ANSWER_LEN, **options)


def named(found: Probed) -> set[str]:
    """Ids of errors and warnings."""
    return {item.id for item in found.findings if item.severity != "info"}


V, S, L = ({"style": style} for style in ("vllm", "sglang", "llama.cpp"))
STEPS = {**V, "reports": "detailed"}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "1 vllm": ({**V, "is_engaged": False}, "draft-not-engaged"),
    "1 sglang": ({**S, "is_engaged": False}, "draft-not-engaged"),
    "1 llama.cpp": ({**L, "is_engaged": False}, "draft-not-engaged"),
    "2 counters": ({**V, "off_loaded": True}, "draft-off-under-load"),
    "2 answers": ({**S, "off_loaded": True}, "draft-off-under-load"),
    "3": ({**V, "undrafted_from": 20}, "partly-drafted"),
    "3 answers": ({**S, "undrafted_from": 20}, "partly-drafted"),
    "4": ({**V, "drafted": 3}, "draft-capped"),
    "4 answers": ({**STEPS, "drafted": 3}, "draft-capped"),
    "4 sglang": ({**S, "drafted": 3}, "draft-capped"),
    "5": ({**V, "max_accepted": 2, "rate": 0.9}, "acceptance-stops"),
    "6": ({**S, "rate": 0.03}, "acceptance-near-zero"),
    "6 llama.cpp": ({**L, "rate": 0.03}, "acceptance-near-zero"),
    "7": ({**V, "cache": "off", "block": 528}, "prefix-cache-off"),
    "8": ({**S, "cache": "unused"}, "prefix-cache-unused"),
    "8 vllm": ({**V, "cache": "unused"}, "prefix-cache-unused"),
    "9": ({**V, "cache": "wrong"}, "prefix-cache-changes-answers"),
    "9 sglang": ({**S, "cache": "wrong"}, "prefix-cache-changes-answers"),
    "9 llama.cpp": ({**L, "cache": "wrong"}, "prefix-cache-changes-answers"),
    "10": ({**V, "cache": "draftless"}, "prefix-cache-lowers-acceptance"),
    "10 sglang": ({**S, "cache": "draftless"}, "prefix-cache-lowers-acceptance"),
    "11": ({**V, "split_nats": 3.0}, "answers-not-greedy"),
    "11 sglang": ({**S, "split_nats": 3.0}, "answers-not-greedy"),
    "11 llama.cpp": ({**L, "split_nats": 3.0}, "answers-not-greedy"),
    "12": ({**L, "json": "broken with drafts"}, "structured-output-broken"),
    "12 vllm": ({**V, "json": "broken"}, "structured-output-broken"),
    "13": ({**V, "json": "undrafted"}, "structured-output-not-drafted"),
    "13 sglang": ({**S, "json": "undrafted"}, "structured-output-not-drafted"),
    "14": ({**V, "tools": "stream loses text"}, "tool-call-stream-broken"),
    "14 broken": ({**S, "tools": "as text"}, "tool-call-broken"),
    "15": ({**STEPS, "loaded_rate": 0.55}, "acceptance-falls-with-load"),
    "15 totals": ({**V, "loaded_rate": 0.5}, "acceptance-falls-with-load"),
    "16": ({**V, "long_rate": 0.1}, "acceptance-falls-with-context"),
    "16 sglang": ({**S, "long_rate": 0.1}, "acceptance-falls-with-context"),
    "17": ({**V, "resets_at": 8}, "counters-reset"),
    "18": ({**V, "is_shared": True}, "foreign-traffic"),
    "18 idle": ({**STEPS, "grows_alone": 50}, "foreign-traffic"),
    "11 load": ({**STEPS, "loaded_split": 3.0}, "answers-change-with-load"),
    "19": ({**V, "replicas": 2, "started_s": 1.7e9}, "several-replicas"),
    "19 counters": ({**STEPS, "replicas": 2}, "several-replicas"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, id = FAULTS[name]
    found = probe(monkeypatch, Script(**changes))
    assert named(found) == {id}, [item.seen for item in found.findings]
    assert all(item.seen and item.follows and item.next for item in found.findings)


HEALTHY: dict[str, dict[str, Any]] = {
    "vllm with counters": V,
    "vllm with each step": STEPS,
    "vllm with histograms": {**V, "reports": "summary"},
    "an earlier vllm": {**V, "release": "0.24.0"},
    "sglang": S,
    "sglang with earlier names": {**S, "old_names": True, "release": "0.5.6"},
    "sglang without metrics": {**S, "has_metrics": False},
    "llama.cpp": L,
    "llama.cpp without metrics": {**L, "has_metrics": False},
    "K 3": {**V, "k": 3},
    "K 15": {**STEPS, "k": 15, "rate": 0.85},
    "low but honest acceptance": {**V, "rate": 0.25},
    "high acceptance": {**S, "rate": 0.95},
    "no log-probabilities": {**V, "has_scores": False},
    "near-ties": {**S, "split_nats": 0.2},
    "near-ties of cached prompts": {**V, "cache": "wrong", "repeat_nats": 0.2},
    "a cache that is not shown": {**V, "cache": "untold"},
    "large blocks of a hybrid": {**V, "block": 1056},
    "blocks larger than a prompt": {**V, "block": 4112, "cache": "unused"},
    "no tools and no schemas": {**V, "tools": "refused", "json": "refused"},
    "a model that thinks first": {**S, "json": "thinking", "tools": "absent"},
    "answers that do not end": {**V, "json": "cut", "tools": "cut"},
    "draft lengths chosen by the server": {**V, "adaptive": True},
    "a known start": {**V, "started_s": 1.7e9},
    "quantised keys and values, with near-ties": {**V, "kv_dtype": "fp8_e4m3", "split_nats": 0.4},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_sound_server_has_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe(monkeypatch, Script(**HEALTHY[name]))
    assert named(found) == set(), [(item.id, item.seen) for item in found.findings]
    assert not found.attribution.is_fault
