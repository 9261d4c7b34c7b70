"""Sound servers of every engine and kind: the probe names no fault in them."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dflash_testing.scripted_faults import Fading, Looping, Ranks, Telling, Thinking, Timed, Wide, WithDefaults
from dflash_testing.scripted_operations import (
    Adapted,
    Failing,
    Mixed,
    Named,
    Rounded,
    Spread,
    Surprising,
    Told,
    is_long,
)
from dflash_testing.scripted_servers import STEPS, L, S, Script, V, named, probe_named, probe_script

HEALTHY: dict[str, dict[str, Any]] = {
    "vllm with counters": V,
    "vllm with each step": STEPS,
    "vllm with histograms": {**V, "reports": "summary"},
    "an earlier vllm": {**V, "release": "0.24.0"},
    "sglang": S,
    "sglang with earlier names": {**S, "old_names": True, "release": "0.5.6"},
    "sglang without metrics": {**S, "has_metrics": False},
    "llama.cpp": L,
    "llama.cpp, one request at a time": {**L, "num_slots": 1},
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


EXACT = {
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "rejection_sample_method": "block",
    "synthetic_acceptance_rates": None,
    "simulate_acc_len": -1,
}
SOUND: dict[str, Script] = {
    **{name: Script(**changes) for name, changes in HEALTHY.items()},
    "answers that start with set phrases and go on at a weak level": Fading(**S, rate=0.95, fade=0.98),
    "a penalty by default within rounding": WithDefaults(**V, penalised=0.2),
    "a draft and a lookup": Script(**L, method="draft-dflash,ngram-mod"),
    "llama.cpp of an earlier release": Script(**L, old_names=True),
    "exact thresholds": Telling(**S, told={"/server_info": EXACT}),
    "drafts as fast as none, with noise": Timed(**L, old_names=True, step_ms=5.4, noise=1.0),
    "characters of several tokens": Wide(**V),
    "all slots draft": Telling(**L, slots=(True, True)),
    "reasoning in its own field": Thinking(**S),
    "marks of the template around JSON": Script(**S, json="marks"),
    "two ranks with a cache each": Ranks(**S),
    "two answers of one token": Looping(**S, size=1),
    "counters of weeks in six digits": Rounded(**L),
    "one id for all answers": Named(**STEPS, id="cmpl-0"),
    "an id for each answer": Named(**STEPS),
    "one failure that does not come again": Failing(**S, fails=is_long, recovers=True),
    "acceptance of any rate between prompts": Spread(**S, is_even=True),
    "adapters that the draft follows": Adapted(**STEPS, has_metrics=False, adapter_rate=0.6),
    "log-probabilities of all tokens after a temperature": Told(**S, are_zero=True),
    "near-ties beside sampled requests": Mixed(**V, has_near_ties=True, loaded_split=0.1),
    "a second method with longer drafts": Surprising(**L),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_server_has_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_named(monkeypatch, SOUND[name], set())
    assert not found.attribution.is_fault


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_a_random_sound_server_has_no_fault(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    k, style = draw.choice([1, 3, 5, 7, 15]), draw.choice([V, STEPS, {**V, "reports": "summary"}, S, L])
    changes: dict[str, Any] = {
        "k": k,
        "rate": draw.uniform(0.3, 0.95),
        "block": draw.choice([1, 16, 64, 528]),
        "cache": draw.choice(["on", "untold"]),
        "has_metrics": draw.random() < 0.8 or style is V,
        "has_scores": draw.random() < 0.8,
        "split_nats": draw.choice([0.0, 0.0, 0.1, 0.2]),
        "loaded_split": draw.choice([0.0, 0.0, 0.1]),
        "json": draw.choice(["sound", "thinking", "cut", "marks", "refused"]),
        "tools": draw.choice(["sound", "absent", "cut", "refused"]),
    }
    kinds: list[Callable[..., Script]] = [Script, Thinking, Wide, partial(Looping, size=1)]
    kinds += [partial(Spread, is_even=True), partial(Told, are_zero=True), Named, partial(Adapted, adapter_rate=0.6)]
    kinds += [Ranks] if style is S else [Rounded] if style is L else []
    found = probe_script(monkeypatch, draw.choice(kinds)(**style, **changes))
    assert named(found) == set(), (changes, [(item.id, item.seen) for item in found.findings])


def test_a_low_first_position_without_another_mark_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_script(monkeypatch, Script(**V, rate=0.26))
    assert {item.id: item.severity for item in found.findings} == {"acceptance-low-everywhere": "info"}
