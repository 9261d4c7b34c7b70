"""NaN in every slot that no request may read changes neither text nor acceptance."""

import pytest

from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts
from dflash_testing.poison import poison_free_slots
from dflash_testing.walking_drafts import draft_model, sample_of_all
from dflash_testing.widths import RandomWidths


@pytest.mark.parametrize("draft", sample_of_all("dflash2", "dspark"))
def test_poisoned_slots_change_nothing(draft: str) -> None:
    prompts = [prompt[:length] for prompt, length in zip(bundled_prompts(), (5, 16, 31, 40), strict=False)]
    params = SamplingParams(max_new_tokens=30)
    clean = bundled_llm(draft_model(draft), 7, max_num_requests=2, num_pages=20).generate(prompts, params)
    llm = bundled_llm(draft_model(draft), 7, max_num_requests=2, num_pages=20)
    requests = [Request(index=index, prompt_token_ids=prompt, params=params) for index, prompt in enumerate(prompts)]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.scheduler.has_work:
        poison_free_slots(llm, requests)
        llm.engine.step()
    assert [tuple(request.output_token_ids) for request in requests] == [output.token_ids for output in clean]
    assert [tuple(request.steps) for request in requests] == [output.drafts for output in clean]


@pytest.mark.parametrize("draft", sample_of_all("anchor-first"))
def test_poisoned_slots_change_nothing_when_widths_do(draft: str) -> None:
    """Slots that an earlier wide step wrote and a narrow step does not write are also filled with NaN."""
    prompts = [prompt[:20] for prompt in bundled_prompts()[:3]]
    params = SamplingParams(max_new_tokens=30)
    plain = bundled_llm(None, 0, num_pages=20).generate(prompts, params)
    llm = bundled_llm(draft_model(draft), 7, max_num_requests=2, num_pages=20)
    llm.engine.scheduler.width_policy = RandomWidths(2, 8)
    requests = [Request(index=index, prompt_token_ids=prompt, params=params) for index, prompt in enumerate(prompts)]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.scheduler.has_work:
        poison_free_slots(llm, requests)
        llm.engine.step()
    assert [tuple(request.output_token_ids) for request in requests] == [output.token_ids for output in plain]


def test_page_zero_is_never_written() -> None:
    llm = bundled_llm(bundled_draft_model(), 7, max_num_requests=3)
    llm.generate([prompt[:20] for prompt in bundled_prompts()[:5]], SamplingParams(max_new_tokens=20))
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    for cache in (runner.target_kv, runner.draft_kv):
        assert not cache.pages[0].any()
        assert cache.pages.any()
