"""A random walk through the engine with a pool far too small, its books checked after every step."""

import random

import pytest
import torch

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request, SamplingParams
from dflash_testing.pairs import random_draft, random_llm, random_target

PAGE = 8


def soak(num_requests: int, seed: int) -> dict[str, int]:
    """Run requests that arrive at random; returns what happened on the way."""
    generator = random.Random(seed)
    target = random_target(torch.float64, num_layers=3, max_position_embeddings=96)
    draft = random_draft(target, torch.float64, target_layer_ids=(0, 1))
    requests = [random_request(index, generator) for index in range(num_requests)]
    llm = random_llm(
        target, draft, 7, scheduling="async", max_num_requests=5, num_pages=1 + 18, page_size=PAGE,
        max_batched_tokens=23,
    )  # fmt: skip
    arrivals = list(requests)
    seen = {"steps": 0, "hits": 0, "preemptions": 0, "shared": 0}
    publications = count_publications(llm)
    checksums: dict[tuple[int, int], float] = {}
    while arrivals or llm.engine.scheduler.has_work:
        for _ in range(generator.choice([0, 0, 1, 3])):
            if arrivals:
                llm.engine.add(arrivals.pop(0))
        llm.engine.step()
        llm.engine.scheduler.check_integrity()
        seen["shared"] += any(llm.engine.scheduler.pages._references[page] > 1 for page in range(19))
        seen["steps"] += 1
        if seen["steps"] % 10 == 0:
            check_published(llm, publications, checksums)
    assert all(request.is_finished for request in requests)
    assert llm.engine.scheduler.pages.num_available == 18
    seen["hits"] = sum(request.num_cached > 0 for request in requests)
    seen["preemptions"] = sum(request.num_preemptions for request in requests)
    compare(requests, random_llm(target, draft, 7, max_num_requests=8, page_size=PAGE, prefix_cache=False))
    return seen


def random_request(index: int, generator: random.Random) -> Request:
    """A prompt that begins with one of a few prefixes, with limits and stops of its own."""
    prefixes = [[7] * 8, [7] * 16, [3, 1, 4, 1, 5, 9, 2, 6] * 3, []]
    tail = [generator.randrange(97) for _ in range(generator.randint(1, 30))]
    params = SamplingParams(
        max_new_tokens=generator.randint(1, 40),
        stop_token_ids=tuple(generator.sample(range(97), generator.randint(0, 4))),
        temperature=generator.choice([0.0, 0.0, 1.0]),
        seed=index,
    )
    return Request(index=index, prompt_token_ids=tuple(generator.choice(prefixes) + tail), params=params)


def compare(requests: list[Request], unlimited: LLM) -> None:
    """Text and traces are those of an engine with room for everything."""
    outputs = unlimited.generate(
        [request.prompt_token_ids for request in requests], [request.params for request in requests]
    )
    for request, output in zip(requests, outputs, strict=True):
        assert tuple(request.output_token_ids) == output.token_ids
        assert tuple(request.steps) == output.drafts


def count_publications(llm: LLM) -> dict[int, int]:
    """How often each page was published: one that was evicted and filled again with the same text is another page."""
    counts: dict[int, int] = {}
    publish = llm.engine.scheduler.pages.publish

    def counting(page: int) -> None:
        counts[page] = counts.get(page, 0) + 1
        publish(page)

    llm.engine.scheduler.pages.publish = counting  # type: ignore[method-assign]
    return counts


def check_published(llm: LLM, publications: dict[int, int], checksums: dict[tuple[int, int], float]) -> None:
    """Published pages hold what they held, in target and draft tensors."""
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    tensors = [tensor for kv in (runner.target_kv, runner.draft_kv) for tensor in (kv.keys, kv.values)]
    for page in llm.engine.scheduler.cache._digests:
        total = sum(float(tensor[:, page * PAGE : (page + 1) * PAGE].abs().sum()) for tensor in tensors)
        key = (page, publications[page])
        assert checksums.setdefault(key, total) == total, f"published page {page} has changed"


def test_soak() -> None:
    seen = soak(120, seed=0)
    assert seen["hits"] > 20
    assert seen["preemptions"] > 5
    assert seen["shared"] > 20


@pytest.mark.slow
def test_soak_of_2000_requests() -> None:
    seen = soak(2000, seed=1)
    print(seen)
    assert seen["preemptions"] > 50
