"""The prefix cache: hits, shared pages and eviction, on the host and in the engine."""

from functools import cache

import pytest
import torch

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts
from dflash_testing.walking_drafts import ALL, draft_model

PAGE = 4


def holding(pool: PagePool, cache: PrefixCache, tokens: list[int]) -> Request:
    """A request that has run `tokens` and published its full pages."""
    item = Request(index=0, prompt_token_ids=tuple(tokens), params=SamplingParams())
    cache.match(item)
    item.pages += pool.allocate(pool.pages_for(len(tokens)) - len(item.pages)) or []
    cache.publish(item, len(tokens))
    return item


def found(cache: PrefixCache, tokens: list[int]) -> tuple[Request, int]:
    item = Request(index=1, prompt_token_ids=tuple(tokens), params=SamplingParams())
    cache.match(item)
    return item, item.prefilled_len


@pytest.mark.parametrize("length", range(1, 14))
def test_hits_reach_to_the_last_token_but_one(length: int) -> None:
    """A prompt of n tokens finds floor((n - 1) / page) pages, with no block dropped (vllm#54163 and five more)."""
    pool = PagePool(20, PAGE)
    cache = PrefixCache(pool)
    holding(pool, cache, list(range(20)))
    assert found(cache, list(range(length)))[1] == (length - 1) // PAGE * PAGE


def test_equal_pages_after_different_beginnings_are_different() -> None:
    pool = PagePool(20, PAGE)
    cache = PrefixCache(pool)
    holding(pool, cache, [1, 2, 3, 4, 9, 9, 9, 9])
    assert found(cache, [5, 2, 3, 4, 9, 9, 9, 9, 0])[1] == 0
    assert found(cache, [1, 2, 3, 4, 9, 9, 9, 9, 0])[1] == 8


def test_only_full_pages_of_committed_rows_are_published() -> None:
    pool = PagePool(20, PAGE)
    cache = PrefixCache(pool)
    item = Request(index=0, prompt_token_ids=tuple(range(11)), params=SamplingParams())
    item.pages += pool.allocate(4) or []
    cache.publish(item, 7)
    assert [pool.is_published(page) for page in item.pages] == [True, False, False, False]


def test_a_published_page_is_never_replaced_by_an_equal_one() -> None:
    pool = PagePool(20, PAGE)
    cache = PrefixCache(pool)
    first = Request(index=0, prompt_token_ids=tuple(range(9)), params=SamplingParams())
    second = Request(index=1, prompt_token_ids=tuple(range(9)), params=SamplingParams())
    for item in (first, second):
        item.pages += pool.allocate(3) or []
    for item in (first, second):
        cache.publish(item, 8)
    assert found(cache, list(range(9)))[0].pages == first.pages[:2]
    assert not any(pool.is_published(page) for page in second.pages)


def test_references_hold_pages_and_the_end_of_a_text_is_evicted_first() -> None:
    pool = PagePool(1 + 4, PAGE)
    cache = PrefixCache(pool)
    item = holding(pool, cache, list(range(12)))
    sharer, _ = found(cache, [0, 1, 2, 3, 99])
    pool.check_integrity([item.pages, sharer.pages])
    pool.release(item.pages)
    assert pool._references[sharer.pages[0]] == 1
    taken = pool.allocate(2) or []  # the one free page, and the end of the text
    assert item.pages[2] in taken
    assert found(cache, list(range(12)))[1] == 8
    cache.check_integrity()


def test_without_a_cache_nothing_is_found() -> None:
    pool = PagePool(20, PAGE)
    cache = PrefixCache(pool, is_enabled=False)
    holding(pool, cache, list(range(12)))
    assert found(cache, list(range(12)))[1] == 0


@pytest.mark.parametrize(
    ("scheduling", "name"),
    [
        ("async", "dflash2"),
        ("async", "dspark"),
        pytest.param("async", "anchor-first", marks=pytest.mark.slow),
        pytest.param("sync", "tiny", marks=pytest.mark.slow),
        pytest.param("sync", "tiny:reduced", marks=pytest.mark.slow),
        pytest.param("async", "tiny", marks=pytest.mark.slow),
        pytest.param("async", "tiny:reduced", marks=pytest.mark.slow),
    ],
)
def test_a_hit_accepts_what_a_full_prefill_accepts(name: str, scheduling: str) -> None:
    """Cached pages include the draft's context KV, so a hit drafts the same tokens (vllm#47930, llama.cpp#27342)."""
    draft = draft_model(name, torch.float64)
    prompts = [prompt for prompt in bundled_prompts() if len(prompt) > 34][:3]
    params = SamplingParams(max_new_tokens=12)
    cold = bundled_llm(draft, 7, dtype=torch.float64, prefix_cache=False).generate(prompts, params)
    llm = bundled_llm(draft, 7, dtype=torch.float64, scheduling=scheduling, max_num_requests=2)
    first, second = llm.generate(prompts, params), llm.generate(prompts, params)
    assert [output.num_cached for output in second] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    for outputs in (first, second):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in cold]
        assert [output.drafts for output in outputs] == [output.drafts for output in cold]


@pytest.mark.parametrize("name", ALL)
def test_a_hit_drafts_from_the_cached_context(name: str) -> None:
    """With other context KV of the draft in cached pages, other tokens are drafted, and the text stays the same."""
    prompt = next(prompt for prompt in bundled_prompts() if len(prompt) > 34)
    llm = bundled_llm(draft_model(name), 7)
    first = llm.generate([prompt], SamplingParams(max_new_tokens=20))[0]
    cache = llm.engine.runner.draft_kv
    assert cache is not None
    cache.pages[:] = cache.pages.roll(1, dims=-1)
    again = llm.generate([prompt], SamplingParams(max_new_tokens=20))[0]
    assert again.num_cached
    assert again.token_ids == first.token_ids
    assert again.drafts != first.drafts


@pytest.mark.parametrize("num_requests", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_concurrent_requests_with_shared_prefixes_accept_as_one_by_one(num_requests: int) -> None:
    """Requests share prefixes of one, two or three pages, or one token more or less (vllm#42971)."""
    prompt = max(bundled_prompts(), key=len)
    tails = [prompt_[:9] for prompt_ in bundled_prompts()]
    prompts = [
        prompt[: 16 * pages + shift] + tails[(7 * pages + shift) % len(tails)][: 1 + index % 9]
        for index, (pages, shift) in enumerate([(p, s) for p in (1, 2, 3) for s in (-1, 0, 1)] * 8)
    ][:num_requests]
    draft = bundled_draft_model(dtype=torch.float64)
    params = SamplingParams(max_new_tokens=6)
    alone = bundled_llm(draft, 7, dtype=torch.float64, prefix_cache=False).generate(prompts, params)
    llm = bundled_llm(draft, 7, dtype=torch.float64, max_num_requests=16, scheduling="async")
    together = llm.generate(prompts, params)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.drafts for output in together] == [output.drafts for output in alone]
    assert sum(output.num_cached > 0 for output in together) > num_requests - 24


def sharing(num_shared: int, num_prompts: int = 8) -> list[tuple[int, ...]]:
    """Prompts with a common prefix of `num_shared` tokens."""
    text = tuple(token for prompt in bundled_prompts() for token in prompt)
    assert len(text) >= num_shared
    return [
        text[:num_shared] + tuple(prompt[: 3 + index]) for index, prompt in enumerate(bundled_prompts()[:num_prompts])
    ]


@cache
def run_alone(num_shared: int, max_new_tokens: int) -> list[RequestOutput]:
    """The outputs of prompts with a common prefix that run one by one, without a prefix cache."""
    llm = bundled_llm(bundled_draft_model(dtype=torch.float64), 7, dtype=torch.float64, prefix_cache=False)
    return llm.generate(sharing(num_shared), SamplingParams(max_new_tokens=max_new_tokens))


@pytest.mark.parametrize("scheduling", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_long_prefix_of_prompts_that_arrive_together_runs_once(scheduling: str) -> None:
    """The other prompts wait while the first prefills the prefix, which takes two steps. Then they find all of it."""
    prompts, params, alone = sharing(400), SamplingParams(max_new_tokens=6), run_alone(400, 6)
    draft = bundled_draft_model(dtype=torch.float64)
    llm = bundled_llm(draft, 7, dtype=torch.float64, max_num_requests=8, max_batched_tokens=256, scheduling=scheduling)
    together = llm.generate(prompts, params)
    assert [output.num_cached for output in together] == [0] + [400] * 7
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.drafts for output in together] == [output.drafts for output in alone]


def test_a_short_prefix_is_not_waited_for() -> None:
    llm = bundled_llm(None, 0, max_num_requests=8)
    for index, prompt in enumerate(sharing(48)):
        llm.engine.add(Request(index=index, prompt_token_ids=prompt, params=SamplingParams()))
    assert len(llm.engine.scheduler.schedule(is_drained=True).admitted) == 8


def test_prompts_pass_waiting_prompts_and_nobody_waits_for_an_aborted_request() -> None:
    """A prompt with another prefix starts at once. If the request that others wait for is aborted, the next starts."""
    llm = bundled_llm(None, 0, max_num_requests=8, max_batched_tokens=256)
    scheduler, first = llm.engine.scheduler, sharing(400, 3)
    requests = [
        Request(index=index, prompt_token_ids=prompt, params=SamplingParams())
        for index, prompt in enumerate([*first, first[0][::-1]])
    ]
    for request in requests:
        scheduler.add(request)
    assert scheduler.schedule(is_drained=True).admitted == (requests[0], requests[3])
    scheduler.abort([requests[0]])
    scheduler.load.max_batched_tokens = 1000
    assert scheduler.schedule(is_drained=False).admitted == (requests[1],)
    scheduler.check_integrity()


def test_published_pages_never_change() -> None:
    """The checksum of a page at publication equals every later checksum, in target and draft tensors."""
    llm = bundled_llm(bundled_draft_model(), 7, max_num_requests=4, num_pages=30, scheduling="async")
    seen: dict[int, tuple[bytes, float]] = {}
    prompts = [prompt[: 20 + index] for index, prompt in enumerate(bundled_prompts()[:6])] * 3
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=24)
        llm.engine.add(Request(index=index, prompt_token_ids=prompt, params=params))
    num_checks = 0
    while llm.engine.scheduler.has_work:
        llm.engine.step()
        num_checks += check_published(llm, seen)
    assert num_checks > 100


def check_published(llm: LLM, seen: dict[int, tuple[bytes, float]]) -> int:
    cache, runner = llm.engine.scheduler.cache, llm.engine.runner
    assert runner.draft_kv is not None
    for page, digest in cache._digests.items():
        total = sum(float(kv.pages[page].double().abs().sum()) for kv in (runner.target_kv, runner.draft_kv))
        if page in seen and seen[page][0] == digest:
            assert seen[page][1] == total
        seen[page] = (digest, total)
    return len(cache._digests)
