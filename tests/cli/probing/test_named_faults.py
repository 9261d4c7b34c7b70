"""Faults of docs/measurements/probe-faults.md, injected in scripted servers: the probe names them and nothing else."""

from typing import Any

import pytest

from dflash_testing.scripted_servers import STEPS, L, S, Script, V, probe_named, probe_script

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "1 vllm": ({**V, "is_engaged": False}, "draft-not-engaged"),
    "1 sglang": ({**S, "is_engaged": False}, "draft-not-engaged"),
    "1 llama.cpp": ({**L, "is_engaged": False}, "draft-not-engaged"),
    "2 counters": ({**V, "off_loaded": True}, "draft-off-under-load"),
    "2 answers": ({**S, "off_loaded": True}, "draft-off-under-load"),
    "3": ({**V, "undrafted_from": 20}, "partly-drafted"),
    "3 answers": ({**S, "undrafted_from": 20}, "partly-drafted"),
    "3 ended": ({**S, "ends_after": 9}, "partly-drafted"),
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
    "9 unsteady": ({**V, "cache": "wrong", "is_unsteady": True}, "answers-not-repeatable"),
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
    "15 llama.cpp": ({**L, "loaded_rate": 0.5}, "acceptance-falls-with-load"),
    "16": ({**V, "long_rate": 0.1}, "acceptance-falls-with-context"),
    "16 sglang": ({**S, "long_rate": 0.1}, "acceptance-falls-with-context"),
    "17": ({**V, "resets_at": 8}, "counters-reset"),
    "17 answers": ({**S, "resets_at": 12}, "counters-reset"),
    "18": ({**V, "is_shared": True}, "foreign-traffic"),
    "18 idle": ({**STEPS, "grows_alone": 50}, "foreign-traffic"),
    "11 load": ({**STEPS, "loaded_split": 3.0}, "answers-change-with-load"),
    "19": ({**V, "replicas": 2, "started_s": 1.7e9}, "several-replicas"),
    "19 counters": ({**STEPS, "replicas": 2}, "several-replicas"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, id = FAULTS[name]
    found = probe_named(monkeypatch, Script(**changes), {id})
    assert all(item.seen and item.follows and item.next for item in found.findings)


@pytest.mark.parametrize("changes", [{**V, "kv_dtype": "fp8_e4m3"}, {**S, "kv_dtype": "fp8_e5m2"}])
def test_quantised_keys_and_values_are_a_fact_and_no_fault(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probe_script(monkeypatch, Script(**changes))
    assert {item.id: item.severity for item in found.findings} == {"quantised-kv": "info"}
    assert changes["kv_dtype"] in found.findings[0].seen
