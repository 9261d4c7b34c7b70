"""The number of prompt rows in a step while other requests decode."""

import pytest

from dflash_runtime.scheduling.limits import RIDGE_ROWS, Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.scheduler import Scheduler
from dflash_runtime.scheduling.step_load import REQUESTS_PER_PROMPT, StepLoad

LIMITS = Limits(num_draft_tokens=0, max_model_len=2000, max_num_requests=64, vocab_size=50, max_batched_tokens=1000)
MANY = 3 * REQUESTS_PER_PROMPT
"""36 requests decode, so 192 prompt rows stay below the ridge."""


def prompt_rows(num_prompts: int, num_decoding: int = MANY, verify_width: int = 1, **changes: int) -> int:
    load = StepLoad(LIMITS)
    load.keeps_to_ridge = True
    load.max_batched_tokens = changes.get("max_batched_tokens", load.max_batched_tokens)
    return load.prompt_rows(num_decoding, verify_width, num_prompts)


@pytest.mark.parametrize(("num_prompts", "rows"), [(1, 192), (3, 192), (4, 1000 - MANY)])
def test_few_prompts_stay_below_the_ridge(num_prompts: int, rows: int) -> None:
    assert prompt_rows(num_prompts) == rows


def test_prompts_run_all_rows_when_no_request_decodes() -> None:
    assert prompt_rows(1, num_decoding=0) == 1000


def test_steps_with_drafts_do_not_keep_to_the_ridge() -> None:
    assert prompt_rows(1, verify_width=2) == 1000 - 2 * MANY


def test_more_decode_rows_than_the_ridge_leave_prompts_all_other_rows() -> None:
    assert prompt_rows(1, num_decoding=RIDGE_ROWS + 1) == 1000 - RIDGE_ROWS - 1
    assert prompt_rows(1, num_decoding=RIDGE_ROWS - 65) == 64


def test_prompt_rows_stay_within_the_limit_of_a_step() -> None:
    assert prompt_rows(1, max_batched_tokens=100) == 100 - MANY


def test_prompts_take_all_rows_if_captured_steps_have_no_room_for_them() -> None:
    assert StepLoad(LIMITS).prompt_rows(MANY, 1, 1) == 1000 - MANY


def scheduler() -> Scheduler:
    """A scheduler in which MANY requests decode."""
    pages = PagePool(1000, 16)
    found = Scheduler(LIMITS, pages, PrefixCache(pages, is_enabled=False))
    found.load.keeps_to_ridge = True
    for index in range(MANY):
        found.add(request(index, 1))
    assert len(found.schedule(is_drained=True).chunks) == MANY
    return found


def request(index: int, prompt_len: int) -> Request:
    return Request(index=index, prompt_token_ids=(1,) * prompt_len, params=SamplingParams(max_new_tokens=99))


@pytest.mark.parametrize(("num_prompts", "steps"), [(1, [[192], [192]]), (2, [[96, 96], [96, 96]])])
def test_few_prompts_continue_in_the_next_step(num_prompts: int, steps: list[list[int]]) -> None:
    assert chunk_lengths(num_prompts, num_steps=2) == steps


def test_many_prompts_take_all_rows() -> None:
    ((*lengths,),) = chunk_lengths(4, num_steps=1)
    assert sum(lengths) == 1000 - MANY


def chunk_lengths(num_prompts: int, num_steps: int) -> list[list[int]]:
    """The chunk lengths of each step after adding prompts of 600 tokens."""
    found = scheduler()
    for index in range(num_prompts):
        found.add(request(100 + index, 600))
    batches = [found.schedule(is_drained=False) for _ in range(num_steps)]
    return [[chunk.end - chunk.start for chunk in batch.chunks] for batch in batches]
