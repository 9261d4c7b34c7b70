"""Faults that depend on the request, on the place in an answer or on what the server tells: named, and nothing else.

Ten of them are of the first blind set of docs/measurements/probe-faults.md.
"""

from typing import Any

import pytest

from dflash_testing.scripted_faults import Fading, OddAnswers, SecondTurn, Telling, WithDefaults
from dflash_testing.scripted_servers import STEPS, L, S, Script, V, named, probe_script

OTHER_TARGET: dict[str, Any] = {**S, "first_rate": 0.24, "rate": 0.24}
INFO = "/server_info"
NAMES = {"model_path": "org/Chat-8B-Thinking", "speculative_draft_model_path": "org/Chat-8B-Instruct-DFlash"}


def lookup(style: str) -> Telling:
    if style == "sglang":
        return Telling(**S, rate=0.05, told={INFO: {"speculative_algorithm": "NGRAM"}})
    params = {"speculative.types": ["ngram-simple", "ngram-mod"], "speculative.n_max": 7}
    return Telling(**L, ends_after=9, told={"/props": {"default_generation_settings": {"params": params}}})


FAULTS: dict[str, tuple[Script, set[str]]] = {
    "21 steps": (Fading(**STEPS), {"acceptance-falls-within-answers"}),
    "21 counters": (Fading(**V), {"acceptance-falls-within-answers"}),
    "21 sglang": (Fading(**S), {"acceptance-falls-within-answers"}),
    "21 llama.cpp": (Fading(**L), {"acceptance-falls-within-answers"}),
    "21 llama.cpp without metrics": (Fading(**L, has_metrics=False), {"acceptance-falls-within-answers"}),
    "21 ends": (Fading(**L, fade=1.0, ends_at=24), {"acceptance-falls-within-answers"}),
    "22 without a draft": (
        Script(**V, reports="summary", replicas=2, unlike={"has_draft": False}),
        {"several-replicas", "unlike-replicas"},
    ),
    "22 other K": (Script(**S, replicas=2, unlike={"k": 3}), {"several-replicas", "unlike-replicas"}),
    "23": (WithDefaults(**V, penalised=0.6), {"default-settings-change-answers"}),
    "23 sglang": (WithDefaults(**S, penalised=1.5), {"default-settings-change-answers"}),
    "23 llama.cpp": (WithDefaults(**L, penalised=0.6), {"default-settings-change-answers"}),
    "24": (WithDefaults(**V, undrafted=("defaults",)), {"default-settings-not-drafted"}),
    "24 sampled": (WithDefaults(**S, undrafted=("sampled",)), {"sampled-answers-not-drafted"}),
    "25 names": (Telling(**OTHER_TARGET, told={INFO: NAMES}), {"acceptance-low-everywhere"}),
    "25 later": (Script(**V, first_rate=0.3, rate=0.12), {"acceptance-low-everywhere"}),
    "25 first": (Script(**V, rate=0.17), {"acceptance-low-everywhere"}),
    "26": (SecondTurn(**V), {"second-turn-changes-answers"}),
    "26 sglang": (SecondTurn(**S), {"second-turn-changes-answers"}),
    "26 llama.cpp": (SecondTurn(**L), {"second-turn-changes-answers"}),
    "26 acceptance": (SecondTurn(**S, turn="draftless"), {"second-turn-lowers-acceptance"}),
    "27": (Telling(**L, slots=(True, False, False, False)), {"partly-drafted"}),
    "28 llama.cpp": (lookup("llama.cpp"), {"drafts-by-lookup"}),
    "28 sglang": (lookup("sglang"), {"drafts-by-lookup"}),
    "29": (OddAnswers(**S, token=100), {"answers-repeat-one-token"}),
    "30": (OddAnswers(**V, cap=40), {"answers-cut-short"}),
    "31": (OddAnswers(**V, surplus=3), {"answers-past-limit"}),
    "32 end": (OddAnswers(**V, loses="end"), {"text-stream-broken"}),
    "32 pieces": (OddAnswers(**L, loses="pieces"), {"text-stream-broken"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, ids = FAULTS[name]
    found = probe_script(monkeypatch, script)
    assert named(found) == ids, [(item.id, item.seen) for item in found.findings]
