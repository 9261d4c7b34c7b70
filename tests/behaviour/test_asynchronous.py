"""The asynchronous engine, which queues steps before it knows how many drafts earlier steps accepted."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dflash_runtime.scheduling.request import FinishReason, Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import ScriptedDraft, always_right, bundled_draft_model, bundled_llm, bundled_prompts
from dflash_testing.walking_drafts import draft_model, sample_of_all
from dflash_testing.widths import ListedWidths


def test_a_run_with_random_stops_equals_the_synchronous_run() -> None:
    """Texts and traces are the same, although requests end at random steps."""
    compare_with_synchronous(bundled_prompts()[:8])


@pytest.mark.slow
def test_a_long_run_with_random_stops_equals_the_synchronous_run() -> None:
    """The run has more than a thousand steps."""
    compare_with_synchronous(bundled_prompts() * 2)


def compare_with_synchronous(texts: Sequence[tuple[int, ...]]) -> None:
    draft = bundled_draft_model(dtype=torch.float64)
    generator = random.Random(0)
    prompts = [prompt[: generator.randint(1, 40)] for prompt in texts]
    params = [
        SamplingParams(
            max_new_tokens=generator.randint(1, 40),
            stop_token_ids=tuple(generator.sample(range(200), generator.randint(0, 12))),
            verify_width=generator.choice([None, None, 1, 3, 8]),
        )
        for _ in prompts
    ]
    wanted = bundled_llm(draft, 7, dtype=torch.float64, max_num_requests=3).generate(prompts, params)
    for max_in_flight in (1, 2, 3):
        llm = bundled_llm(
            draft, 7, dtype=torch.float64, max_num_requests=3, scheduling="async", max_in_flight=max_in_flight
        )
        outputs = llm.generate(prompts, params)
        assert [(o.token_ids, o.finish_reason, o.drafts) for o in outputs] == [
            (o.token_ids, o.finish_reason, o.drafts) for o in wanted
        ]
        llm.engine.scheduler.check_integrity()
    assert {output.finish_reason for output in wanted} == {FinishReason.STOP, FinishReason.LENGTH}


def test_steps_are_in_flight() -> None:
    llm = bundled_llm(bundled_draft_model(), 7, scheduling="async", max_in_flight=2)
    llm.engine.add(request(max_new_tokens=60))
    deepest = 0
    while llm.engine.scheduler.has_work:
        llm.engine.step()
        deepest = max(deepest, len(llm.engine._in_flight))
    assert deepest == 2


def request(index: int = 0, **params: Any) -> Request:
    return Request(index=index, prompt_token_ids=bundled_prompts()[0][:20], params=SamplingParams(**params))


@pytest.mark.parametrize("name", sample_of_all("dflash2"))
def test_late_results_change_nothing(name: str) -> None:
    """With six steps in flight results arrive late, so the host decides from bounds of the lengths."""
    draft = draft_model(name, torch.float64)
    prompts = [prompt[:20] for prompt in bundled_prompts()[:4]]
    params = SamplingParams(max_new_tokens=30)
    wanted = bundled_llm(draft, 7, dtype=torch.float64).generate(prompts, params)
    llm = bundled_llm(draft, 7, dtype=torch.float64, scheduling="async", max_in_flight=6, max_num_requests=4)
    outputs = llm.generate(prompts, params)
    assert [output.drafts for output in outputs] == [output.drafts for output in wanted]


def test_finished_rows_write_nothing() -> None:
    """Steps that are still queued for an ended request change no page, and never page 0."""
    sequence = (
        bundled_prompts()[0][:20]
        + bundled_llm(None, 0).generate([bundled_prompts()[0][:20]], SamplingParams(max_new_tokens=60))[0].token_ids
    )
    llm = bundled_llm(always_right(bundled_draft_model(), sequence), 7, scheduling="async", max_in_flight=3)
    llm.engine.add(request(max_new_tokens=10))
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    launched = 0
    while not bool(runner.state.done[0]) or launched < 2:
        llm.engine.step()
        launched += 1
    caches = [kv.pages for kv in (runner.target_kv, runner.draft_kv)]
    before = [tensor.clone() for tensor in caches]
    while llm.engine.scheduler.has_work:
        llm.engine.step()
    assert all(torch.equal(now, then) for now, then in zip(caches, before, strict=True))
    assert not caches[0][0].any()


@pytest.mark.parametrize("name", sample_of_all("dspark"))
def test_drafting_switched_off_and_on_again_keeps_its_context(name: str) -> None:
    """After three plain steps in the middle, the text is the same and later blocks draft what a fresh engine drafts."""
    draft = draft_model(name, torch.float64)
    item = request(max_new_tokens=50)
    llm = bundled_llm(draft, 7, dtype=torch.float64)
    llm.engine.add(item)
    policy = llm.engine.scheduler.width_policy = ListedWidths([8, 8, 8, 1, 1, 1])
    while not item.is_finished:
        llm.engine.step()
    assert len(policy.chosen) > 6
    plain = bundled_llm(None, 0, dtype=torch.float64).generate([item.prompt_token_ids], item.params)[0]
    assert tuple(item.output_token_ids) == plain.token_ids
    assert sum(step.num_committed for step in item.steps) == 50 - 1 - 3
    whole = item.prompt_token_ids + tuple(item.output_token_ids)
    for step in item.steps[::2]:
        fresh = bundled_llm(draft, 7, dtype=torch.float64)
        anchor_at = len(item.prompt_token_ids) + step.start
        again = fresh.generate([whole[: anchor_at - 1]], SamplingParams(max_new_tokens=2))[0]
        assert again.token_ids[0] == whole[anchor_at - 1]
        assert again.drafts[0].draft_ids == step.draft_ids


@pytest.mark.parametrize("width", [2, 7, *(pytest.param(width, marks=pytest.mark.slow) for width in (3, 4, 5, 6, 8))])
def test_a_narrow_width_verifies_fewer_rows_of_the_same_draft(width: int) -> None:
    draft = bundled_draft_model(dtype=torch.float64)
    prompt = bundled_prompts()[0][:20]
    llm = bundled_llm(draft, 7, dtype=torch.float64)
    narrow = llm.generate([prompt], SamplingParams(max_new_tokens=40, verify_width=width))[0]
    whole = llm.generate([prompt], SamplingParams(max_new_tokens=40))[0]
    assert narrow.token_ids == whole.token_ids
    assert max(narrow.acceptance_lengths) <= width
    assert all(step.verify_width == width for step in narrow.drafts)
    assert narrow.drafts[0].draft_ids == whole.drafts[0].draft_ids[: width - 1]
    assert narrow.acceptance_lengths[0] == min(width, whole.acceptance_lengths[0])


def test_closing_a_stream_early_frees_all_pages_and_the_engine_stays_usable() -> None:
    llm = bundled_llm(bundled_draft_model(), 7, scheduling="async", max_num_requests=2)
    prompts = [prompt[:20] for prompt in bundled_prompts()[:4]]
    stream = llm.stream(prompts, SamplingParams(max_new_tokens=40))
    for _ in range(5):
        next(stream)
    stream.close()
    assert llm.engine.scheduler.pages.num_available == llm.engine.scheduler.pages.num_pages - 1
    assert not llm.engine.scheduler.has_work
    again = llm.generate(prompts, SamplingParams(max_new_tokens=12))
    fresh = bundled_llm(bundled_draft_model(), 7).generate(prompts, SamplingParams(max_new_tokens=12))
    assert [output.token_ids for output in again] == [output.token_ids for output in fresh]


def test_results_carry_the_generation_of_their_row() -> None:
    llm = bundled_llm(bundled_draft_model(), 7, scheduling="async")
    seen = []
    for index in range(3):
        llm.engine.add(request(index, max_new_tokens=5))
    while llm.engine.scheduler.has_work:
        for pending in list(llm.engine._in_flight)[:1]:
            seen += [output.generation for _, output in pending.read()]
        llm.engine.step()
    assert set(seen) == {1, 2, 3}


def test_a_draft_of_placeholder_ids_changes_nothing() -> None:
    """The id -1 is never accepted, and never reaches an embedding or an output (vllm#46899)."""
    prompt = bundled_prompts()[0][:20]
    params = SamplingParams(max_new_tokens=20)
    draft = bundled_draft_model()

    class Placeholder(ScriptedDraft):
        def __init__(self) -> None:
            super().__init__(draft, lambda position: 0)
            self.target_ids = torch.full((draft.config.vocab_size,), -1)

    output = bundled_llm(Placeholder(), 7).generate([prompt], params)[0]
    assert output.token_ids == bundled_llm(None, 0).generate([prompt], params)[0].token_ids
    assert set(output.acceptance_lengths) == {1}
