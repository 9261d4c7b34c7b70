"""Hand-offs that do not arrive, do not fit, or fail halfway: the text stays right, or an error names the reason."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_runtime import transfers
from dflash_runtime.device.storage import kv_pages
from dflash_runtime.errors import CapacityError, HandoffMismatch
from dflash_runtime.kv_transfer.file_connector import FileConnector
from dflash_runtime.kv_transfer.handoff import DRAFT_PAGES, TARGET_PAGES, Handoff, concerns_target, find_problems
from dflash_runtime.llm import LLM
from dflash_runtime.metrics import count_acceptance
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.handoffs import (
    NUM_DRAFTS,
    PARAMS,
    PROMPTS,
    MemoryConnector,
    go_on,
    hand_off,
    handed_off,
    keys_of,
    make_llm,
    traces,
    whole_run,
)
from dflash_testing.pairs import bundled_prompts, random_draft, random_llm, random_target


def first_rate(outputs: list[RequestOutput]) -> float:
    """The acceptance rate of the first draft token."""
    counts = count_acceptance(outputs, NUM_DRAFTS)
    return counts.per_pos_accepted[0] / counts.num_drafts


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_prompt_without_a_hand_off_is_prefilled_here(scheduling: str, caplog: pytest.LogCaptureFixture) -> None:
    """Three prompts have no hand-off. After the time limit they run here, with one warning and a total."""
    wanted = whole_run(PROMPTS)
    connector = handed_off(PROMPTS)
    for key in ("00001", "00004", "00008"):
        del connector.saved[key]
    llm = make_llm(scheduling=scheduling)
    with caplog.at_level(logging.WARNING):
        found = go_on(llm, PROMPTS, PARAMS, connector, timeout=0.1)
    assert traces(found) == traces(wanted)
    assert [output.num_loaded > 0 for output in found] == [index not in (1, 4, 8) for index in range(9)]
    first, total = (record.getMessage() for record in caplog.records)
    assert "00001" in first
    assert "0.1 s" in first
    assert re.findall(r"\d+", total) == ["3"]


def test_prompts_are_prefilled_here_if_the_connector_fails() -> None:
    wanted = whole_run(PROMPTS[:3])
    connector = handed_off(PROMPTS[:3])
    llm = make_llm()
    connector.failure = OSError("the line is cut")
    found = go_on(llm, PROMPTS[:3], PARAMS, connector)
    assert traces(found) == traces(wanted)
    assert not any(output.num_loaded for output in found)


def without_draft(handoff: Handoff) -> Handoff:
    return handoff.with_tensors({TARGET_PAGES: handoff.tensors[TARGET_PAGES]})


def without_a_layer(handoff: Handoff) -> Handoff:
    return handoff.with_tensors({**handoff.tensors, DRAFT_PAGES: handoff.tensors[DRAFT_PAGES][:, :2]})


def a_step_early(handoff: Handoff) -> Handoff:
    """Change a hand-off to one that was taken before the draft's last 16 rows were written."""
    early = handoff.tensors[DRAFT_PAGES].clone()
    early[-1] = 0
    changed = handoff.with_tensors({**handoff.tensors, DRAFT_PAGES: early})
    return replace(changed, num_rows={TARGET_PAGES: handoff.kv_len, DRAFT_PAGES: handoff.kv_len - 16})


def of_another_draft(handoff: Handoff) -> Handoff:
    fields = {**handoff.fingerprint, "draft weights": "0123456789abcdef"}
    generator = torch.Generator().manual_seed(0)
    pages = handoff.tensors[DRAFT_PAGES]
    noise = torch.randn(pages.shape, generator=generator)
    return replace(handoff.with_tensors({**handoff.tensors, DRAFT_PAGES: noise}), fingerprint=fields)


FAULTS: dict[str, tuple[Callable[[Handoff], Handoff], str, tuple[str, ...]]] = {
    "no draft": (without_draft, "tensor-missing", ()),
    "no layer": (without_a_layer, "layers-differ", ("2", "3")),
    "early": (a_step_early, "rows-missing", ("32", "48")),
    "other draft": (of_another_draft, "fingerprint-differs", ("draft weights", "null", "0123456789abcdef")),
}
"""The change of a hand-off, the id of the problem that it causes, and the values that the problem names."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hand_off_that_does_not_fit_is_refused(fault: str) -> None:
    change, problem, values = FAULTS[fault]
    connector = handed_off(PROMPTS[7:8])
    connector.change = change
    llm = make_llm()
    output = go_on(llm, PROMPTS[7:8], PARAMS, connector)[0]
    assert (output.finish_reason, output.exit_code, output.token_ids) == (FinishReason.ERROR, 3, ())
    assert output.error_id == "handoff-does-not-fit"
    handoff = change(connector.saved["00000"])
    (found,) = find_problems(handoff, llm.fingerprint, llm.engine.runner.porter.shapes(handoff.kv_len))
    assert (found.id, concerns_target(found)) == (problem, False)
    assert all(value in found for value in values)
    assert all(part in str(output.error) for part in ("00000", found))
    assert len(llm.engine.scheduler.cache) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_forced_hand_off_keeps_the_text_and_lowers_acceptance(fault: str) -> None:
    """Other requests do not find its pages in the prefix cache."""
    change = FAULTS[fault][0]
    prompts = tuple(prompt[:48] for prompt in bundled_prompts()[:10])
    wanted, connector = whole_run(prompts), handed_off(prompts)
    connector.change = change
    llm = make_llm()
    found = go_on(llm, prompts, PARAMS, connector, force=True)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert first_rate(found) < first_rate(wanted) - (0.02 if fault == "early" else 0.15)
    assert len(llm.engine.scheduler.cache) == 0
    assert traces(llm.generate(prompts, PARAMS)) == traces(wanted)


@pytest.mark.parametrize("tokens", [(-5,), (1_000_000,), (4, 5)])
def test_impossible_tokens_are_not_continued(tokens: tuple[int, ...]) -> None:
    """The prompt is prefilled here instead, so the text is right."""
    connector = handed_off(PROMPTS[3:4])
    connector.change = lambda handoff: replace(handoff, output_token_ids=tokens)
    assert traces(go_on(make_llm(), PROMPTS[3:4], PARAMS, connector)) == traces(whole_run(PROMPTS[3:4]))


def test_a_hand_off_of_another_prompt_is_refused() -> None:
    connector = handed_off(PROMPTS[3:4])
    output = go_on(make_llm(), PROMPTS[4:5], PARAMS, connector)[0]
    assert (output.exit_code, output.error_id) == (3, "handoff-of-another-prompt")
    assert "00000" in str(output.error)


@pytest.mark.parametrize(
    "num_steps", [0, 2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, *range(3, 14)))]
)
def test_a_failed_step_leaves_nothing_behind_on_either_side(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails on each side while hand-offs are sent and loaded."""
    wanted = whole_run(PROMPTS[:6])
    sender = make_llm(scheduling="async", max_num_requests=2)
    fail_once(sender, num_steps, monkeypatch)
    connector = hand_off(sender, PROMPTS[:6], PARAMS)
    receiver = make_llm(scheduling="async", max_num_requests=2)
    fail_once(receiver, num_steps, monkeypatch)
    assert traces(go_on(receiver, PROMPTS[:6], PARAMS, connector)) == traces(wanted)
    for llm in (sender, receiver):
        assert not llm.engine.scheduler.has_work


def fail_once(llm: LLM, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the submission after `num_steps` others raise an error."""
    submit, left = llm.engine.runner.submit, [num_steps]

    def failing(batch: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("the device hiccupped")
        return submit(batch)

    monkeypatch.setattr(llm.engine.runner, "submit", failing)


@pytest.mark.parametrize("failure", [CapacityError("the disk is full"), KeyError("lost")], ids=["disk", "any"])
def test_a_hand_off_that_cannot_be_sent_is_an_error_of_its_prompt(failure: Exception) -> None:
    connector = MemoryConnector(save_failure=failure)
    llm = make_llm()
    plan = HandoffPlan(connector=connector, keys=keys_of(PROMPTS[:2]), is_sending=True)
    outputs = llm.generate(PROMPTS[:2], PARAMS, handoffs=plan)
    assert [output.exit_code for output in outputs] == [6, 6] if isinstance(failure, CapacityError) else [4, 4]
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.scheduler.has_work


def test_a_request_fails_if_a_step_fails_while_its_pages_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(max_num_requests=1)
    fail_once(llm, 1, monkeypatch)
    monkeypatch.setattr(kv_pages.MovingPiece, "is_ready", property(lambda piece: False))
    plan = HandoffPlan(connector=MemoryConnector(), keys=keys_of(PROMPTS[7:9]), is_sending=True)
    stream = llm.stream(PROMPTS[7:9], PARAMS, handoffs=plan)
    first = next(delta.output for delta in stream if delta.output is not None)
    assert (first.exit_code, first.error_id) == (1, "pages-lost")
    stream.close()
    llm.engine.scheduler.check_integrity()


def test_a_hand_off_that_nobody_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "TAKEN_SECONDS", 0.1)
    llm = make_llm()
    plan = HandoffPlan(connector=MemoryConnector(holds_saves=True), keys=("a",), is_sending=True)
    (output,) = llm.generate(PROMPTS[3:4], PARAMS, handoffs=plan)
    assert (output.exit_code, output.error_id) == (4, "handoff-not-taken-in-time")
    assert "0.1 s" in str(output.error)
    assert not llm.engine.scheduler.has_work
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("changed", ["target", "draft"])
def test_the_same_weights_under_another_config_are_refused(changed: str, tmp_path: Path) -> None:
    def make(eps: float) -> LLM:
        target = random_target(rms_norm_eps=eps if changed == "target" else 1e-6)
        return random_llm(target, random_draft(target, rms_norm_eps=eps if changed == "draft" else 1e-6), 3)

    connector, keys = FileConnector(tmp_path), ("one",)
    params = SamplingParams(max_new_tokens=4)
    make(1e-6).generate([[1, 2, 3]], params, handoffs=HandoffPlan(connector=connector, keys=keys, is_sending=True))
    (output,) = make(0.3).generate([[1, 2, 3]], params, handoffs=HandoffPlan(connector=connector, keys=keys))
    connector.close()
    assert (output.error_id, output.exit_code) == ("handoff-does-not-fit", HandoffMismatch.exit_code)
    assert f"{changed} rms_norm_eps" in str(output.error)
