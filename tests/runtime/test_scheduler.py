"""Reservation, admission and the page pool; no tensors."""

import pytest

from dflash_runtime.batch import StepOutput
from dflash_runtime.errors import CapacityError
from dflash_runtime.pages import PagePool
from dflash_runtime.request import FinishReason, Request, SamplingParams
from dflash_runtime.scheduler import Limits, Scheduler


def limits(num_draft_tokens: int = 3, max_model_len: int = 100, max_num_requests: int = 4) -> Limits:
    return Limits(
        num_draft_tokens=num_draft_tokens,
        max_model_len=max_model_len,
        max_num_requests=max_num_requests,
        vocab_size=50,
    )


def request(index: int = 0, prompt_len: int = 16, **params: int) -> Request:
    return Request(index=index, prompt_token_ids=(1,) * prompt_len, params=SamplingParams(**params))


def test_lookahead_is_the_anchor_and_every_draft() -> None:
    assert limits(3).num_lookahead_tokens == 4
    assert limits(0).num_lookahead_tokens == 1


@pytest.mark.parametrize(("kv_len", "can_draft"), [(95, True), (96, True), (97, False), (99, False)])
def test_a_block_is_drafted_only_where_it_fits_the_model(kv_len: int, can_draft: bool) -> None:
    assert limits(3, max_model_len=100).can_draft(kv_len) is can_draft


def test_a_prompt_of_one_page_reserves_two() -> None:
    """Page 16, prompt 16, K 3: the first block stands at 16..19, on the second page."""
    reserved = limits(3).reserved_len(request(prompt_len=16, max_new_tokens=1))
    assert PagePool(10, 16).pages_for(reserved) == 2


def test_every_slot_a_step_may_write_is_reserved() -> None:
    """Prompts of 1 to 64 tokens, any output length: the last block's last slot lies in an owned page."""
    for prompt_len in range(1, 65):
        for max_new_tokens in (1, 2, 5, 16, 17):
            item = request(prompt_len=prompt_len, max_new_tokens=max_new_tokens)
            last_kv_len = prompt_len + max_new_tokens - 2  # one token is left to generate when the last step starts
            needed = max(prompt_len, last_kv_len + 4 if max_new_tokens > 1 else prompt_len)
            assert limits(3, max_model_len=1000).reserved_len(item) >= needed


def test_admission_waits_for_pages_and_keeps_the_order() -> None:
    scheduler = Scheduler(limits(max_num_requests=4), PagePool(1 + 5, 16))
    for index in range(3):
        scheduler.add(request(index, prompt_len=16, max_new_tokens=10))  # 29 tokens, two pages
    first = scheduler.schedule()
    assert [item.index for item in first.prefill] == [0, 1]
    scheduler.commit([StepOutput(item, [7]) for item in first.prefill])
    second = scheduler.schedule()
    assert [item.index for item in second.draft] == [0, 1]
    assert not second.prefill
    scheduler.commit([StepOutput(second.draft[0], [7] * 20, 3)])
    assert second.draft[0].finish_reason is FinishReason.LENGTH
    assert [item.index for item in scheduler.schedule().prefill] == [2]


def test_pages_come_back_when_everything_is_aborted() -> None:
    pages = PagePool(9, 16)
    scheduler = Scheduler(limits(), pages)
    for index in range(3):
        scheduler.add(request(index, max_new_tokens=8))
    scheduler.schedule()
    assert pages.num_free < 8
    scheduler.abort()
    assert pages.num_free == 8
    assert not scheduler.has_work


def test_page_zero_is_never_given_out() -> None:
    pages = PagePool(9, 4)
    assert sorted(pages.allocate(32)) == list(range(1, 9))
    assert not pages.can_allocate(1)


def test_a_pool_without_a_usable_page_is_refused() -> None:
    with pytest.raises(CapacityError):
        PagePool(1, 16)


def test_lengths_follow_the_anchor() -> None:
    item = request(prompt_len=5, max_new_tokens=8)
    item.commit([9], max_model_len=100)
    assert (item.total_len, item.kv_len, item.anchor_id) == (6, 5, 9)
    item.commit([8, 7, 6], max_model_len=100)
    assert (item.total_len, item.kv_len, item.anchor_id) == (9, 8, 6)
