"""Captured decode steps with prompts give the same tokens, drafts and KV as other steps."""

from typing import Any

import pytest
import torch

from dflash_runtime.device.graphs import prompt_room
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling import limits, step_load
from dflash_runtime.scheduling.batch import Batch
from dflash_runtime.scheduling.limits import RIDGE_GRAIN, RIDGE_ROWS, rows_to_ridge
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.graphs import StandInGraphs, with_stand_ins
from dflash_testing.pairs import random_draft, random_llm, random_prompts, random_target
from dflash_testing.widths import ListedWidths

PROMPTS = random_prompts([9, 3, 7, 1, 21, 26, 4], 97)
SAMPLINGS = [
    pytest.param({}, marks=pytest.mark.slow),  # the other tests of rooms are greedy
    {"temperature": 1.0},
    pytest.param({"temperature": 0.8, "top_k": 20, "top_p": 0.9}, marks=pytest.mark.slow),
]


@pytest.fixture
def low_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, because the interpreter is slow: up to 8 decoding requests, 16 prompt rows, 2 requests per prompt."""
    monkeypatch.setattr(limits, "RIDGE_ROWS", 24)
    monkeypatch.setattr(limits, "RIDGE_GRAIN", 8)
    monkeypatch.setattr(step_load, "REQUESTS_PER_PROMPT", 2)


def answers(**sampling: Any) -> list[SamplingParams]:
    """Parameters with different answer lengths, so that late prompts run while others decode, and with seeds."""
    return [SamplingParams(max_new_tokens=2 + index, seed=index, **sampling) for index in range(len(PROMPTS))]


def small_llm(*, has_draft: bool = False, **engine: Any) -> LLM:
    """An LLM for five requests at a time, so that a prompt joins four decoding requests. One layer has a window.

    One KV head per layer, because the interpreter runs a program per KV head.
    """
    heads: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1}
    target = random_target(num_layers=2, max_position_embeddings=64, windows=(None, 20), **heads)
    draft = random_draft(target, block_size=4, target_layer_ids=(0,), num_layers=1, **heads) if has_draft else None
    settings: dict[str, Any] = {"max_num_requests": 5, "page_size": 8, "num_pages": 60, "kernels": "triton"}
    return random_llm(target, draft, 3 if has_draft else 0, **(settings | engine))


def traces(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts, output.finish_reason) for output in outputs]


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[bool, list[Batch]]:
    """Record later steps in which prompts join decoding requests: room for the prompts? -> batches."""
    seen: dict[bool, list[Batch]] = {False: [], True: []}
    find = llm.engine.runner.room_beside

    def watched(batch: Batch) -> Any:
        room = find(batch)
        if batch.decode and batch.chunks:
            seen[room is not None].append(batch)
        return room

    monkeypatch.setattr(llm.engine.runner, "room_beside", watched)
    return seen


def num_rooms(graphs: StandInGraphs) -> int:
    """The number of captured steps with prompts."""
    return sum(bool(mode.num_prompt_rows) for _, mode in graphs.captured)


@pytest.mark.interpreter
@pytest.mark.usefixtures("low_ridge")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_room_changes_no_result(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first run steps are captured. The second run only replays them. Some prompts need several steps."""
    wanted = traces(small_llm().generate(PROMPTS, answers(**sampling)))
    llm = small_llm()
    with_stand_ins(llm)
    seen = watch(llm, monkeypatch)
    for _ in range(2):
        assert traces(llm.generate(PROMPTS, answers(**sampling))) == wanted
    assert {chunk.is_last for batch in seen[True] for chunk in batch.chunks} == {False, True}
    llm.engine.scheduler.check_integrity()


@pytest.mark.interpreter
@pytest.mark.usefixtures("low_ridge")
def test_plain_steps_with_prompts_write_context_kv_too() -> None:
    """An engine that drafts in other steps then has the same drafts and the same KV."""
    found = []
    for has_room in (False, True):
        llm = small_llm(has_draft=True, scheduling="sync", prefix_cache=False)
        graphs = with_stand_ins(llm) if has_room else None
        llm.engine.scheduler.load.keeps_to_ridge = True
        llm.engine.scheduler.width_policy = ListedWidths((1, 1, 3) * 20)
        outputs = llm.generate(PROMPTS, answers())
        assert graphs is None or num_rooms(graphs)
        assert any(output.drafts for output in outputs)
        pages = [getattr(llm.engine.runner, name).pages for name in ("target_kv", "draft_kv")]
        found.append((traces(outputs), pages))
    (wanted, plainly), (got, roomy) = found
    assert got == wanted
    for expected, tensor in zip(plainly, roomy, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)
        assert expected.any()


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.usefixtures("low_ridge")
def test_a_step_with_too_many_prompts_runs_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three short prompts arrive at once, and the room is for two."""
    monkeypatch.setattr(prompt_room, "MOST_PROMPTS", 2)
    many = random_prompts([1] * 8, 97)
    params = [SamplingParams(max_new_tokens=3 if index < 3 else 6) for index in range(len(many))]
    wanted = traces(small_llm().generate(many, params))
    llm = small_llm()
    with_stand_ins(llm)
    seen = watch(llm, monkeypatch)
    assert traces(llm.generate(many, params)) == wanted
    assert [len(batch.chunks) for batch in seen[False]] == [3]


@pytest.mark.interpreter
@pytest.mark.usefixtures("low_ridge")
def test_a_step_with_a_resumed_request_runs_another_way() -> None:
    prompts, params = random_prompts([9] * 5, 97), SamplingParams(max_new_tokens=10)
    wanted = traces(small_llm().generate(prompts, params))
    llm = small_llm(num_pages=12)
    with_stand_ins(llm)
    llm.engine.scheduler.room.share = 0.0
    assert traces(llm.generate(prompts, params)) == wanted
    assert llm.engine.scheduler.num_preemptions


@pytest.mark.parametrize("num_decoded", [1, 63, 64, 65, 128, 129, RIDGE_ROWS - 1, RIDGE_ROWS, RIDGE_ROWS + 1])
def test_room_below_the_ridge(num_decoded: int) -> None:
    room = rows_to_ridge(num_decoded)
    assert room % RIDGE_GRAIN == 0
    assert room == 0 or RIDGE_ROWS - RIDGE_GRAIN < num_decoded + room <= RIDGE_ROWS
