"""Reservation, admission, preemption and the page pool, without tensors."""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest

from dflash_runtime.errors import CapacityError
from dflash_runtime.scheduling.batch import Batch, StepOutput
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import FinishReason, Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.scheduler import OutOfPages, Scheduler
from dflash_testing.refusals import refuses

PAGE = 16


def limits(
    num_draft_tokens: int = 3, max_model_len: int = 100, max_num_requests: int = 4, max_batched_tokens: int = 1000
) -> Limits:
    return Limits(
        num_draft_tokens=num_draft_tokens,
        max_model_len=max_model_len,
        max_num_requests=max_num_requests,
        vocab_size=50,
        max_batched_tokens=max_batched_tokens,
    )


def request(index: int = 0, prompt_len: int = 16, first: int = 1, **params: Any) -> Request:
    prompt = (first, *[2] * (prompt_len - 1))
    return Request(index=index, prompt_token_ids=prompt, params=SamplingParams(**params))


def scheduler(num_pages: int = 50, *, prefix_cache: bool = False, **changes: int) -> Scheduler:
    pages = PagePool(num_pages, PAGE)
    return Scheduler(limits(**changes), pages, PrefixCache(pages, is_enabled=prefix_cache))


def run(scheduler: Scheduler, tokens: int = 1, *, is_drained: bool = True) -> Batch:
    """One synchronous step in which every decoding request gets `tokens` tokens."""
    batch = scheduler.schedule(is_drained=is_drained)
    for item in [chunk.request for chunk in batch.chunks if chunk.is_last and not chunk.request.output_token_ids]:
        give(scheduler, item, 1)
    for item in batch.decode:
        give(scheduler, item, tokens)
    scheduler.check_integrity()
    return batch


def give(scheduler: Scheduler, item: Request, tokens: int) -> None:
    remaining = item.remaining(scheduler.limits.max_model_len)
    committed = min(tokens, remaining)
    is_done = committed == remaining
    scheduler.commit(item, StepOutput([7] * committed, [7] * 3, tokens - 1, is_done, item.generation))


def test_lookahead_is_the_anchor_and_every_draft() -> None:
    assert limits(3).num_lookahead_tokens == 4
    assert limits(0).num_lookahead_tokens == 1


@pytest.mark.parametrize(("kv_len", "can_draft"), [(95, True), (96, True), (97, False), (99, False)])
def test_a_block_is_drafted_only_if_it_fits_the_model_length(kv_len: int, can_draft: bool) -> None:
    assert (kv_len <= limits(3, max_model_len=100).last_draft_len) is can_draft


def test_a_prompt_of_one_page_reserves_two() -> None:
    """With page size 16, 16 prompt tokens and K 3, the first block has positions 16 to 19, on the second page.

    Source: vllm#43733.
    """
    schedule = scheduler()
    schedule.add(request(prompt_len=16))
    run(schedule)
    (item,) = schedule._running
    assert len(item.pages) == 2


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7, 15])
@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
def test_reservation_ends_with_the_last_slot_that_may_be_written(num_draft_tokens: int, num_in_flight: int) -> None:
    """It covers the known rows, and a lookahead for each step in flight and for this step."""
    fixed = limits(num_draft_tokens, max_model_len=100)
    for known in range(1, 65):
        last_slot = known + num_in_flight * (num_draft_tokens + 1) + num_draft_tokens
        assert fixed.reserved_len(known, num_in_flight) == min(last_slot + 1, 100)


def test_steps_in_flight_reserve_pages_as_if_every_draft_were_accepted() -> None:
    schedule = scheduler(max_model_len=1000)
    schedule.add(request(prompt_len=16, max_new_tokens=100))
    run(schedule)
    (item,) = schedule._running
    for num_in_flight in range(3):
        schedule.schedule(is_drained=num_in_flight == 0)
        assert item.num_in_flight == num_in_flight + 1
        assert len(item.pages) * PAGE >= item.kv_len + 4 * (num_in_flight + 1)


def test_a_step_that_may_not_be_needed_is_not_launched() -> None:
    """Each step in flight commits at least one token, so two steps cover the last two tokens (vllm#27922)."""
    schedule = scheduler()
    schedule.add(request(max_new_tokens=3))
    run(schedule)
    assert [len(schedule.schedule(is_drained=False).decode) for _ in range(3)] == [1, 1, 0]


def test_admission_waits_for_pages_and_keeps_the_order() -> None:
    schedule = scheduler(num_pages=1 + 5)
    for index in range(3):
        schedule.add(request(index, prompt_len=16, max_new_tokens=10))
    assert [chunk.request.index for chunk in run(schedule).chunks] == [0, 1]
    second = run(schedule, tokens=4)
    assert [item.index for item in second.decode] == [0, 1]
    assert not second.chunks
    while len(schedule._running) == 2 and schedule._running[0].index == 0:
        run(schedule, tokens=4)
    assert 2 in [item.index for item in schedule._running] or run(schedule).chunks[0].request.index == 2


def spans(batch: Batch) -> list[tuple[int, int, int, bool]]:
    return [(chunk.request.index, chunk.start, chunk.end, chunk.is_last) for chunk in batch.chunks]


def test_prompts_share_rows_and_a_single_prompt_takes_them_all() -> None:
    schedule = scheduler(max_batched_tokens=10)
    schedule.add(request(0, prompt_len=24, max_new_tokens=1))
    assert spans(run(schedule)) == [(0, 0, 10, False)]
    schedule.add(request(1, prompt_len=11, max_new_tokens=1))
    assert spans(run(schedule)) == [(0, 10, 15, False), (1, 0, 5, False)]
    assert spans(run(schedule)) == [(0, 15, 20, False), (1, 5, 10, False)]
    assert spans(run(schedule)) == [(0, 20, 24, True), (1, 10, 11, True)]


def test_short_prompts_end_while_long_ones_are_prefilled() -> None:
    """The older of two long prompts always makes progress, and short prompts that arrive later wait for neither."""
    schedule = scheduler(num_pages=500, max_model_len=2000, max_num_requests=16, max_batched_tokens=64)
    long = [request(index, prompt_len=1000, first=index, max_new_tokens=1) for index in range(2)]
    for item in long:
        schedule.add(item)
    run(schedule)
    waited = []
    while not all(item.is_finished for item in long):
        short = request(9, prompt_len=20, first=9, max_new_tokens=1)
        schedule.add(short)
        oldest = next(item for item in long if not item.is_finished)
        begun_len, num_steps = oldest.prefilled_len, 0
        while not short.is_finished:
            assert sum(chunk.end - chunk.start for chunk in run(schedule).chunks) <= 64
            num_steps += 1
        assert oldest.is_finished or oldest.prefilled_len >= begun_len + 32 * num_steps
        waited.append(num_steps)
    assert set(waited) == {1}
    assert len(waited) <= 2 * 1000 / 32


def test_a_prompt_that_cannot_share_takes_all_rows() -> None:
    """The other prompt waits, because no batch row is free for it."""
    schedule = scheduler(max_batched_tokens=20, max_num_requests=1)
    for index in range(2):
        schedule.add(request(index, prompt_len=50, max_new_tokens=1))
    assert [spans(run(schedule)) for _ in range(2)] == [[(0, 0, 20, False)], [(0, 20, 40, False)]]


def test_each_prompt_row_is_prefilled_once() -> None:
    schedule = scheduler(max_batched_tokens=7)
    for index in range(3):
        schedule.add(request(index, prompt_len=20 + index, max_new_tokens=30))
    rows = 0
    while schedule.has_work:
        rows += sum(chunk.end - chunk.start for chunk in run(schedule, tokens=2).chunks)
    assert rows == 20 + 21 + 22


def test_the_youngest_request_is_preempted_and_resumes_where_it_was() -> None:
    """Preemption happens only when no step is in flight, and keeps the request's counters (vllm#46066)."""
    schedule = scheduler(num_pages=1 + 6, max_num_requests=2)
    for index in range(2):
        schedule.add(request(index, prompt_len=16, max_new_tokens=60))
    old, young = run(schedule).admitted
    run_until(schedule, lambda: young.num_preemptions > 0)
    assert young.row is None
    assert young.num_in_flight == 0
    output = list(young.output_token_ids)
    run_until(schedule, lambda: young.row is not None)
    assert old.is_finished
    assert young.prefill_len == 16 + len(output) - 1
    run_until(schedule, lambda: not schedule.has_work)
    assert len(young.output_token_ids) == 60
    assert young.output_token_ids[: len(output)] == output


def run_until(schedule: Scheduler, is_reached: Callable[[], bool]) -> None:
    """Run steps until a condition holds. A schedule that never reaches it fails instead of running forever."""
    for _ in range(200):
        if is_reached():
            return
        run(schedule, tokens=4)
    pytest.fail("200 steps did not reach the condition")


def test_nothing_is_preempted_while_steps_are_in_flight() -> None:
    schedule = scheduler(num_pages=1 + 4, max_num_requests=2)
    for index in range(2):
        schedule.add(request(index, prompt_len=16, max_new_tokens=40))
    run(schedule)
    with pytest.raises(OutOfPages):
        launch_until_dry(schedule)
    assert all(item.num_preemptions == 0 for item in schedule._running)
    schedule.check_integrity()


def launch_until_dry(schedule: Scheduler) -> None:
    for _ in range(20):
        schedule.schedule(is_drained=False)


def test_late_results_of_a_reused_row_are_dropped() -> None:
    schedule = scheduler(max_num_requests=1)
    schedule.add(request(0, max_new_tokens=1))
    schedule.add(request(1, max_new_tokens=9))
    (old,) = run(schedule).admitted
    assert old.is_finished
    (new,) = run(schedule).admitted
    tokens = list(new.output_token_ids)
    assert schedule.commit(old, StepOutput([9, 9], [9] * 3, 1, True, old.generation)) == []
    assert schedule.commit(new, StepOutput([9, 9], [9] * 3, 1, True, old.generation)) == []
    assert new.output_token_ids == tokens


def test_a_request_can_finish_in_its_prefill() -> None:
    schedule = scheduler()
    schedule.add(request(max_new_tokens=1))
    (item,) = run(schedule).admitted
    assert item.finish_reason is FinishReason.LENGTH
    assert not schedule.has_work


def test_pages_come_back_when_everything_is_aborted() -> None:
    schedule = scheduler(num_pages=9)
    for index in range(3):
        schedule.add(request(index, max_new_tokens=8))
    schedule.schedule(is_drained=True)
    assert schedule.pages.num_available < 8
    schedule.abort()
    assert schedule.pages.num_available == 8
    assert not schedule.has_work


def test_page_zero_is_never_given_out() -> None:
    pages = PagePool(9, 4)
    assert sorted(pages.allocate(8) or []) == list(range(1, 9))
    assert pages.allocate(1) is None


def test_a_pool_without_a_usable_page_is_refused() -> None:
    with refuses(CapacityError, "too-few-kv-pages", field="num_pages", found=1):
        PagePool(1, 16)


def test_lengths_follow_the_anchor() -> None:
    item = request(prompt_len=5, max_new_tokens=8)
    item.commit([9], max_model_len=100)
    assert (item.total_len, item.kv_len) == (6, 5)
    item.commit([8, 7, 6], max_model_len=100)
    assert (item.total_len, item.kv_len) == (9, 8)


def test_a_begun_prompt_has_the_pages_of_all_its_rows() -> None:
    schedule = scheduler(num_pages=1 + 6, max_model_len=96, max_batched_tokens=16)
    schedule.add(request(0, prompt_len=70, max_new_tokens=4))
    run(schedule)
    (item,) = schedule._running
    assert (item.prefilled_len, len(item.pages)) == (16, 5)


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
def test_a_begun_prompt_is_not_overtaken_without_bound(num_in_flight: int) -> None:
    """A long prompt is begun before many short ones, and finishes before any of them."""
    schedule = scheduler(num_pages=1 + 66, max_model_len=1200, max_num_requests=8, max_batched_tokens=64)
    for index in range(5):
        schedule.add(request(index, prompt_len=60, first=index, max_new_tokens=60))
    pending: deque[Batch] = deque()
    long = request(5, prompt_len=900, max_new_tokens=4)
    younger = [request(index, prompt_len=60, first=index, max_new_tokens=60) for index in range(6, 50)]
    drive(schedule, pending, num_in_flight)
    for item in (long, *younger):
        schedule.add(item)
    num_steps = 0
    while not long.is_finished:
        drive(schedule, pending, num_in_flight)
        if long.row is not None:
            num_steps += 1
    assert num_steps <= 900 / 32 + 10  # it gets half of the 64 rows
    assert sum(item.is_finished for item in younger) == 0
    assert schedule.has_work


def drive(schedule: Scheduler, pending: "deque[Batch]", num_in_flight: int) -> None:
    """One step of an engine that keeps `num_in_flight` steps queued. Each step gives each request one token."""
    try:
        batch = schedule.schedule(is_drained=not pending)
    except OutOfPages:
        batch = Batch()
    if not batch.is_empty:
        pending.append(batch)
    while pending and (batch.is_empty or len(pending) > num_in_flight):
        done = pending.popleft()
        for chunk in done.chunks:
            schedule.finish_chunk(chunk)
        firsts = [chunk.request for chunk in done.chunks if chunk.is_last and not chunk.request.output_token_ids]
        for item in [*done.decode, *firsts]:
            if not item.is_finished:
                give(schedule, item, 1)
        if batch.is_empty:
            break
    schedule.check_integrity()


def test_requests_that_cannot_all_grow_are_not_all_admitted() -> None:
    """64 requests of 400 + 1500 tokens on 600 pages: five fit at their full length, eighteen at their first step."""
    schedule = scheduler(num_pages=1 + 600, num_draft_tokens=15, max_model_len=4096, max_num_requests=64,
                         max_batched_tokens=2048)  # fmt: skip
    for index in range(64):
        schedule.add(request(index, prompt_len=400, first=index % 50, max_new_tokens=1500))
    rows = 0
    while schedule.has_work:
        rows += sum(chunk.end - chunk.start for chunk in run(schedule, tokens=4).chunks)
    assert schedule.num_preemptions <= 12
    assert rows <= 1.4 * 64 * 400


def test_more_requests_are_admitted_after_requests_ended_early() -> None:
    """The expected length of a request follows the share of allowed tokens that earlier requests used."""
    schedule = scheduler(num_pages=1 + 60, max_model_len=1000, max_num_requests=16)
    for index in range(100):
        schedule.add(request(index, prompt_len=16, max_new_tokens=900, stop_token_ids=(9,)))
    num_running = []
    while schedule.has_work:
        batch = schedule.schedule(is_drained=True)
        firsts = [chunk.request for chunk in batch.chunks if not chunk.request.output_token_ids]
        num_running.append(schedule.num_running)
        for item in [*batch.decode, *firsts]:
            is_done = len(item.output_token_ids) > 4
            schedule.commit(item, StepOutput([9 if is_done else 7], [7] * 3, 0, is_done, item.generation))
    assert num_running[0] == 3
    assert max(num_running) > 9
    assert schedule.num_preemptions == 0


def test_evicting_from_a_large_pool_takes_linear_time() -> None:
    """Popping from the front of a plain dict walks past every page popped before, which is quadratic."""
    pages = PagePool(100_001, 1)
    held = pages.allocate(100_000) or []
    for page in held:
        pages.publish(page)
    pages.release(held)
    begin = perf_counter()
    assert len(pages.allocate(50_000) or []) == 50_000
    assert perf_counter() - begin < 2


def test_restart_repairs_a_step_that_failed_halfway() -> None:
    schedule = scheduler(prefix_cache=True, max_batched_tokens=20, max_num_requests=2)
    for index in range(3):
        schedule.add(request(index, prompt_len=30, max_new_tokens=9))
    for _ in range(3):
        run(schedule)
    tokens = [list(item.output_token_ids) for item in schedule.live]
    schedule.schedule(is_drained=True)
    schedule._running.clear()
    schedule.pages._free.pop()
    schedule.restart()
    schedule.check_integrity()
    assert schedule.pages.num_available == 49
    assert [list(item.output_token_ids) for item in schedule.live] == tokens
    while schedule.has_work:
        run(schedule)
    assert schedule.pages.num_available == 49
