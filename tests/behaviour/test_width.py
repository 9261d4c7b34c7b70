"""Verify widths: fewer rows of a block go through the target, and the text stays the same."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_runtime.device.runner import Runner
from dflash_runtime.engine_setup import find_width_policy
from dflash_runtime.llm import LLM
from dflash_runtime.metrics import count_acceptance, count_widths
from dflash_runtime.models.layers import Attend
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.width import AdaptiveWidth, FixedWidth, StepTimes, widths_for
from dflash_testing.hybrid_pair import hybrid_llm, hybrid_prompts
from dflash_testing.pairs import (
    always_wrong,
    bundled_draft_model,
    bundled_llm,
    bundled_prompts,
    random_draft,
    random_llm,
    random_prompts,
    random_target,
)
from dflash_testing.walking_drafts import draft_model, sample_of_all
from dflash_testing.widths import ListedWidths, RandomWidths

SAMPLED = {"temperature": 1.0, "seed": 3}
WAYS: list[tuple[str, dict[str, Any]]] = [("greedy", {}), ("greedy", SAMPLED), ("probabilistic", SAMPLED)]


HYBRID = "hybrid"
"""The draft of the hybrid pair, whose target has states."""


def short_prompts(count: int, name: str = "tiny") -> list[tuple[int, ...]]:
    given = hybrid_prompts() if name == HYBRID else bundled_prompts()
    return [prompt[: 12 + 5 * index] for index, prompt in enumerate(given[:count])]


def exact_llm(num_draft_tokens: int = 7, name: str = "tiny", **engine: Any) -> LLM:
    """An engine in float64, in which the batch shape does not change any token."""
    if name == HYBRID:
        return hybrid_llm(num_draft_tokens, torch.float64, **engine)
    draft = draft_model(name, torch.float64) if num_draft_tokens else None
    return bundled_llm(draft, num_draft_tokens, dtype=torch.float64, **engine)


def texts(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def watch_rows(runner: Runner) -> tuple[list[int], list[int]]:
    """Two lists that collect the number of rows of each later forward, of the target and of the draft."""
    target, draft = runner.target, runner.draft
    assert draft is not None
    logits = draft.logits
    verified: list[int] = []
    drafted: list[int] = []

    class Watched:
        config, head = target.config, staticmethod(target.head)

        def __call__(
            self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Any, wanted: Tensor | None = None
        ) -> Any:
            verified.append(len(token_ids))
            return target(token_ids, positions, attend, taps, wanted)

    def watched(block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        drafted.append(block_ids.numel())
        return logits(block_ids, positions, attend, num_drafts)

    runner.target = Watched()  # type: ignore[assignment]
    draft.logits = watched  # type: ignore[method-assign]
    return verified, drafted


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_the_target_runs_the_verified_rows_and_the_draft_its_whole_block(width: int) -> None:
    llm = bundled_llm(bundled_draft_model(), 7, max_num_requests=3)
    verified, drafted = watch_rows(llm.engine.runner)
    llm.generate([bundled_prompts()[0][:20]] * 3, SamplingParams(max_new_tokens=9, verify_width=width))
    decoded = verified[1:]  # the first forward has the prompts
    assert len(decoded) >= 2
    assert set(decoded) <= {width, 2 * width, 3 * width}
    assert decoded[0] == 3 * width
    assert set(drafted) <= ({8, 16, 24} if width > 1 else set())
    assert len(drafted) == (len(decoded) if width > 1 else 0)


def test_a_step_verifies_the_largest_width_of_its_requests() -> None:
    llm = bundled_llm(bundled_draft_model(), 7, max_num_requests=3)
    verified, _ = watch_rows(llm.engine.runner)
    lengths = {2: 40, 4: 20, 7: 6}
    params = [SamplingParams(max_new_tokens=length, verify_width=width) for width, length in lengths.items()]
    outputs = llm.generate([bundled_prompts()[0][:20]] * 3, params)
    decoded = verified[1:]  # the first forward has the prompts
    assert [decoded[0], decoded[-1]] == [3 * 7, 2]
    assert {rows for rows in decoded if rows in (21, 8, 2)} == {21, 8, 2}
    for output, width in zip(outputs, lengths, strict=True):
        assert set(output.verify_widths) == {width}
        assert max(output.acceptance_lengths) <= width


@pytest.mark.parametrize(
    ("draft_sampling", "sampling"), [WAYS[0], pytest.param(*WAYS[1], marks=pytest.mark.slow), WAYS[2]]
)
def test_a_text_and_its_trace_do_not_depend_on_the_widths_of_batch_mates(
    draft_sampling: str, sampling: dict[str, Any]
) -> None:
    """Alone, a step runs the request's own width. With a wider batch mate it runs all rows and caps acceptance."""
    prompt, mate = bundled_prompts()[0][:20], bundled_prompts()[1][:20]
    for width in (2, 5):
        own = SamplingParams(max_new_tokens=20, verify_width=width, **sampling)
        alone = exact_llm(draft_sampling=draft_sampling).generate([prompt], own)[0]
        beside = exact_llm(draft_sampling=draft_sampling, max_num_requests=2).generate(
            [prompt, mate], [own, SamplingParams(max_new_tokens=40, **sampling)]
        )[0]
        assert (beside.token_ids, beside.drafts) == (alone.token_ids, alone.drafts)
        assert 1 < max(alone.acceptance_lengths) <= width


@pytest.mark.parametrize(
    ("name", "scheduling", "sampling"),
    [pytest.param("tiny", "sync", {}, marks=pytest.mark.slow), ("tiny", "async", SAMPLED), (HYBRID, "async", {})],
    ids=str,
)  # fmt: skip
def test_another_width_in_every_step_gives_the_text_of_plain_decoding(
    name: str, scheduling: str, sampling: dict[str, Any]
) -> None:
    """The run includes plain steps, chunks and few pages. The draft's context KV and states must stay complete."""
    prompts = short_prompts(5, name)
    params = [SamplingParams(max_new_tokens=14 + 7 * index, **sampling) for index in range(5)]
    wanted = texts(exact_llm(0, name, max_num_requests=5).generate(prompts, params))
    llm = exact_llm(name=name, scheduling=scheduling, max_num_requests=3, num_pages=14, max_batched_tokens=24)
    policy = llm.engine.scheduler.width_policy = RandomWidths(0, 8)
    for index, (prompt, item) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add(Request(index=index, prompt_token_ids=prompt, params=item))
    requests = llm.engine.scheduler.live
    while llm.engine.scheduler.has_work:
        llm.engine.step()
        llm.engine.scheduler.check_integrity()
    assert [tuple(request.output_token_ids) for request in requests] == wanted
    assert set(policy.chosen) == set(range(1, 9))
    assert {step.verify_width for request in requests for step in request.steps} == set(range(2, 9))


@pytest.mark.parametrize("name", sample_of_all("dflash2", "dspark"))
def test_widths_change_what_is_verified_and_not_what_is_drafted(name: str) -> None:
    """With changing widths every step drafts and accepts the same tokens as a fresh engine at that position."""
    prompt, params = bundled_prompts()[0][:20], SamplingParams(max_new_tokens=40)
    llm = exact_llm(name=name)
    llm.engine.scheduler.width_policy = RandomWidths(1, 8)
    output = llm.generate([prompt], params)[0]
    whole = prompt + output.token_ids
    for step in output.drafts[::3]:
        before = whole[: 20 + step.start - 1]
        fresh = exact_llm(name=name).generate([before], SamplingParams(max_new_tokens=2))[0].drafts[0]
        assert step.draft_ids == fresh.draft_ids[: step.verify_width - 1]
        assert step.num_accepted == min(fresh.num_accepted, step.verify_width - 1)


def test_a_policy_observes_verified_and_accepted_drafts() -> None:
    llm = bundled_llm(bundled_draft_model(), 7, scheduling="async", max_num_requests=2)
    policy = llm.engine.scheduler.width_policy = ListedWidths([3, 1, 8, 2] * 5)
    outputs = llm.generate([prompt[:20] for prompt in bundled_prompts()[:2]], SamplingParams(max_new_tokens=25))
    steps = [step for output in outputs for step in output.drafts]
    assert sorted(policy.observed) == sorted((step.verify_width - 1, step.num_accepted) for step in steps)
    assert all(output.num_plain_steps for output in outputs)


def test_pages_are_reserved_for_whole_blocks_at_any_width() -> None:
    """A later step may verify all rows of the block."""
    llm = bundled_llm(bundled_draft_model(), 7, page_size=1)
    request = Request(index=0, prompt_token_ids=bundled_prompts()[0][:9], params=SamplingParams(max_new_tokens=20))
    llm.engine.scheduler.width_policy = ListedWidths([2] * 50)
    llm.engine.add(request)
    llm.engine.step()
    while True:
        before = request.kv_len
        llm.engine.step()
        if request.is_finished:
            break
        assert len(request.pages) == before + 8


def made_up(row_ms: float) -> StepTimes:
    """Steps take 10 ms, plus `row_ms` for each row of each request, plus 2 ms for drafting."""
    widths, batches = widths_for(7), range(1, 9)
    return StepTimes(
        {batch: {width: 10 + row_ms * batch * width + 2 * (width > 1) for width in widths} for batch in batches}
    )


@pytest.mark.parametrize(
    ("name", "scheduling", "sampling"),
    [*(pytest.param("tiny", *case, marks=pytest.mark.slow) for case in (("sync", {}), ("async", SAMPLED))),
     ("dflash2", "async", SAMPLED), ("dspark", "async", {}), ("anchor-first", "sync", {}), (HYBRID, "async", {})],
    ids=str,
)  # fmt: skip
def test_an_adaptive_run_has_the_text_of_plain_decoding(name: str, scheduling: str, sampling: dict[str, Any]) -> None:
    """Rows are so slow that the width falls when requests arrive and grows when they end."""
    prompts = short_prompts(5, name)
    params = [SamplingParams(max_new_tokens=17 + 8 * index, **sampling) for index in range(5)]
    wanted = texts(exact_llm(0, name, max_num_requests=5).generate(prompts, params))
    llm = exact_llm(name=name, scheduling=scheduling, max_num_requests=4, num_pages=24)
    llm.engine.scheduler.width_policy = AdaptiveWidth(made_up(1.2), 7)
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == wanted
    llm.engine.scheduler.check_integrity()
    assert len(count_widths(outputs)) >= 3
    assert count_acceptance(outputs, 7).is_capped


@pytest.mark.parametrize("row_ms", [0.0, 3.0])
def test_rows_without_cost_are_all_verified_and_slow_rows_are_not(row_ms: float) -> None:
    llm = bundled_llm(bundled_draft_model(), 7, max_num_requests=4)
    llm.engine.scheduler.width_policy = AdaptiveWidth(made_up(row_ms), 7)
    outputs = llm.generate([prompt[:20] for prompt in bundled_prompts()[:4]], SamplingParams(max_new_tokens=60))
    counts = count_widths(outputs)
    if row_ms:
        assert counts.get(8, 0) < sum(counts.values()) / 10
    else:
        assert set(counts) == {8}


def test_a_draft_that_is_always_wrong_is_rarely_tried() -> None:
    target = random_target(num_layers=2, max_position_embeddings=400)
    prompt = tuple(random_prompts([20], target.config.vocab_size)[0])
    params = SamplingParams(max_new_tokens=160)
    plain = random_llm(target, None, 0).generate([prompt], params)[0]
    draft = random_draft(target, target_layer_ids=(0, 1), num_layers=1)
    llm = random_llm(target, always_wrong(draft, prompt + plain.token_ids), 7, scheduling="async")
    llm.engine.scheduler.width_policy = AdaptiveWidth(made_up(0.1), 7)
    output = llm.generate([prompt], params)[0]
    assert output.token_ids == plain.token_ids
    assert 5 < len(output.drafts) < 40
    assert any(step.start > 100 for step in output.drafts)


def test_the_width_adapts_only_on_request_with_a_draft_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_runtime.engine_setup.find_step_times", lambda runner: made_up(1.0))
    for is_asked, has_draft, has_graphs in product((True, False), repeat=3):
        draft, num_drafts = (bundled_draft_model(), 7) if has_draft else (None, 0)
        llm = bundled_llm(draft, num_drafts, adaptive_width=is_asked)
        if has_graphs:
            monkeypatch.setattr(llm.engine.runner, "graphs", object())
        policy = find_width_policy(llm.pair, llm.engine.runner)
        assert isinstance(policy, AdaptiveWidth) == (is_asked and has_draft and has_graphs)
        assert isinstance(llm.engine.scheduler.width_policy, FixedWidth)


def test_whole_blocks_are_verified_if_measuring_step_times_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(runner: Runner) -> StepTimes:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("dflash_runtime.engine_setup.find_step_times", fail)
    llm = bundled_llm(bundled_draft_model(), 7, adaptive_width=True)
    assert len(caplog.records) == 1, "an engine without graphs warns that it verifies whole blocks"
    monkeypatch.setattr(llm.engine.runner, "graphs", object())
    assert find_width_policy(llm.pair, llm.engine.runner) is None
    assert len(caplog.records) == 2
    assert caplog.records[0].getMessage() != caplog.records[1].getMessage()
