"""Faults of answers that do not end, and of answers that read the prefix cache: named, and nothing else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dflash_testing.scripted_operations import Failing, is_long, wants_grammar
from dflash_testing.scripted_repeats import CachedBlocks, CachedWrongly, Endless, StaleWalk
from dflash_testing.scripted_servers import STEPS, L, S, Script, V, probe_named, probe_script

BARE: dict[str, Any] = {**L, "has_metrics": False}
LATE: dict[str, Any] = {"fails": is_long, "status": 504}
CACHE, TURN = "prefix-cache-changes-answers", "second-turn-changes-answers"

FAULTS: dict[str, tuple[Callable[[], Script], str, str]] = {
    "76 vllm": (partial(Endless, **STEPS), "structured-output-endless", "400 of 431 characters are white space"),
    "76 sglang": (partial(Endless, **S, tail='"tall", ' * 30), "structured-output-endless", "3 of 3"),
    "76 llama.cpp": (partial(Endless, **BARE, tail="0" * 90), "structured-output-endless", "90 of 121"),
    "76 tool call": (partial(Endless, **S, kind="tools"), "tool-call-endless", "2 of 2"),
    "77 vllm": (partial(CachedWrongly, **V), CACHE, "end after 1 token, a whole one has 64"),
    "77 sglang": (partial(CachedWrongly, **S, takes_salt=False), CACHE, "of them end after 1 token"),
    "77 llama.cpp": (partial(CachedWrongly, **BARE, ends=""), CACHE, "8 of 15 answers that read the prefix cache"),
    "77 always": (partial(CachedWrongly, **STEPS, every=1), CACHE, "15 of 15 answers that read"),
    "77 empty": (partial(CachedWrongly, **STEPS, ends="nothing"), CACHE, "end after 0 tokens"),
    "77 changing": (partial(CachedWrongly, **S, ends="", every=1), CACHE, "15 of 15 answers that read"),
    "77 third reading": (partial(CachedWrongly, **S, every=1, num_spared=5), CACHE, "1 of 3 long prompts got other"),
    "77 later": (partial(CachedWrongly, **S, every=1, num_spared=6), CACHE, "First turns asked again: 6 of"),
    "77 after the first run": (partial(CachedBlocks, **S, block=8, num_spared=17), CACHE, "9 of 9 answers that read"),
    "78 llama.cpp": (partial(StaleWalk, **BARE), TURN, "8 of 8 answers without drafts, in requests of 2 tokens"),
    "78 vllm": (partial(CachedBlocks, **V), CACHE, "9 of 9 answers that read the prefix cache are wrong, 0 of 9"),
    "79 sglang": (partial(Failing, **S, **LATE), "requests-fail", "the prompt has 1536 tokens"),
}

SLOW = {
    "76 vllm",
    "77 vllm",
    "77 llama.cpp",
    "77 always",
    "77 empty",
    "77 changing",
    "77 later",
    "77 after the first run",
    "78 vllm",
}
"""Variants of other engines or of one rule."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_a_fault_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, id, words = FAULTS[name]
    found = probe_named(monkeypatch, make(), {id})
    assert words in found.findings[0].seen


REAL = "".join(f"tag {place}, " for place in range(60))
SOUND: dict[str, Callable[[], Script]] = {
    "a long answer that the limit cuts": partial(Endless, **BARE, old_names=True, tail=REAL),
    "indented JSON that the limit cuts": partial(Endless, **BARE, old_names=True, tail="\n" + " " * 40),
    "a thought that the limit cuts": partial(Endless, **BARE, old_names=True, begun="I think. ", tail="Hm. " * 50),
    "a long tool call that the limit cuts": partial(Endless, **S, kind="tools", tail=REAL),
    "a sound target with a cache": partial(CachedWrongly, **S, num_spared=10**9),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_server_has_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_named(monkeypatch, SOUND[name](), set())


@pytest.mark.parametrize(("is_draft", "severity"), [(True, "error"), (False, "warning")])
def test_the_draft_is_the_reason_if_answers_without_it_end(
    is_draft: bool, severity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probe_script(monkeypatch, Endless(**BARE, old_names=True, ends_plainly=is_draft))
    assert [item.severity for item in found.findings] == [severity]


def test_a_limit_of_time_on_short_prompts_is_no_proxy_that_long_prompts_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_named(monkeypatch, Failing(**S, fails=wants_grammar, status=504), {"tool-call-fails"})
    assert not any("the prompt has" in item.seen for item in found.findings)
