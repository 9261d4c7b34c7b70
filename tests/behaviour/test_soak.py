"""A random walk through the engine with too few pages and random failures. Its state is checked after every step."""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_runtime import engine
from dflash_runtime.llm import LLM
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.hybrid_pair import random_hybrid_target
from dflash_testing.pairs import DFLASH2, DSPARK, random_draft, random_llm, random_target

PAGE = 8
NUM_PAGES = 1 + 18


class Accidents:
    """A target with random failures of its forward: before or after it writes, with different exceptions."""

    def __init__(self, target: Target, generator: random.Random, share: float) -> None:
        self.config, self.embedding, self.head = target.config, target.embedding, target.head
        self.embedding_scale = target.embedding_scale
        self.num_failures = 0
        self._target, self._generator, self._share = target, generator, share

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        draw = self._generator.random()
        if draw < self._share / 2:
            self._fail()
        result = self._target(token_ids, positions, attend, taps, wanted)
        if draw > 1 - self._share / 2:
            self._fail()
        return result

    def _fail(self) -> None:
        self.num_failures += 1
        raise self._generator.choice([torch.OutOfMemoryError("out of memory"), ValueError("odd"), KeyboardInterrupt()])


def soak(
    num_requests: int, seed: int, *, failing: float, make_target: Callable[..., Target] = random_target, **changes: Any
) -> dict[str, int]:
    """Run requests that arrive at random steps, and abort some of them. Returns counts of what happened.

    `changes` make a draft of another family, with 7 draft tokens.
    """
    generator = random.Random(seed)
    target = make_target(torch.float64, num_layers=2, max_position_embeddings=96)
    draft = random_draft(target, torch.float64, target_layer_ids=(0,), num_layers=1, **changes)
    requests = [random_request(index, generator) for index in range(num_requests)]
    accidents = Accidents(target, generator, failing)
    llm = random_llm(
        accidents, draft, 7, scheduling="async", max_num_requests=5, num_pages=NUM_PAGES, page_size=PAGE,
        max_batched_tokens=23,
    )  # fmt: skip
    scheduler = llm.engine.scheduler
    arrivals, dropped = list(requests), set()
    seen = {"steps": 0, "shared": 0, "pages checked": 0}
    publications = count_publications(llm)
    digests: dict[tuple[int, int], bytes] = {}
    while arrivals or scheduler.has_work:
        for _ in range(generator.choice([0, 0, 1, 3])):
            if arrivals:
                llm.engine.add(arrivals.pop(0))
        if generator.random() < 0.3:
            scheduler.room.share = 0.0  # admits too many requests, so that some are preempted
        if generator.random() < 0.02 and scheduler.live:
            victim = generator.choice(scheduler.live)
            llm.engine.abort([victim])
            dropped.add(victim)
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            continue
        scheduler.check_integrity()
        seen["shared"] += any(scheduler.pages._references[page] > 1 for page in range(NUM_PAGES))
        seen["steps"] += 1
        if seen["steps"] % 10 == 0:
            seen["pages checked"] += check_published(llm, publications, digests)
    assert all(request.is_finished != (request in dropped) for request in requests)
    failed = {request for request in requests if request.error is not None}  # failed alone, and again
    assert scheduler.pages.num_available == NUM_PAGES - 1
    seen |= {
        "hits": sum(request.num_cached > 0 for request in requests),
        "preemptions": scheduler.num_preemptions,
        "failures": accidents.num_failures,
        "failed": len(failed),
        "dropped": len(dropped),
    }
    compare(
        requests,
        dropped | failed,
        random_llm(target, draft, 7, max_num_requests=16, page_size=PAGE, prefix_cache=False),
    )
    return seen


def make_hybrid(dtype: torch.dtype, **changes: Any) -> Target:
    """A hybrid target with a layer of attention between two recurrent layers."""
    return random_hybrid_target(dtype, **changes | {"num_layers": 3})


@pytest.fixture(autouse=True)
def full_load_soon_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the full load a few steps after a failure, so that most steps of the walk have many requests."""
    monkeypatch.setattr(engine, "NUM_GOOD_STEPS", 8)


def random_request(index: int, generator: random.Random) -> Request:
    """A request with one of a few prompt prefixes, and random limits and stop tokens."""
    prefixes = [[7] * 8, [7] * 16, [3, 1, 4, 1, 5, 9, 2, 6] * 3, []]
    tail = [generator.randrange(97) for _ in range(generator.randint(1, 30))]
    params = SamplingParams(
        max_new_tokens=generator.randint(1, 40),
        stop_token_ids=tuple(generator.sample(range(97), generator.randint(0, 4))),
        temperature=generator.choice([0.0, 0.0, 1.0]),
        seed=index,
    )
    return Request(index=index, prompt_token_ids=tuple(generator.choice(prefixes) + tail), params=params)


def compare(requests: list[Request], unfinished: set[Request], unlimited: LLM) -> None:
    """Compare texts and traces with an engine that has enough pages. Unfinished requests have a prefix of them."""
    outputs = unlimited.generate(
        [request.prompt_token_ids for request in requests], [request.params for request in requests]
    )
    for request, output in zip(requests, outputs, strict=True):
        num_tokens, num_steps = len(request.output_token_ids), len(request.steps)
        if request not in unfinished:
            assert (num_tokens, num_steps) == (len(output.token_ids), len(output.drafts))
        assert tuple(request.output_token_ids) == output.token_ids[:num_tokens]
        assert tuple(request.steps) == output.drafts[:num_steps]


def count_publications(llm: LLM) -> dict[int, int]:
    """Count the publications of each page, to tell apart two fillings of a page with the same text."""
    counts: dict[int, int] = {}
    publish = llm.engine.scheduler.pages.publish

    def counting(page: int) -> None:
        counts[page] = counts.get(page, 0) + 1
        publish(page)

    llm.engine.scheduler.pages.publish = counting  # type: ignore[method-assign]
    return counts


def check_published(llm: LLM, publications: dict[int, int], digests: dict[tuple[int, int], bytes]) -> int:
    """Check that published pages are bitwise unchanged in target and draft tensors. Returns the number of pages."""
    runner: Any = llm.engine.runner
    tensors = [kv.pages for kv in (runner.target_kv, runner.draft_kv)]
    pages = list(llm.engine.scheduler.cache._digests)
    for page in pages:
        content = b"".join(tensor[page].numpy().tobytes() for tensor in tensors)
        digest = hashlib.blake2b(content, digest_size=16).digest()
        key = (page, publications[page])
        assert digests.setdefault(key, digest) == digest, f"published page {page} has changed"
    return len(pages)


def test_soak() -> None:
    seen = soak(110, seed=2, failing=0.016)
    assert seen["hits"] > 20
    assert seen["preemptions"] > 3
    assert seen["shared"] > 20
    assert seen["failures"] > 3
    assert seen["failed"] < 3
    assert seen["dropped"] > 3
    assert seen["pages checked"] > 200


@pytest.mark.parametrize(
    ("num_requests", "changes"),
    [
        pytest.param(
            num_requests,
            changes,
            id=f"{changes['family']}-{num_requests}",
            marks=() if (num_requests, changes) == (40, DFLASH2) else pytest.mark.slow,
        )
        for num_requests in (40, 1000)
        for changes in (DFLASH2, DSPARK)
    ],
)
def test_soak_with_a_draft_that_walks(num_requests: int, changes: dict[str, Any]) -> None:
    seen = soak(num_requests, seed=2, failing=0.03, **changes)
    assert seen["hits"] > num_requests / 10
    assert seen["preemptions"] > 0
    assert seen["failures"] > 0


@pytest.mark.parametrize("num_requests", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_soak_of_a_hybrid_target(num_requests: int) -> None:
    seen = soak(num_requests, seed=2, failing=0.03, make_target=make_hybrid)
    assert seen["preemptions"] > 0
    assert seen["failures"] > 0


@pytest.mark.slow
def test_soak_of_10000_requests() -> None:
    seen = soak(10_000, seed=1, failing=0.01)
    print(seen)
    assert seen["preemptions"] > 300
    assert seen["failures"] > 300
    assert seen["failed"] < 100
    assert seen["dropped"] > 200
