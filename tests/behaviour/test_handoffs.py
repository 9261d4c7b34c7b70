"""A request that one engine prefills and another decodes has the same trace, step for step, as in one engine."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from dflash_runtime.device.storage import kv_pages
from dflash_runtime.errors import UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import FinishReason, Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.handoffs import (
    DRAFTS,
    LENGTHS,
    NUM_DRAFTS,
    PARAMS,
    PROMPTS,
    MemoryConnector,
    go_on,
    hand_off,
    handed_off,
    keys_of,
    make_llm,
    traces,
    whole_run,
)
from dflash_testing.pairs import bundled_prompts

SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.9, seed=11)
SYNC: dict[str, Any] = {"scheduling": "sync"}
CHUNKED: dict[str, Any] = {"scheduling": "async", "max_batched_tokens": 20}
BY_DEFAULT = {
    "full": ("chunked", "sampled"),
    "sliding": ("chunked", "greedy"),
    "dflash2": ("chunked", "sampled"),
    "dspark": ("sync", "greedy"),
    "anchor-first": ("chunked", "greedy"),
}
"""Mode and choice of the default case of drafts. The other cases are slow."""

CASES = [
    pytest.param(
        draft,
        engine,
        params,
        id=f"{draft}-{mode}-{choice}",
        marks=[] if (mode, choice) == BY_DEFAULT.get(draft) else [pytest.mark.slow],
    )
    for draft in DRAFTS
    for mode, engine in (("sync", SYNC), ("chunked", CHUNKED))
    for choice, params in (("greedy", PARAMS), ("sampled", SAMPLED))
]


@pytest.mark.parametrize(("draft", "engine", "params"), CASES)
def test_traces_equal_those_of_one_engine(draft: str, engine: dict[str, Any], params: SamplingParams) -> None:
    wanted = whole_run(PROMPTS, params, draft, **engine)
    connector = hand_off(make_llm(draft, **engine), PROMPTS, params)
    found = go_on(make_llm(draft, **engine), PROMPTS, params, connector)
    assert traces(found) == traces(wanted)
    assert [output.num_loaded for output in found] == list(LENGTHS)
    assert sum(map(sum, (output.acceptance_lengths for output in found))) > 100


def test_sampled_drafts_continue_as_in_one_engine() -> None:
    engine = {"draft_sampling": "probabilistic"}
    wanted = make_llm(**engine).generate(PROMPTS[3:6], SAMPLED)
    connector = hand_off(make_llm(**engine), PROMPTS[3:6], SAMPLED)
    assert traces(go_on(make_llm(**engine), PROMPTS[3:6], SAMPLED, connector)) == traces(wanted)


def test_the_receiver_continues_with_the_seed_that_the_sender_drew() -> None:
    unseeded = replace(SAMPLED, seed=None)
    wanted = make_llm(seed=5).generate(PROMPTS[2:5], unseeded)
    connector = hand_off(make_llm(seed=5), PROMPTS[2:5], unseeded)
    assert traces(go_on(make_llm(seed=6), PROMPTS[2:5], unseeded, connector)) == traces(wanted)


@pytest.mark.parametrize("where", ["sender", "receiver", "both"])
def test_prefix_hits_on_either_side_change_nothing(where: str) -> None:
    """Prompts share a prefix. One side or both have some of its pages in the cache, and others are added."""
    beginning = max(bundled_prompts(), key=len)[:40]
    prompts = [beginning[:length] + PROMPTS[index][:5] for index, length in enumerate((40, 32, 33, 20, 40))]
    wanted = whole_run(tuple(prompts))
    sender, receiver = make_llm(), make_llm()
    if where in ("sender", "both"):
        sender.generate([beginning], PARAMS)
    if where in ("receiver", "both"):
        receiver.generate([beginning], PARAMS)
    found = go_on(receiver, prompts, PARAMS, hand_off(sender, prompts, PARAMS))
    assert traces(found) == traces(wanted)
    num_found = [output.num_cached for output in found]
    if where != "sender":
        assert num_found == [32, 32, 32, 16, 32]
    assert [output.num_loaded + output.num_cached for output in found] == [len(prompt) for prompt in prompts]


def begin_loading(llm: LLM, connector: MemoryConnector, num_requests: int = 1, **plan: Any) -> list[Request]:
    """Add requests of the first prompts to an engine, which loads their hand-offs."""
    keys = keys_of(PROMPTS[:num_requests])
    handoffs = HandoffPlan(connector=connector, keys=keys, **plan)
    llm.engine.open_transfers(handoffs, llm.fingerprint)
    requests = [
        handoffs.apply(Request(index=index, prompt_token_ids=prompt, params=PARAMS))
        for index, prompt in enumerate(PROMPTS[:num_requests])
    ]
    for request in requests:
        llm.engine.add(request)
    return requests


@pytest.mark.parametrize("engine", [{"scheduling": "sync"}, {"scheduling": "async"}], ids=str)
def test_hand_offs_may_arrive_late_and_in_any_order(engine: dict[str, Any]) -> None:
    """Requests with a hand-off decode while the engine waits for other hand-offs."""
    wanted = whole_run(PROMPTS, **engine)
    connector = handed_off(PROMPTS)
    connector.holds_back = True
    llm = make_llm(**engine)
    requests = begin_loading(llm, connector, len(PROMPTS))
    generator = random.Random(3)
    num_steps_beside = 0
    while llm.engine.scheduler.has_work:
        if connector.waiting and generator.random() < 0.25:
            connector.deliver(generator.randrange(len(connector.waiting)))
        is_loading = any(request.is_loading for request in requests)
        num_steps_beside += bool(llm.engine.step()) and is_loading
        llm.engine.scheduler.check_integrity()
    assert traces([RequestOutput.read(request) for request in requests]) == traces(wanted)
    assert num_steps_beside > 10


def test_a_loading_request_publishes_no_page_and_reserves_no_lookahead() -> None:
    """Until its hand-off arrives a request has only the pages for its rows, and none of them is in the cache."""
    connector = handed_off(PROMPTS[:4])
    connector.holds_back = True
    llm = make_llm()
    scheduler = llm.engine.scheduler
    request = begin_loading(llm, connector, 4)[3]  # 17 tokens
    for _ in range(3):
        llm.engine.step()
        assert request.is_loading
        assert len(request.pages) == 2
        assert len(scheduler.cache) == 0
        scheduler.check_integrity()
    connector.deliver(3)
    llm.engine.step()
    assert not request.is_loading
    assert len(request.pages) == 2
    assert len(scheduler.cache) == 1
    llm.engine.step()
    assert len(request.pages) == scheduler.pages.pages_for(17 + NUM_DRAFTS + 1) == 2
    llm.engine.abort()
    assert not scheduler.has_work


def test_admission_keeps_pages_free_for_the_lookahead_of_a_loading_request() -> None:
    """The pool has nine pages of 4 tokens. The loading request has four pages, and its first step takes two more.

    Another prompt needs three pages. Five are free, but it waits, because the loading request needs two of them.
    """
    connector = hand_off(make_llm(page_size=4), PROMPTS[:3], PARAMS)
    connector.holds_back = True
    llm = make_llm(page_size=4, num_pages=10)
    scheduler = llm.engine.scheduler
    llm.engine.open_transfers(HandoffPlan(connector=connector, keys=("00002",)), llm.fingerprint)
    params = SamplingParams(max_new_tokens=8)
    loading = Request(index=0, prompt_token_ids=PROMPTS[2], params=params, load_key="00002")
    llm.engine.add(loading)
    llm.engine.step()
    other = Request(index=1, prompt_token_ids=PROMPTS[1][:4], params=params)
    llm.engine.add(other)
    for _ in range(3):
        llm.engine.step()
        assert (scheduler.pages.num_available, other.row) == (5, None)
    connector.deliver()
    while scheduler.has_work:
        llm.engine.step()
        scheduler.check_integrity()
    assert loading.num_preemptions == other.num_preemptions == 0
    assert len(other.output_token_ids) == len(loading.output_token_ids) == 8


def test_later_prompts_find_the_pages_of_a_hand_off() -> None:
    """The pages are published after the first step of the loaded request, with the digests of this pair."""
    prompts = [PROMPTS[-1], PROMPTS[-1]]
    connector = handed_off(PROMPTS[-1:])
    llm = make_llm()
    go_on(llm, prompts[:1], PARAMS, connector)
    again = llm.generate(prompts[:1], PARAMS)
    assert again[0].num_cached == 48
    assert traces(again) == traces(whole_run(PROMPTS[-1:]))


def test_rows_after_the_committed_rows_are_sent_as_zeros() -> None:
    llm = make_llm()
    llm.engine.runner.target_kv.keys.fill_(7.0)
    assert llm.engine.runner.draft_kv is not None
    llm.engine.runner.draft_kv.values.fill_(7.0)
    handoff = hand_off(llm, PROMPTS[3:4], PARAMS).saved["00000"]
    assert handoff.kv_len == 17
    for tensor in handoff.tensors.values():
        assert tensor.shape[0] == 2
        assert tensor[1, :, :, 0].abs().sum() > 0
        assert not tensor[1, :, :, 1:].any()


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP], ids=str)
def test_a_request_that_ends_with_its_first_token_ends_on_the_other_side(reason: FinishReason) -> None:
    prompts, params = PROMPTS[3:4], SamplingParams(max_new_tokens=1)
    wanted = make_llm().generate(prompts, params)
    if reason is FinishReason.STOP:
        params = SamplingParams(max_new_tokens=9, stop_token_ids=wanted[0].token_ids)
        wanted = make_llm().generate(prompts, params)
    connector = hand_off(make_llm(), prompts, params)
    assert not connector.saved["00000"].tensors
    assert traces(go_on(make_llm(), prompts, params, connector)) == traces(wanted)
    assert wanted[0].finish_reason is reason


def test_a_short_pool_preempts_loading_and_loaded_requests() -> None:
    """Nine pages for four requests at a time: texts and traces stay the same."""
    wanted = whole_run(PROMPTS[3:8])
    connector = handed_off(PROMPTS[3:8])
    llm = make_llm(num_pages=10, scheduling="async")
    assert traces(go_on(llm, PROMPTS[3:8], PARAMS, connector)) == traces(wanted)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy one page at a time, and let each copy be ready only after several checks, like copies on a GPU."""
    generator = random.Random(2)
    monkeypatch.setattr(kv_pages, "PIECE_BYTES", 1)
    monkeypatch.setattr(kv_pages.MovingPiece, "is_ready", property(lambda piece: generator.random() < 0.4))


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("num_pages", [60, 10])
def test_pages_that_move_piece_by_piece_all_arrive(num_pages: int) -> None:
    """Other requests decode meanwhile. With few pages some requests are preempted halfway and start again."""
    wanted = whole_run(PROMPTS)
    connector = handed_off(PROMPTS)
    llm = make_llm(num_pages=num_pages, scheduling="async", max_num_requests=6)
    found = go_on(llm, PROMPTS, PARAMS, connector)
    assert traces(found) == traces(wanted)
    assert sum(output.num_loaded > 0 for output in found) > 5


def test_pages_are_held_until_the_other_side_has_them() -> None:
    """The request has ended and its row is free, but its pages are not."""
    connector = MemoryConnector(holds_saves=True)
    llm = make_llm(num_pages=8, max_num_requests=1)
    stream = llm.stream(
        PROMPTS[6:9], PARAMS, handoffs=HandoffPlan(connector=connector, keys=keys_of(PROMPTS[6:9]), is_sending=True)
    )
    scheduler = llm.engine.scheduler
    seen: list[tuple[int, int]] = []
    step = llm.engine.step

    def watched() -> Any:
        done = step()
        scheduler.check_integrity()
        seen.append((len(connector.saved), scheduler.pages.num_available))
        if len(seen) > 12 and connector.unconfirmed:
            connector.confirm()
        return done

    llm.engine.step = watched  # type: ignore[method-assign]
    ended = [delta.index for delta in stream if delta.output is not None]
    assert ended == [0, 1, 2]
    assert seen.count((2, 0)) > 8  # prompts of 33 and 48 tokens hold all seven pages, and the third prompt waits
    assert scheduler.pages.num_available == 7


def test_closing_a_stream_early_releases_everything() -> None:
    connector = handed_off(PROMPTS)
    connector.holds_back = True
    llm = make_llm(scheduling="async")
    stream = llm.stream(PROMPTS, PARAMS, handoffs=HandoffPlan(connector=connector, keys=keys_of(PROMPTS), timeout=0.3))
    next(stream)
    stream.close()
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.scheduler.has_work
    assert traces(llm.generate(PROMPTS[:2], PARAMS)) == traces(whole_run(PROMPTS[:2]))


def test_the_number_of_keys_must_be_the_number_of_prompts() -> None:
    plan = HandoffPlan(connector=MemoryConnector(), keys=("a",))
    with pytest.raises(UsageError) as caught:
        make_llm().generate(PROMPTS[:2], PARAMS, handoffs=plan)
    assert {"1", "2"} <= set(re.findall(r"\d+", caught.value.message))
