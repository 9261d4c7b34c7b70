"""A hit of the prefix cache continues recurrent layers from a snapshot: same text and drafts as without the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.storage.recurrent import snapshot_bytes
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.llm import LLM
from dflash_runtime.models.target import Target
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.snapshots import SnapshotIndex
from dflash_testing.handoffs import go_on, hand_off
from dflash_testing.hosted_models import make_model
from dflash_testing.pairs import placement, random_draft, random_llm, random_prompts
from snapshot_policies import Simulation, Turn

NUM_DRAFTS, PAGE = 7, 4
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Pair:
    """A hybrid target, and a draft whose tokens are sometimes right."""

    target: Target
    draft: Draft

    def llm(self, **engine: Any) -> LLM:
        return random_llm(self.target, self.draft, NUM_DRAFTS, **{"page_size": PAGE, **engine})

    @cache  # noqa: B019 - one pair per session
    def cold(self, prompts: tuple[tuple[int, ...], ...], params: SamplingParams = PARAMS) -> list[RequestOutput]:
        """The outputs without a prefix cache, one request at a time."""
        return self.llm(prefix_cache=False, max_num_requests=1).generate(prompts, params)

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(random_prompts((length,), self.target.config.vocab_size, seed)[0])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid target with random weights."""
    path = tmp_path_factory.mktemp("hybrid")
    model = make_model(path, "qwen3_5_text", initializer_range=0.15)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(6.0)  # the states of random weights forget a text within a few tokens
    model.save_pretrained(path)
    return path


def load(path: Path, dtype: torch.dtype) -> Pair:
    target = load_target(open_target(path), placement(dtype))
    return Pair(target, random_draft(target, dtype, rope=RopeConfig(theta=10_000.0)))


@pytest.fixture(scope="module")
def pair(path: Path) -> Pair:
    return load(path, torch.float64)


def check(found: Sequence[RequestOutput], wanted: Sequence[RequestOutput]) -> None:
    assert [(item.token_ids, item.drafts) for item in found] == [(item.token_ids, item.drafts) for item in wanted]


def settle(llm: LLM) -> None:
    """Every slot and page has one owner after a call."""
    llm.engine.scheduler.check_integrity()


BOUNDARIES = range(PAGE, 140, PAGE)


@pytest.mark.parametrize(
    "boundary", [pytest.param(at, marks=() if at in (4, 60, 64, 68) else pytest.mark.slow) for at in BOUNDARIES]
)
@pytest.mark.parametrize("scheduling", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_hit_at_a_boundary(pair: Pair, boundary: int, scheduling: str) -> None:
    """The snapshot is taken at the end of the first prompt. The second prompt leaves the first there."""
    first, other = pair.prompt(boundary + 1), (*pair.prompt(boundary), *pair.prompt(9, seed=1))
    llm = pair.llm(scheduling=scheduling)
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in (first, other)]
    assert [item.num_cached for item in outputs] == [0, boundary]
    check(outputs, pair.cold((first, other)))
    settle(llm)


def shared_load(pair: Pair) -> tuple[tuple[int, ...], ...]:
    """Prompts with three beginnings, of which one continues another, and prompts of their own."""
    system, few_shot = pair.prompt(90), pair.prompt(75, seed=5)
    beginnings = (system[:50], system, few_shot, ())
    return tuple((*beginnings[index % 4], *pair.prompt(5 + 7 * index, seed=10 + index)) for index in range(8))


MODES: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_requests": 1},
    "together": {"max_num_requests": 6},
    "in chunks": {"max_num_requests": 3, "max_batched_tokens": 24},
    "in odd chunks": {"max_num_requests": 4, "max_batched_tokens": 37},
    "few slots": {"max_num_requests": 4, "slots": 4},
    "few pages": {"max_num_requests": 4, "num_pages": 120},
}
DEFAULT = {("in chunks", "async"), ("few slots", "sync"), ("few pages", "async")}


@pytest.mark.parametrize(
    ("mode", "scheduling"),
    [
        pytest.param(mode, scheduling, marks=() if (mode, scheduling) in DEFAULT else pytest.mark.slow)
        for mode in MODES
        for scheduling in ("sync", "async")
    ],
)
def test_texts_and_drafts_are_those_without_the_cache(pair: Pair, mode: str, scheduling: str) -> None:
    """Each prompt runs three times, the second time beside the first, so that hits end at branches and at ends."""
    given = shared_load(pair)
    llm = limited(pair, **MODES[mode], scheduling=scheduling)
    outputs = llm.generate([*given, *given], PARAMS) + llm.generate(given, PARAMS)
    check(outputs, pair.cold(given) * 3)
    assert sum(item.num_cached for item in outputs) > (50 if mode.startswith("few") else 600)
    settle(llm)


def limited(pair: Pair, slots: int | None = None, **engine: Any) -> LLM:
    """An engine with room for this many snapshots."""
    if slots is not None:
        engine["snapshot_memory_bytes"] = slots * slot_bytes(pair)
    return pair.llm(**engine)


def slot_bytes(pair: Pair) -> int:
    assert pair.target.config.recurrence is not None
    return snapshot_bytes(pair.target.config.recurrence, torch.float64)


def test_prompts_that_arrive_together_wait_for_the_snapshot_of_their_beginning(pair: Pair) -> None:
    beginning = pair.prompt(100)
    given = tuple((*beginning, *pair.prompt(5 + index, seed=index + 1)) for index in range(5))
    llm = pair.llm(max_num_requests=8, max_batched_tokens=64)
    outputs = llm.generate(given, PARAMS)
    assert [item.num_cached for item in outputs] == [0] + [100] * 4
    check(outputs, pair.cold(given))


def test_the_second_prompt_with_a_beginning_keeps_its_state_for_the_third(pair: Pair) -> None:
    beginning = pair.prompt(41)
    given = tuple((*beginning, *pair.prompt(20, seed=index + 1)) for index in range(3))
    llm = pair.llm()
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in given]
    assert [item.num_cached for item in outputs] == [0, 0, 40]
    check(outputs, pair.cold(given))


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize(
    "num_tokens", [12, pytest.param(5, marks=pytest.mark.slow), pytest.param(31, marks=pytest.mark.slow)]
)
def test_the_next_turn_of_a_conversation_continues_from_the_answer(
    pair: Pair, num_tokens: int, scheduling: str
) -> None:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    llm = pair.llm(scheduling=scheduling, max_num_requests=3)
    turns = [pair.prompt(length, seed=length) for length in (17, 30, 48)]
    first = llm.generate(turns, params)
    texts = tuple((*turn, *item.token_ids, *pair.prompt(11, seed=3)) for turn, item in zip(turns, first, strict=True))
    second = llm.generate(texts, params)
    ends = [(len(turn) + num_tokens - 1) // PAGE * PAGE for turn in turns]
    assert [item.num_cached for item in second] == ends
    check(second, pair.cold(texts, params))
    settle(llm)


def test_a_preempted_request_continues_from_its_last_page(pair: Pair) -> None:
    given = tuple(pair.prompt(length, seed=length) for length in (20, 21, 22, 23))
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    llm = pair.llm(max_num_requests=4)
    scheduler, outputs = llm.engine.scheduler, list[RequestOutput]()
    preempted = dict[Request, int]()
    for delta in llm.stream(given, params):
        request = scheduler.live[-1] if scheduler.live else None
        is_running = request is not None and request.index == 3 and request.row is not None
        if request is not None and is_running and request.num_preemptions < len(request.output_token_ids) // 10:
            scheduler._preempt(request)
            preempted[request] = request.kv_len
        for item, kv_len in preempted.items():
            assert item.row is None or item.restored is not None
            assert item.row is None or item.restored.position == kv_len // PAGE * PAGE  # type: ignore[union-attr]
        outputs += [] if delta.output is None else [delta.output]
    outputs.sort(key=lambda item: item.index)
    assert outputs[3].num_preemptions == 2
    assert outputs[3].num_cached == 0
    check(outputs, pair.cold(given, params))
    settle(llm)


@pytest.mark.parametrize("scheduling", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_requests_that_run_out_of_pages(pair: Pair, scheduling: str) -> None:
    given = tuple(pair.prompt(length, seed=length) for length in (20, 21, 22, 23))
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    llm = pair.llm(max_num_requests=4, num_pages=35, scheduling=scheduling)
    outputs = llm.generate(given, params)
    assert any(item.num_preemptions for item in outputs)
    check(outputs, pair.cold(given, params))
    settle(llm)


def test_a_hand_off_finds_a_cached_beginning(pair: Pair) -> None:
    """The cached pages are not loaded again, and the state comes with the hand-off."""
    beginning = pair.prompt(40)
    first, other = (*beginning, 1), (*beginning, *pair.prompt(13, seed=2))
    receiver = pair.llm(max_num_requests=2)
    receiver.generate([first], PARAMS)
    given = [list(other)]
    found = go_on(receiver, given, PARAMS, hand_off(pair.llm(), given, PARAMS))
    check(found, pair.cold((other,)))
    assert (found[0].num_cached, found[0].num_loaded) == (40, len(other) - 40)
    settle(receiver)


def test_stopped_and_aborted_requests_give_their_slots_back(pair: Pair) -> None:
    given = shared_load(pair)
    llm = limited(pair, slots=8, max_num_requests=4, max_batched_tokens=24, scheduling="async")
    for count in (1, 20):
        stream = llm.stream(given, PARAMS)
        for _ in range(count):
            next(stream)
        stream.close()
        settle(llm)
    check(llm.generate(given, PARAMS), pair.cold(given))
    settle(llm)


def test_slots_of_a_step_that_is_forgotten_are_free(pair: Pair) -> None:
    """Aborting the last request and restarting both forget the steps in flight, whose chunks write into slots."""
    llm = pair.llm(max_num_requests=2)
    scheduler = llm.engine.scheduler
    for forget in (scheduler.abort, scheduler.restart):
        request = Request(index=0, prompt_token_ids=pair.prompt(30), params=PARAMS)
        scheduler.add(request)
        (chunk,) = scheduler.schedule(is_drained=True).chunks
        assert [keep.position for keep in chunk.keeps] == [28]
        assert request.spare is not None
        forget()
        assert request.spare is None
        assert not request.keeping
        settle(llm)
        scheduler.abort()
        settle(llm)


def test_an_aborted_answer_that_queued_steps_continue_keeps_no_state(pair: Pair) -> None:
    """The device may have passed a later boundary than the tokens that were committed."""
    for count in range(3, 3 + PAGE):
        prompt, found = pair.prompt(30, seed=count), list[int]()
        llm = pair.llm(scheduling="async")
        stream = llm.stream([prompt], PARAMS)
        while len(found) < count:
            found += next(stream).token_ids
        stream.close()
        other = (*prompt, *found, *pair.prompt(9))
        check(llm.generate([other], PARAMS), pair.cold((other,)))


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_an_answer_that_passes_no_boundary_keeps_no_state(pair: Pair, num_tokens: int) -> None:
    """The answer begins at a boundary, whose state is not in the request's spare slot."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    prompt, llm = pair.prompt(28), pair.llm()
    (output,) = llm.generate([prompt], params)
    other = (*prompt, *output.token_ids, *pair.prompt(9, seed=1))
    (found,) = llm.generate([other], PARAMS)
    assert found.num_cached == 24
    check([found], pair.cold((other,)))


@pytest.mark.parametrize("num_before", range(1, 5))
def test_a_boundary_shortly_after_the_begin_of_a_chunk(pair: Pair, num_before: int) -> None:
    """The convolution needs rows of the chunk before, which the ring loses in this step."""
    given = tuple((*pair.prompt(44), *pair.prompt(60, seed=index)) for index in (1, 2, 3))
    llm = pair.llm(max_num_requests=1, max_batched_tokens=44 - num_before)
    outputs = llm.generate(given, PARAMS)
    assert [item.num_cached for item in outputs] == [0, 0, 44]
    check(outputs, pair.cold(given))


@pytest.mark.parametrize("scheduling", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_requests_restart_without_snapshots_after_a_failed_step(
    pair: Pair, scheduling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed step may have left any snapshot half written."""
    given = shared_load(pair)[:6]
    llm = pair.llm(max_num_requests=3, max_batched_tokens=48, scheduling=scheduling)
    submit, counts = llm.engine.runner.submit, [0]

    def failing(batch: Batch) -> Any:
        counts[0] += 1
        pending = submit(batch)
        if counts[0] in (4, 11):
            llm.engine.runner.states.pool.snapshots.states.fill_(torch.nan)  # type: ignore[union-attr]
            raise RuntimeError("planted")
        return pending

    monkeypatch.setattr(llm.engine.runner, "submit", failing)
    check(llm.generate(given, PARAMS), pair.cold(given))
    settle(llm)


@pytest.mark.parametrize("slots", [pytest.param(6, marks=pytest.mark.slow), 38])
def test_an_engine_hits_as_often_as_the_simulation(pair: Pair, slots: int) -> None:
    """`examples/benchmarks/snapshot_policies.py` chose the policy by simulation."""
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    llm = limited(pair, slots=slots, max_num_requests=1)
    turns, found = list[Turn](), list[int]()
    histories = [(*pair.prompt(40), *pair.prompt(9, seed=seed)) for seed in (1, 2, 3)]
    for number in range(8):
        speaker = number % 3
        prompts = [histories[speaker], (*pair.prompt(60), *pair.prompt(11, seed=20 + number)), pair.prompt(30, number)]
        for prompt in prompts:
            (output,) = llm.generate([prompt], params)
            turns.append(Turn(prompt, output.token_ids))
            found.append(output.num_cached)
        answer = turns[-3].answer[5 * (speaker == 1) :]  # the second speaker sends half of each answer back
        histories[speaker] += (*answer, *pair.prompt(5, seed=50 + number))
    simulation = Simulation(SnapshotIndex(slots), 1000, concurrency=1, page_size=PAGE, block=NUM_DRAFTS + 1)
    assert simulation.run(turns) == found
    unlimited = Simulation(None, 1000, concurrency=1, page_size=PAGE, block=NUM_DRAFTS + 1)
    most = sum(unlimited.run(turns))
    assert slots < 0.25 * len(unlimited.cache)
    assert sum(found) >= (0.8 if slots == 38 else 0.5) * most > 0


@pytest.mark.interpreter
@pytest.mark.slow
def test_triton_kernels_continue_from_snapshots(path: Path) -> None:
    """Two turns beside a prompt with the same beginning, in chunks. The plain text has no near ties in float32."""
    pair, params = load(path, torch.float32), SamplingParams(max_new_tokens=6, ignore_eos=True)
    llm = pair.llm(kernels="triton", max_num_requests=2, max_batched_tokens=40)
    given = (pair.prompt(30), (*pair.prompt(21), *pair.prompt(60, seed=1)))
    first = llm.generate(given, params)
    turns = tuple((*prompt, *item.token_ids, 5, 6, 7) for prompt, item in zip(given, first, strict=True))
    second = llm.generate(turns, params)
    assert [item.num_cached for item in second] == [32, 84]
    for prompts, outputs in ((given, first), (turns, second)):
        assert [item.token_ids for item in outputs] == [item.token_ids for item in pair.cold(prompts, params)]


class TestPoisoned:
    """The snapshots are what hits continue from, and nothing else is read."""

    def twice(self, pair: Pair, poison: Any) -> tuple[RequestOutput, RequestOutput]:
        """A prompt that hits a beginning, after `poison(llm)`, and its output without the cache."""
        first, other = (*pair.prompt(40), 1), (*pair.prompt(40), *pair.prompt(9, seed=1))
        llm = pair.llm()
        llm.generate([first, pair.prompt(30, seed=8)], PARAMS)
        poison(llm)
        (found,) = llm.generate([other], PARAMS)
        assert found.num_cached == 40
        return found, pair.cold((other,))[0]

    @pytest.mark.parametrize("part", ["states", "latest"])
    def test_another_snapshot_gives_another_text(self, pair: Pair, part: str) -> None:
        def poison(llm: LLM) -> None:
            states = llm.engine.runner.states
            assert states is not None
            tensor = getattr(states.pool.snapshots, part)
            tensor.copy_(tensor.roll(1, dims=-1) * 3)

        found, wanted = self.twice(pair, poison)
        assert found.token_ids != wanted.token_ids

    def test_everything_that_is_free_may_change(self, pair: Pair) -> None:
        """Free slots, free pages, and the memory of rows without a request."""

        def poison(llm: LLM) -> None:
            scheduler, runner = llm.engine.scheduler, llm.engine.runner
            snapshots, states = scheduler.cache.snapshots, runner.states
            assert snapshots is not None
            assert states is not None
            assert runner.draft_kv is not None
            assert len(snapshots)
            assert snapshots.free
            for slot in snapshots.free:
                states.pool.snapshots.states[slot] = states.pool.snapshots.latest[slot] = torch.nan
            for tensor in states.all_layers:
                tensor.fill_(torch.nan)
            for page in (0, *scheduler.pages._free):
                runner.target_kv.pages[page] = runner.draft_kv.pages[page] = torch.nan

        found, wanted = self.twice(pair, poison)
        check([found], [wanted])

    @pytest.mark.parametrize("mode", ["few slots", pytest.param("few pages", marks=pytest.mark.slow)])
    def test_replaced_snapshots_are_not_read(self, pair: Pair, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every slot is poisoned as soon as it is freed."""
        given = shared_load(pair)
        llm = limited(pair, **MODES[mode], scheduling="sync")
        snapshots, states = llm.engine.scheduler.cache.snapshots, llm.engine.runner.states
        assert snapshots is not None
        assert states is not None
        submit = llm.engine.runner.submit

        def poisoned(batch: Batch) -> Any:
            for slot in snapshots.free:
                states.pool.snapshots.states[slot] = states.pool.snapshots.latest[slot] = torch.nan
            return submit(batch)

        monkeypatch.setattr(llm.engine.runner, "submit", poisoned)
        outputs = llm.generate([*given, *given], PARAMS)
        check(outputs, pair.cold(given) * 2)
        assert any(item.num_cached for item in outputs)


@pytest.mark.parametrize("num_slots", [0, 1, 5])
def test_memory_for_snapshots_decides_their_number(pair: Pair, num_slots: int) -> None:
    """Without room for one snapshot the prefix cache is off, with a warning."""
    llm = pair.llm(snapshot_memory_bytes=max(1, num_slots * slot_bytes(pair)))
    states = llm.engine.runner.states
    assert states is not None
    assert len(states.pool.snapshots.states) == num_slots
    prompt = pair.prompt(30)
    outputs = [llm.generate([prompt], PARAMS)[0] for _ in range(2)]
    assert [item.num_cached for item in outputs] == [0, 28 if num_slots else 0]
    assert [notice.id for notice in llm.warnings] == ([] if num_slots else ["no-snapshots"])


def test_a_prefix_store_is_not_used(pair: Pair, tmp_path: Path) -> None:
    """Stored pages have no state."""
    llm = pair.llm(prefix_store=str(tmp_path))
    assert [notice.id for notice in llm.warnings] == ["no-prefix-store"]
    outputs = [llm.generate([pair.prompt(30)], PARAMS)[0] for _ in range(2)]
    assert [item.num_cached for item in outputs] == [0, 28]
    assert not list(tmp_path.iterdir())
