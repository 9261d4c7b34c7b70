"""Thousands of requests at once: the cost of admitting a request does not grow with the number of running requests."""

from collections.abc import Sequence

import pytest

from dflash_runtime.scheduling.expected_room import ExpectedRoom
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.scheduler import Scheduler
from dflash_testing.pairs import random_draft, random_llm, random_prompts, random_target


class CheckedRoom(ExpectedRoom):
    """Answers with the quick check and compares it with the exact one."""

    num_quick = 0
    num_asked = 0

    def _expected_left(self, request: Request) -> int:
        self.is_quick = False
        return super()._expected_left(request)

    def has_room(self, request: Request, running: Sequence[Request]) -> bool:
        self.is_quick = True
        answer, is_quick, longest = super().has_room(request, running), self.is_quick, self._longest
        self._longest = 10**9
        try:
            assert answer == super().has_room(request, running)
        finally:
            self._longest = longest
        self.num_quick += is_quick and answer
        self.num_asked += 1
        return answer


@pytest.mark.parametrize("num_pages", [24, 40, 70])
def test_quick_check_for_room_equals_the_exact_one(num_pages: int) -> None:
    """The quick answer equals the exact one, in pools that are too small or hold everything, with shared pages."""
    target = random_target(num_layers=1, max_position_embeddings=96)
    draft = random_draft(target, block_size=4, target_layer_ids=(0,), num_layers=1)
    llm = random_llm(target, draft, 3, scheduling="async", max_num_requests=8, num_pages=num_pages, page_size=8)
    scheduler = llm.engine.scheduler
    scheduler.room = room = CheckedRoom(scheduler.limits, scheduler.pages)
    prompts = random_prompts([3 + 7 * index % 40 for index in range(24)], 97)
    prompts = [prompts[index % 5][:16] + prompts[index] for index in range(24)]
    params = [SamplingParams(max_new_tokens=2 + 5 * index % 23) for index in range(24)]
    outputs = llm.generate(prompts, params)
    assert all(output.error is None for output in outputs)
    assert room.num_asked > room.num_quick or num_pages == 70
    assert room.num_quick > 0


def test_admitting_thousands_does_not_look_at_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = PagePool(1 + 3 * 4096, 16)
    limits = Limits(
        num_draft_tokens=7, max_model_len=4096, max_num_requests=4096, vocab_size=97, max_batched_tokens=1 << 16
    )
    scheduler = Scheduler(limits, pages, PrefixCache(pages, is_enabled=True))
    monkeypatch.setattr(ExpectedRoom, "_expected_left", None)
    for index in range(4096):
        params = SamplingParams(max_new_tokens=8)
        scheduler.add(Request(index=index, prompt_token_ids=(index % 97, 1, 2), params=params))
    assert len(scheduler.schedule(is_drained=True).chunks) == 4096
