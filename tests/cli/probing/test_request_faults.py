"""Faults of sampling, repeats, admission and ends of answers: named, and nothing else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dflash_cli.probing.servers.http_client import ServerUnreachable
from dflash_testing.refusals import refuses
from dflash_testing.scripted_requests import Certain, Crowded, Drawing, Ending, Repeating
from dflash_testing.scripted_servers import STEPS, L, S, Script, V, named, probe_named, probe_script

BARE: dict[str, Any] = {**L, "has_metrics": False}
FAULTS: dict[str, tuple[Callable[[], Script], str, str]] = {
    "67 sglang": (partial(Drawing, **S, drawn="first"), "temperature-ignored", "0 of 252"),
    "67 vllm": (partial(Drawing, **STEPS, drawn="last of eight"), "temperature-ignored", "are expected"),
    "67 llama.cpp": (partial(Drawing, **BARE, drawn="first"), "temperature-ignored", "0 of 252"),
    "67 without log-probabilities": (
        partial(Drawing, **STEPS, drawn="first", has_scores=False), "temperature-ignored", "at temperatures 1 and 2",
    ),
    "68 vllm": (partial(Drawing, **STEPS, has_one_seed=True), "seeds-ignored", "3 seeds"),
    "69 llama.cpp": (partial(Repeating, **BARE), "repeat-raises-acceptance", "to new prompts"),
    "69 vllm": (partial(Repeating, **V, rate=0.45), "repeat-raises-acceptance", "8.00 when each"),
    "69 sglang": (partial(Repeating, **S, rate=0.3), "repeat-raises-acceptance", "8.00 when each"),
    "70 sglang": (partial(Crowded, **S), "requests-refused", "with status 503"),
    "70 llama.cpp": (partial(Crowded, **BARE), "requests-refused", "1 at a time none"),
    "70 declared": (partial(Crowded, **S, most=5, declares=True), "requests-refused", "4 running requests and 1"),
    "71 sglang": (partial(Ending, **S, behind=3), "answers-past-end", "3 tokens behind the end token 7"),
    "71 vllm": (partial(Ending, **STEPS, behind=3), "answers-past-end", "that ends other answers"),
    "71 llama.cpp": (partial(Ending, **BARE, behind=3), "answers-past-end", "the server or the model names"),
    "72 vllm": (partial(Certain, **STEPS), "logprobs-wrong", "of 24 of these tokens"),
    "72 sglang": (partial(Certain, **S), "logprobs-wrong", "which is certainty"),
    "72 llama.cpp": (partial(Certain, **BARE), "logprobs-wrong", "which is certainty"),
    "73 vllm": (partial(Drawing, **STEPS, has_no_seed=True), "seeds-ignored", "3 of 3 prompts"),
    "73 llama.cpp": (partial(Drawing, **BARE, has_no_seed=True), "seeds-ignored", "3 of 3 prompts"),
}  # fmt: skip
SLOW = {"67 llama.cpp", "69 vllm", "71 vllm", "70 llama.cpp", "72 sglang", "73 llama.cpp"}
"""Variants of other engines."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_a_fault_is_named_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, id, words = FAULTS[name]
    found = probe_named(monkeypatch, make(), {id})
    assert words in found.findings[0].seen


SOUND: dict[str, Callable[[], Script]] = {
    "a target that samples": partial(Drawing, **STEPS),
    "a target that samples by the seed": partial(Drawing, **S, promises=True),
    "seeds that are not promised": partial(Drawing, **S, has_no_seed=True),
    "a sure target, told as certain": partial(Certain, **STEPS, surest=6.0),
    "a target so sure that samples are greedy": partial(Drawing, **S, surest=30.0),
    "answers that end": partial(Ending, **S),
    "answers that end, without a word about the token": partial(Ending, **STEPS),
    "a queue that nobody fills": partial(Crowded, **S, most=40, declares=True),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_server_has_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_named(monkeypatch, SOUND[name](), set())


def test_a_seed_that_the_engine_does_not_keep_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_script(monkeypatch, Drawing(**S, has_no_seed=True, promises=True))
    assert [(item.id, item.severity) for item in found.findings] == [("seeds-ignored", "info")]


def test_answers_that_ignore_the_end_token_may_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Ending(**S, behind=3)
    probe_named(monkeypatch, script, set(), questions=False, ignore_eos=True)


def test_a_run_with_refusals_keeps_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_script(monkeypatch, Crowded(**S, most=1), questions=False, concurrency=(1, 8))
    alone, loaded = found.runs
    assert (len(alone.answers), alone.failed, dict(alone.refusals)) == (16, (), {})
    assert len(loaded.answers) + len(loaded.failed) == 16
    assert loaded.refusals == {503: len(loaded.failed)}
    assert named(found) == {"requests-refused"}


def test_a_first_run_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Crowded(**S, most=1)
    script.early_answer = lambda path, body: _refuse(script)  # type: ignore[method-assign]
    with refuses(ServerUnreachable, "no-answer"):
        probe_script(monkeypatch, script, questions=False, concurrency=(8,))


def _refuse(script: Script) -> None:
    if script.num_answers:  # after the trial
        raise ServerUnreachable("answered 429, after 4 tries", id="no-answer", path="http://scripted")
