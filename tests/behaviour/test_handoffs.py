"""A request that is prefilled by one engine and decoded by another accepts what it accepts in one, step for step."""

import random
from dataclasses import replace
from typing import Any

import pytest

from dflash_runtime.device import kv_pages
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import FinishReason, Request, RequestOutput, SamplingParams
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
    keys_of,
    make_llm,
    traces,
)
from dflash_testing.pairs import bundled_prompts

SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.9, seed=11)
SYNC: dict[str, Any] = {"scheduling": "sync"}
CHUNKED: dict[str, Any] = {"scheduling": "async", "max_batched_tokens": 20}
CASES = [
    pytest.param(
        draft,
        engine,
        params,
        id=f"{draft}-{mode}-{choice}",
        marks=[] if draft == "full" or (mode, choice) == ("chunked", "sampled") else [pytest.mark.slow],
    )
    for draft in DRAFTS
    for mode, engine in (("sync", SYNC), ("chunked", CHUNKED))
    for choice, params in (("greedy", PARAMS), ("sampled", SAMPLED))
]


@pytest.mark.parametrize(("draft", "engine", "params"), CASES)
def test_traces_are_those_of_one_engine(draft: str, engine: dict[str, Any], params: SamplingParams) -> None:
    wanted = make_llm(draft, **engine).generate(PROMPTS, params)
    connector = hand_off(make_llm(draft, **engine), PROMPTS, params)
    found = go_on(make_llm(draft, **engine), PROMPTS, params, connector)
    assert traces(found) == traces(wanted)
    assert [output.num_loaded for output in found] == list(LENGTHS)
    assert sum(map(sum, (output.acceptance_lengths for output in found))) > 100


def test_drafts_that_are_sampled_go_on_as_in_one_engine() -> None:
    engine = {"draft_sampling": "probabilistic"}
    wanted = make_llm(**engine).generate(PROMPTS[3:6], SAMPLED)
    connector = hand_off(make_llm(**engine), PROMPTS[3:6], SAMPLED)
    assert traces(go_on(make_llm(**engine), PROMPTS[3:6], SAMPLED, connector)) == traces(wanted)


def test_a_seed_that_the_sender_drew_is_gone_on_with() -> None:
    unseeded = replace(SAMPLED, seed=None)
    wanted = make_llm(seed=5).generate(PROMPTS[2:5], unseeded)
    connector = hand_off(make_llm(seed=5), PROMPTS[2:5], unseeded)
    assert traces(go_on(make_llm(seed=6), PROMPTS[2:5], unseeded, connector)) == traces(wanted)


@pytest.mark.parametrize("where", ["sender", "receiver", "both"])
def test_prefix_hits_on_either_side_change_nothing(where: str) -> None:
    """Prompts of one beginning, some of whose pages are in the cache of one side, or come to be."""
    beginning = max(bundled_prompts(), key=len)[:40]
    prompts = [beginning[:length] + PROMPTS[index][:5] for index, length in enumerate((40, 32, 33, 20, 40))]
    wanted = make_llm().generate(prompts, PARAMS)
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
    """Requests of the first prompts, added to an engine that is to load them."""
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
def test_hand_offs_may_come_late_and_in_any_order(engine: dict[str, Any]) -> None:
    """Those that have come decode, while others are waited for."""
    wanted = make_llm(**engine).generate(PROMPTS, PARAMS)
    connector = hand_off(make_llm(), PROMPTS, PARAMS)
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


def test_nothing_is_published_and_nothing_reserved_before_it_has_come() -> None:
    """While rows are on their way a request has the pages for them, without a lookahead, and none is in the cache."""
    connector = hand_off(make_llm(), PROMPTS[:4], PARAMS)
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


def test_the_lookahead_is_held_back_for_what_is_loading() -> None:
    """Nine pages of 4: 16 rows that are loading have four, and their first step takes two more. Another prompt, which
    takes three, would fit into the five that are left, and waits."""
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


def test_what_has_come_is_found_by_later_prompts() -> None:
    """Under the digest of this pair, once the step that switched it on has run."""
    prompts = [PROMPTS[-1], PROMPTS[-1]]
    connector = hand_off(make_llm(), prompts[:1], PARAMS)
    llm = make_llm()
    go_on(llm, prompts[:1], PARAMS, connector)
    again = llm.generate(prompts[:1], PARAMS)
    assert again[0].num_cached == 48
    assert traces(again) == traces(make_llm().generate(prompts[:1], PARAMS))


def test_rows_past_the_committed_ones_do_not_travel() -> None:
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
def test_one_that_ends_with_its_first_token_ends_on_the_other_side(reason: FinishReason) -> None:
    prompts, params = PROMPTS[3:4], SamplingParams(max_new_tokens=1)
    wanted = make_llm().generate(prompts, params)
    if reason is FinishReason.STOP:
        params = SamplingParams(max_new_tokens=9, stop_token_ids=wanted[0].token_ids)
        wanted = make_llm().generate(prompts, params)
    connector = hand_off(make_llm(), prompts, params)
    assert not connector.saved["00000"].tensors
    assert traces(go_on(make_llm(), prompts, params, connector)) == traces(wanted)
    assert wanted[0].finish_reason is reason


def test_a_short_pool_preempts_what_is_loading_and_what_was_loaded() -> None:
    """Six pages for four requests: texts and traces stay."""
    wanted = make_llm(num_pages=200).generate(PROMPTS[3:8], PARAMS)
    connector = hand_off(make_llm(), PROMPTS[3:8], PARAMS)
    llm = make_llm(num_pages=10, scheduling="async")
    assert traces(go_on(llm, PROMPTS[3:8], PARAMS, connector)) == traces(wanted)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page at a time, each of which takes some looks to come, as copies of a GPU do."""
    generator = random.Random(2)
    monkeypatch.setattr(kv_pages, "PIECE_BYTES", 1)
    monkeypatch.setattr(kv_pages.MovingPiece, "is_ready", property(lambda piece: generator.random() < 0.4))


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("num_pages", [60, 10])
def test_pages_that_move_piece_by_piece_are_all_there(num_pages: int) -> None:
    """Also of requests that are preempted in between, which begin again, beside others that decode."""
    wanted = make_llm().generate(PROMPTS, PARAMS)
    connector = hand_off(make_llm(), PROMPTS, PARAMS)
    llm = make_llm(num_pages=num_pages, scheduling="async", max_num_requests=6)
    found = go_on(llm, PROMPTS, PARAMS, connector)
    assert traces(found) == traces(wanted)
    assert sum(output.num_loaded > 0 for output in found) > 5


def test_pages_stay_until_the_other_side_has_them() -> None:
    """The request has ended and its row is free; its pages are neither free nor handed out."""
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
    assert seen.count((2, 0)) > 8  # 33 and 48 tokens and a lookahead have all seven, and the third prompt waits
    assert scheduler.pages.num_available == 7


def test_leaving_early_gives_everything_back() -> None:
    connector = hand_off(make_llm(), PROMPTS, PARAMS)
    connector.holds_back = True
    llm = make_llm(scheduling="async")
    stream = llm.stream(PROMPTS, PARAMS, handoffs=HandoffPlan(connector=connector, keys=keys_of(PROMPTS), timeout=0.3))
    next(stream)
    stream.close()
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.scheduler.has_work
    assert traces(llm.generate(PROMPTS[:2], PARAMS)) == traces(make_llm().generate(PROMPTS[:2], PARAMS))


def test_keys_are_one_a_prompt() -> None:
    plan = HandoffPlan(connector=MemoryConnector(), keys=("a",))
    with pytest.raises(Exception, match="1 keys of hand-offs for 2 prompts"):
        make_llm().generate(PROMPTS[:2], PARAMS, handoffs=plan)
