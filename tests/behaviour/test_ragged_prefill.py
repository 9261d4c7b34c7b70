"""All prompts of a step run in one forward, with the outputs of separate runs, and without delaying other results."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_runtime import engine
from dflash_runtime.device.storage.results import PendingForward
from dflash_runtime.llm import LLM
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import random_draft, random_llm, random_prompts, random_target

LENGTHS = (1, 15, 16, 17, 40, 63, 64, 65, 3, 33)
PROMPTS = random_prompts(LENGTHS, 97)


class Watched:
    """A target that records the number of rows of each forward."""

    def __init__(self, target: Target) -> None:
        self.config, self.embedding, self.head = target.config, target.embedding, target.head
        self.embedding_scale = target.embedding_scale
        self.num_rows: list[int] = []
        self._target = target

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self.num_rows.append(len(token_ids))
        return self._target(token_ids, positions, attend, taps, wanted)


def make_llm(**settings: Any) -> tuple[LLM, Watched]:
    target = random_target(torch.float64, num_layers=3, windows=(None, 20, None))
    watched = Watched(target)
    chosen: dict[str, Any] = {"max_num_requests": len(PROMPTS), "prefix_cache": False} | settings
    draft = random_draft(target, torch.float64, target_layer_ids=(0, 1))
    return random_llm(watched, draft, 7, **chosen), watched


def add(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[Request]:
    requests = [
        Request(index=index, prompt_token_ids=tuple(prompt), params=SamplingParams(seed=index, **params))
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        llm.engine.add(request)
    return requests


def finish(llm: LLM) -> None:
    while llm.engine.scheduler.has_work:
        llm.engine.step()


def traces(requests: Sequence[Request]) -> list[Any]:
    return [(request.output_token_ids, request.steps) for request in requests]


def one_by_one(prompts: Sequence[Sequence[int]], **params: Any) -> list[Any]:
    """The traces of these prompts on an engine that runs one request at a time. Computed once per process."""
    return _one_by_one(tuple(tuple(prompt) for prompt in prompts), **params)


@cache
def _one_by_one(prompts: tuple[tuple[int, ...], ...], **params: Any) -> list[Any]:
    llm, _ = make_llm(max_num_requests=1)
    requests = add(llm, prompts, **params)
    finish(llm)
    return traces(requests)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}], ids=str
)
def test_prompts_of_one_step_share_a_forward_and_give_the_output_of_each_alone(sampling: dict[str, Any]) -> None:
    llm, watched = make_llm()
    requests = add(llm, PROMPTS, max_new_tokens=8, **sampling)
    llm.engine.step()
    assert watched.num_rows == [sum(LENGTHS)]
    assert all(len(request.output_token_ids) == 1 for request in requests)
    finish(llm)
    assert traces(requests) == one_by_one(PROMPTS, max_new_tokens=8, **sampling)


def test_greedy_sampled_and_ending_prompts_share_a_forward() -> None:
    llm, watched = make_llm()
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (PROMPTS[:4], {"max_new_tokens": 4}),
        (PROMPTS[4:7], {"max_new_tokens": 4, "temperature": 1.0}),
        (PROMPTS[7:], {"max_new_tokens": 1}),
    ]
    requests = [add(llm, prompts, **params) for prompts, params in kinds]
    llm.engine.step()
    assert watched.num_rows == [sum(LENGTHS)]
    assert [request.is_finished for kind in requests for request in kind] == [False] * 7 + [True] * 3
    finish(llm)
    for found, (prompts, params) in zip(requests, kinds, strict=True):
        assert traces(found) == one_by_one(prompts, **params)


@pytest.mark.parametrize("rows", [7, 50])
def test_chunks_of_several_prompts_share_forwards(rows: int) -> None:
    """Some prompts end in a step, some begin in it, and some do both."""
    llm, watched = make_llm(max_batched_tokens=rows, scheduling="async")
    requests = add(llm, PROMPTS, max_new_tokens=6)
    finish(llm)
    assert traces(requests) == one_by_one(PROMPTS, max_new_tokens=6)
    assert max(watched.num_rows) <= max(rows, 8 * len(PROMPTS))


def test_hits_and_misses_share_a_forward() -> None:
    llm, watched = make_llm(prefix_cache=True)
    long = PROMPTS[7]
    add(llm, [long], max_new_tokens=3)
    finish(llm)
    watched.num_rows.clear()
    prompts = [[*long[:50], 1, 2], PROMPTS[4], [*long[:16], 5], PROMPTS[0]]
    requests = add(llm, prompts, max_new_tokens=8)
    llm.engine.step()
    assert [request.num_cached for request in requests] == [48, 0, 16, 0]
    assert watched.num_rows == [4 + 40 + 1 + 1]
    finish(llm)
    assert traces(requests) == one_by_one(prompts, max_new_tokens=8)


@pytest.mark.parametrize(("prefix_cache", "num_rows"), [(False, 16), (True, 0)])
def test_resumed_and_new_prompts_share_a_forward(num_rows: int, *, prefix_cache: bool) -> None:
    """With the prefix cache the resumed request finds all its rows, so its chunk is empty and only switches it on."""
    llm, watched = make_llm(prefix_cache=prefix_cache)
    prompts = [PROMPTS[2], PROMPTS[5]]
    (old,) = add(llm, prompts[:1], max_new_tokens=12)
    llm.engine.step()
    assert len(old.output_token_ids) == 1
    llm.engine.scheduler._preempt(old)
    (new,) = add(llm, prompts[1:], max_new_tokens=12)
    watched.num_rows.clear()
    llm.engine.step()
    assert watched.num_rows == [num_rows + len(PROMPTS[5])]
    finish(llm)
    assert traces([old, new]) == one_by_one(prompts, max_new_tokens=12)


def test_a_short_prompt_ends_while_a_long_one_is_prefilled() -> None:
    llm, _ = make_llm(max_batched_tokens=16, scheduling="async")
    prompts = [PROMPTS[7] * 3, PROMPTS[8]]
    requests = add(llm, prompts, max_new_tokens=8)
    while not requests[1].is_finished:
        llm.engine.step()
    assert not requests[0].is_prefilled
    finish(llm)
    assert traces(requests) == one_by_one(prompts, max_new_tokens=8)


def test_decoded_tokens_do_not_wait_for_a_long_prompt_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the asynchronous engine, tokens of a step are committed while the next step runs a long prompt."""
    monkeypatch.setattr(engine, "LONG_ROWS", 1)
    llm, _ = make_llm(max_batched_tokens=8, scheduling="async", max_in_flight=2)
    (decoding,) = add(llm, PROMPTS[:1], max_new_tokens=40)
    while not decoding.output_token_ids:
        llm.engine.step()
    add(llm, [PROMPTS[5]], max_new_tokens=2)
    llm.engine.step()
    for _ in range(4):
        num_tokens = len(decoding.output_token_ids)
        (committed,) = llm.engine.step()
        assert committed.request is decoding
        assert len(decoding.output_token_ids) > num_tokens
        assert decoding.num_in_flight == 1  # the step that also runs the prompt
        assert [bool(pending.chunks) for pending in llm.engine._in_flight] == [True]


def test_an_ended_request_runs_in_one_more_long_step_or_two_more_short_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host learns of a stop token only after it queued later steps. After a long step it queues no other step."""
    (text, _), *_ = one_by_one(PROMPTS[:1], max_new_tokens=40)
    stop = next(token for index, token in enumerate(text) if index >= 20 and token not in text[:index])
    params: dict[str, Any] = {"max_new_tokens": 40, "stop_token_ids": (stop,)}
    num_forwards = []
    for long_rows in (8, 9):  # a block has 8
        monkeypatch.setattr(engine, "LONG_ROWS", long_rows)
        llm, watched = make_llm(scheduling="async", max_in_flight=2)
        requests = add(llm, PROMPTS[:1], **params)
        finish(llm)
        assert traces(requests) == one_by_one(PROMPTS[:1], **params)
        num_forwards.append(len(watched.num_rows) - 1 - len(requests[0].steps))
    assert num_forwards == [1, 2]


def test_steps_with_short_prompts_do_not_reduce_the_queue() -> None:
    llm, _ = make_llm(max_batched_tokens=8, scheduling="async", max_in_flight=2)
    (decoding,) = add(llm, PROMPTS[:1], max_new_tokens=40)
    while not decoding.output_token_ids:
        llm.engine.step()
    add(llm, [PROMPTS[5]], max_new_tokens=2)
    for _ in range(2):
        llm.engine.step()
    assert [bool(pending.chunks) for pending in llm.engine._in_flight] == [True, True]


def test_decoding_requests_and_prompts_share_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward reads the target's weights once. Rows of blocks come first, and all results arrive together."""
    sent: list[tuple[list[int], int]] = []
    llm, watched = make_llm()
    send = PendingForward.send

    def watched_send(parts: Any, device: torch.device, batch: Batch) -> PendingForward:
        sent.append(([len(requests) for requests, _ in parts], len(batch.chunks)))
        return send(parts, device, batch)

    add(llm, PROMPTS[:2], max_new_tokens=20)
    llm.engine.step()
    watched.num_rows.clear()
    add(llm, PROMPTS[2:5], max_new_tokens=20)
    monkeypatch.setattr(PendingForward, "send", watched_send)
    llm.engine.step()
    assert watched.num_rows == [16 + sum(LENGTHS[2:5])]
    assert sent == [([2, 3], 3)]


@pytest.mark.parametrize("max_batched_tokens", [1, 7, 24, 40])
def test_rows_of_blocks_count_towards_the_rows_of_a_step(max_batched_tokens: int) -> None:
    """A quarter of the rows is left to prompts, however many requests decode."""
    llm, watched = make_llm(max_batched_tokens=max_batched_tokens)
    decoding = add(llm, PROMPTS[:2], max_new_tokens=60)
    while not all(request.output_token_ids for request in decoding):
        llm.engine.step()
    (prompt,) = add(llm, [PROMPTS[7]], max_new_tokens=2)
    watched.num_rows.clear()
    llm.engine.step()
    assert watched.num_rows == [16 + max(max_batched_tokens - 16, -(-max_batched_tokens // 4))]
    assert watched.num_rows[0] <= llm.limits.max_rows
    finish(llm)
    assert traces([*decoding, prompt]) == [
        *one_by_one(PROMPTS[:2], max_new_tokens=60), *one_by_one([PROMPTS[7]], max_new_tokens=2)
    ]  # fmt: skip


class Counting(TorchDispatchMode):
    """Records every torch operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class Silent(Watched):
    """A target without layers, since the reference attention runs one call per prompt."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.embedding[token_ids if wanted is None else token_ids[wanted]], None


def calls_of(num_prompts: int, *, resumed: bool) -> list[str]:
    """The torch operations of a step that admits and prefills `num_prompts` prompts."""
    llm = random_llm(Silent(random_target()), None, 0, max_num_requests=8, prefix_cache=False)
    requests = add(llm, PROMPTS[2 : 2 + num_prompts], max_new_tokens=9)
    if resumed:
        llm.engine.step()
        llm.engine.scheduler._preempt(requests[0])
        llm.engine.abort(requests[1:])
        add(llm, PROMPTS[2 : 2 + num_prompts], max_new_tokens=9)
    batch: Batch = llm.engine.scheduler.schedule(is_drained=True)
    assert len(batch.admitted) == num_prompts + resumed
    counting = Counting()
    with counting:
        llm.engine.runner.submit(batch)
    return counting.calls


@pytest.mark.parametrize("resumed", [False, True])
def test_the_number_of_operations_does_not_depend_on_the_number_of_prompts(*, resumed: bool) -> None:
    few, many = calls_of(2, resumed=resumed), calls_of(4, resumed=resumed)
    assert many == few
