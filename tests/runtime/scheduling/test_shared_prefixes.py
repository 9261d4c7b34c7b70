"""Prompts with a common beginning: each is looked at when that may help, and common pages cost nothing per prompt."""

import hashlib
import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest

from dflash_runtime.scheduling.batch import Batch, StepOutput
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache, page_digests
from dflash_runtime.scheduling.related_texts import RelatedTexts
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.scheduler import Scheduler

PAGE = 4


def make_request(tokens: Sequence[int], max_new_tokens: int = 8) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return Request(index=0, prompt_token_ids=tuple(tokens), params=params)


def make_scheduler(num_pages: int, max_batched_tokens: int, num_requests: int = 64) -> Scheduler:
    pool = PagePool(num_pages, PAGE)
    limits = Limits(
        num_draft_tokens=3, max_model_len=4096, max_num_requests=num_requests, vocab_size=1000,
        max_batched_tokens=max_batched_tokens,
    )  # fmt: skip
    return Scheduler(limits, pool, PrefixCache(pool))


def run_step(scheduler: Scheduler) -> Batch:
    """Run a step and commit its results at once. Every block accepts nothing."""
    batch = scheduler.schedule(is_drained=True)
    for chunk in batch.chunks:
        scheduler.finish_chunk(chunk)
    ended = [chunk.request for chunk in batch.chunks if chunk.is_last] + list(batch.decode)
    for request in ended:
        is_done = request.remaining(4096) == 1
        scheduler.commit(request, StepOutput([7], is_done=is_done, generation=request.generation))
    scheduler.check_integrity()
    return batch


def count_looks(monkeypatch: pytest.MonkeyPatch) -> Counter[Request]:
    looks: Counter[Request] = Counter()
    match = PrefixCache.match

    def counted(cache: PrefixCache, request: Request) -> None:
        looks[request] += 1
        match(cache, request)

    monkeypatch.setattr(PrefixCache, "match", counted)
    return looks


def test_a_waiting_prompt_is_looked_at_when_its_pages_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix takes 8 steps. Of the prompts, the first computes it and the others find all of it."""
    looks = count_looks(monkeypatch)
    scheduler = make_scheduler(600, 100)
    prefix = range(800)
    requests = [make_request((*prefix, 900 + index)) for index in range(30)]
    for request in requests:
        scheduler.add(request)
    for _ in range(8):
        assert len(run_step(scheduler).chunks) == 1
    assert looks == {requests[0]: 1}
    for _ in range(6):
        run_step(scheduler)
    assert [request.num_cached for request in requests] == [0] + [800] * 29
    assert max(looks.values()) <= 2


def test_the_digests_of_common_pages_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of prompts share a first page; each group shares 49 more."""
    hashed: Counter[bytes] = Counter()
    blake2b = hashlib.blake2b

    def counted(data: bytes, **given: Any) -> Any:
        hashed[data] += 1
        return blake2b(data, **given)

    monkeypatch.setattr(hashlib, "blake2b", counted)
    scheduler = make_scheduler(600, 4096)
    beginnings = [(*range(4), *range(base, base + 196)) for base in (100, 400)]
    for index in range(20):
        scheduler.add(make_request((*beginnings[index % 2], 900 + index)))
    for _ in range(4):
        run_step(scheduler)
    assert sum(hashed.values()) < 2 * 50 + 20 * 3


def test_a_prompt_without_room_is_looked_at_again_when_pages_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count_looks(monkeypatch)
    scheduler = make_scheduler(40, 400)
    first, large = make_request(range(60), 24), make_request(range(1, 120), 8)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(large)
    while first.row is not None:
        run_step(scheduler)
    assert len(first.output_token_ids) == 24
    assert looks[large] == 1
    run_step(scheduler)
    assert large.row is not None
    assert looks[large] == 2


def test_a_prompt_without_room_is_looked_at_again_when_more_of_it_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request publishes, page by page, the answer that the waiting prompt contains."""
    scheduler = make_scheduler(100, 400)
    monkeypatch.setattr(scheduler.room, "has_room", lambda request, running: len(request.pages) >= 17)
    first = make_request(range(60), 40)
    waiting = make_request((*range(60), *[7] * 32), 2)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(waiting)
    while waiting.row is None:
        run_step(scheduler)
    assert first.row is not None
    assert waiting.num_cached == 68


@pytest.mark.parametrize("seed", range(6))
def test_shared_pages_equal_those_of_a_plain_walk(seed: int) -> None:
    """Random prompts of a few beginnings, in a small pool, with preemptions, aborts and restarts."""
    draw = random.Random(seed)
    scheduler = make_scheduler(60, 48, num_requests=6)
    match = scheduler.cache.match

    def checked(request: Request) -> None:
        match(request)
        text = make_request(request.token_slice(0, request.total_len))
        digests = page_digests(text, 0, (text.total_len - 1) // PAGE, PAGE)
        assert digests[:9] == page_digests(request, 0, len(digests), PAGE)[:9]
        assert digests[3:] == page_digests(request, 3, max(3, len(digests)), PAGE)
        found = [scheduler.cache._pages.get(digest) for digest in digests]
        most = found.index(None) if None in found else len(found)
        assert request.pages == found[:most]

    scheduler.cache.match = checked  # type: ignore[method-assign]
    texts = [[draw.randrange(3) for _ in range(120)] for _ in range(2)]
    live: deque[Request] = deque()
    for _ in range(150):
        if draw.random() < 0.4:
            length = draw.randrange(1, 110)
            text = [*draw.choice(texts)[:length], *(draw.randrange(3) for _ in range(draw.randrange(1, 12)))]
            live.append(make_request(text, draw.randrange(1, 20)))
            if draw.random() < 0.5:  # a lookup in a store
                page_digests(live[-1], 0, draw.randrange(len(text) // PAGE + 1), PAGE)
            scheduler.add(live[-1])
        if live and draw.random() < 0.1:
            scheduler.abort([live.popleft()])
        if draw.random() < 0.02:
            scheduler.restart()
        run_step(scheduler)
    for _ in range(2000):
        if not scheduler.has_work:
            break
        run_step(scheduler)
    assert not scheduler.has_work
    assert not scheduler.cache._related._requests
    assert scheduler.pages.num_available == 59


def test_the_common_pages_of_two_prompts_are_counted_exactly() -> None:
    draw = random.Random(0)
    for _ in range(300):
        text = [draw.randrange(3) for _ in range(draw.randrange(4, 60))]
        same = draw.randrange(len(text) + 1)
        other = [*text[:same], *(draw.randrange(3) for _ in range(draw.randrange(8)))]
        related = RelatedTexts(PAGE)
        first, second = make_request(text), make_request(other or [1])
        related.add(first)
        related.add(second)
        pages = min(len(text), len(other)) // PAGE
        wanted = next((at for at in range(pages) if text[: PAGE * at + PAGE] != other[: PAGE * at + PAGE]), pages)
        assert second.num_common == wanted
        assert (second.relative is first) == (wanted > 0)


def test_an_interrupted_add_leaves_a_request_that_can_be_dropped() -> None:
    """Ctrl-C between the two books of waiting requests."""

    class Interrupted(deque[Request]):
        def append(self, request: Request) -> None:
            raise KeyboardInterrupt

    scheduler = make_scheduler(60, 48)
    scheduler.add(make_request([1, 2, 3]))
    scheduler._waiting = Interrupted(scheduler._waiting)
    with pytest.raises(KeyboardInterrupt):
        scheduler.add(make_request([4, 5, 6]))
    scheduler.abort()
    assert not scheduler.has_work
    scheduler.check_integrity()
