"""Faults that depend on the request, on the position in an answer or on documents: named, and nothing else.

Ten of them are of the first blind set of docs/measurements/probe-faults.md.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dflash_testing.scripted_faults import (
    Ageing,
    Fading,
    FirstStep,
    Looping,
    Miscounted,
    OddAnswers,
    Revised,
    SecondTurn,
    Telling,
    Tempered,
    Thinking,
    Timed,
    Wide,
    WithDefaults,
)
from dflash_testing.scripted_operations import (
    Adapted,
    Bonus,
    CacheStart,
    CallsAtTimes,
    Cut,
    Failing,
    FailsLate,
    Mixed,
    Named,
    NarrowWhenLong,
    RunsOn,
    Spread,
    Told,
    is_long,
    wants_grammar,
)
from dflash_testing.scripted_servers import STEPS, L, S, Script, V, probe_named, probe_script

OTHER_TARGET: dict[str, Any] = {**S, "first_rate": 0.24, "rate": 0.24}
INFO = "/server_info"
NAMES = {"model_path": "org/Chat-8B-Thinking", "speculative_draft_model_path": "org/Chat-8B-Instruct-DFlash"}


class Dev(Script):
    """vLLM in development mode shows its settings."""

    def as_document(self, path: str, document: Any) -> Any:
        config = {"vllm_config": {"speculative_config": {"rejection_sample_method": "synthetic"}}}
        return config if path.startswith(INFO) else document


SLOW = {"38", "40", "42", "44 vllm", "47", "48"}
"""Variants that read counters after each answer."""
FAULTS: dict[str, tuple[Callable[[], Script], set[str]]] = {
    "21 steps": (partial(Fading, **STEPS), {"acceptance-falls-within-answers"}),
    "21 counters": (partial(Fading, **V), {"acceptance-falls-within-answers"}),
    "21 sglang": (partial(Fading, **S), {"acceptance-falls-within-answers"}),
    "21 llama.cpp": (partial(Fading, **L), {"acceptance-falls-within-answers"}),
    "21 llama.cpp without metrics": (partial(Fading, **L, has_metrics=False), {"acceptance-falls-within-answers"}),
    "21 ends": (partial(Fading, **L, fade=1.0, ends_at=24), {"acceptance-falls-within-answers"}),
    "22 without a draft": (
        partial(Script, **V, reports="summary", replicas=2, unlike={"has_draft": False}),
        {"several-replicas", "unlike-replicas"},
    ),
    "22 other K": (partial(Script, **S, replicas=2, unlike={"k": 3}), {"several-replicas", "unlike-replicas"}),
    "23": (partial(WithDefaults, **V, penalised=0.6), {"default-settings-change-answers"}),
    "23 sglang": (partial(WithDefaults, **S, penalised=1.5), {"default-settings-change-answers"}),
    "23 llama.cpp": (partial(WithDefaults, **L, penalised=0.6), {"default-settings-change-answers"}),
    "24": (partial(WithDefaults, **V, undrafted=("defaults",)), {"default-settings-not-drafted"}),
    "24 sampled": (partial(WithDefaults, **S, undrafted=("sampled",)), {"sampled-answers-not-drafted"}),
    "25 names": (partial(Telling, **OTHER_TARGET, told={INFO: NAMES}), {"acceptance-low-everywhere"}),
    "25 later": (partial(Script, **V, first_rate=0.3, rate=0.12), {"acceptance-low-everywhere"}),
    "25 first": (partial(Script, **V, rate=0.17), {"acceptance-low-everywhere"}),
    "26": (partial(SecondTurn, **V), {"second-turn-changes-answers"}),
    "26 sglang": (partial(SecondTurn, **S), {"second-turn-changes-answers"}),
    "26 llama.cpp": (partial(SecondTurn, **L), {"second-turn-changes-answers"}),
    "26 acceptance": (partial(SecondTurn, **S, turn="draftless"), {"second-turn-lowers-acceptance"}),
    "27": (partial(Telling, **L, slots=(True, False, False, False)), {"partly-drafted"}),
    "28 llama.cpp": (partial(Script, **L, ends_after=9, method="ngram-simple,ngram-mod"), {"drafts-by-lookup"}),
    "28 sglang": (
        partial(Telling, **S, rate=0.05, told={INFO: {"speculative_algorithm": "NGRAM"}}),
        {"drafts-by-lookup"},
    ),
    "29": (partial(OddAnswers, **S, token=100), {"answers-repeat-one-token"}),
    "30": (partial(OddAnswers, **V, cap=40), {"answers-cut-short"}),
    "31": (partial(OddAnswers, **V, surplus=3), {"answers-past-limit"}),
    "32 end": (partial(OddAnswers, **V, loses="end"), {"text-stream-broken"}),
    "33": (partial(Ageing, **V), {"acceptance-falls-with-time"}),
    "33 within the first prompts": (partial(Ageing, **STEPS, leak=0.05), {"acceptance-falls-with-time"}),
    "33 slightly": (partial(Ageing, **S, leak=0.01, cap=0.2), {"acceptance-falls-with-time"}),
    "33 llama.cpp": (partial(Ageing, **L, has_metrics=False), {"acceptance-falls-with-time"}),
    "33 ended under load": (partial(Script, **S, ends_after=20), {"partly-drafted"}),
    "34": (partial(Telling, **S, told={INFO: {"speculative_accept_threshold_acc": 0.35}}), {"verification-lossy"}),
    "34 vllm": (partial(Dev, **V), {"verification-lossy"}),
    "35": (partial(Timed, **L, old_names=True, step_ms=12.0, noise=0.2), {"drafts-slower-than-none"}),
    "36": (partial(Wide, **V, streams="replaced"), {"streamed-characters-broken"}),
    "36 dropped": (partial(Wide, **L, streams="dropped"), {"streamed-characters-broken"}),
    "37": (partial(FirstStep, **V), {"acceptance-falls-within-answers"}),
    "37 steps": (partial(FirstStep, **STEPS, first=0.6), {"acceptance-falls-within-answers"}),
    "37 llama.cpp": (partial(FirstStep, **L), {"acceptance-falls-within-answers"}),
    "37 llama.cpp without metrics": (
        partial(FirstStep, **L, old_names=True, has_metrics=False),
        {"acceptance-falls-within-answers"},
    ),
    "32 pieces": (partial(OddAnswers, **L, loses="pieces"), {"text-stream-broken"}),
    "38": (partial(Miscounted, **V), {"counters-contradict"}),
    "38 llama.cpp": (partial(Miscounted, **L), {"counters-contradict"}),
    "39": (partial(Thinking, **S, leaks="streamed"), {"reasoning-misplaced"}),
    "39 in one piece": (partial(Thinking, **L, leaks="in one piece"), {"reasoning-misplaced"}),
    "40": (partial(Tempered, **V), {"temperature-zero-ignored"}),
    "40 llama.cpp": (partial(Tempered, **L), {"temperature-zero-ignored"}),
    "40 with a seed": (partial(Tempered, **L, is_seeded=True), {"temperature-zero-ignored"}),
    "40 without log-probabilities": (partial(Tempered, **S, has_scores=False), {"temperature-zero-ignored"}),
    "40 whatever is asked": (partial(Tempered, **S, samples="whatever"), {"answers-change-each-time"}),
    "41": (
        partial(Revised, **STEPS, replicas=2, unlike={"revision": 1}),
        {"several-replicas", "replicas-answer-differently"},
    ),
    "41 without metrics": (
        partial(Revised, **STEPS, replicas=2, unlike={"revision": 1}, has_metrics=False),
        {"replicas-answer-differently"},
    ),
    "42": (partial(Script, **V, cache="prompts"), {"second-turn-not-cached"}),
    "42 llama.cpp": (partial(Script, **L, cache="prompts"), {"second-turn-not-cached"}),
    "43": (partial(Looping, **S, size=2), {"long-prompts-loop"}),
    "44": (partial(Tempered, **S, samples="never"), {"temperature-ignored"}),
    "44 vllm": (partial(Tempered, **V, samples="never"), {"temperature-ignored"}),
    "45": (partial(Script, **S, json="goes on"), {"structured-output-broken"}),
    "46": (partial(OddAnswers, **S, misses="c"), {"stop-string-missed"}),
    "47": (partial(Bonus, **L), {"counters-contradict"}),
    "47 without metrics": (partial(Bonus, **L, old_names=True, has_metrics=False), {"counters-contradict"}),
    "48": (partial(Named, **V, has_store=True, reports="summary"), {"answers-from-a-store"}),
    "48 without metrics": (partial(Named, **STEPS, has_store=True, has_metrics=False), {"answers-from-a-store"}),
    "49": (
        partial(Failing, **V, restarts=True, fails=wants_grammar),
        {"structured-output-fails", "tool-call-fails"},
    ),
    "49 long prompts": (partial(Failing, **S, fails=is_long), {"requests-fail"}),
    "50": (partial(CacheStart, **L), {"prefix-cache-mostly-missed"}),
    "51": (partial(Cut, **S), {"prompts-cut"}),
    "52": (partial(Spread, **S), {"draft-fails-on-some-prompts"}),
    "53": (partial(RunsOn, **L), {"chats-go-on"}),
    "54": (partial(Adapted, **STEPS, has_metrics=False), {"adapter-lowers-acceptance"}),
    "55": (partial(Told, **S), {"logprobs-wrong"}),
    "55 vllm": (partial(Told, **STEPS), {"logprobs-wrong"}),
    "55 llama.cpp": (partial(Told, **L, has_metrics=False), {"logprobs-wrong"}),
    "56": (partial(Mixed, **S), {"answers-change-beside-sampled"}),
    "57": (partial(CallsAtTimes, **S), {"tool-call-broken"}),
    "57 llama.cpp": (partial(CallsAtTimes, **L, num_calls=1), {"tool-call-broken"}),
    "58": (partial(NarrowWhenLong, **L), {"acceptance-falls-with-context"}),
    "59": (partial(FailsLate, **STEPS), {"acceptance-falls-within-answers"}),
    "60": (partial(Script, **L, replicas=2, unlike={"k": 3, "num_slots": 2}), {"several-replicas", "unlike-replicas"}),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_a_fault_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, ids = FAULTS[name]
    probe_named(monkeypatch, make(), ids)


def test_evidence_names_the_penalty_the_slots_and_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = {
        "23": "already has", "27": "3 of its 4 slots", "25 names": "thinking and instruct",
        "58": "1.0 drafted tokens per step", "57": "of 6 required tool calls",
    }  # fmt: skip
    for name, words in evidence.items():
        (item,) = probe_script(monkeypatch, FAULTS[name][0]()).findings
        assert words in item.seen
