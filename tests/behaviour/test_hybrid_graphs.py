"""Captured steps of targets with recurrent layers give the same tokens and drafts as uncaptured steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.scheduling import limits, step_load
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.gpu import detecting_syncs
from dflash_testing.graphs import with_stand_ins
from dflash_testing.hosted_models import make_model
from dflash_testing.pairs import placement, random_draft, random_llm, random_prompts
from dflash_testing.paths import ROOT
from dflash_testing.tapes import with_tapes

PAIR = ROOT / "tests/data/pairs/hybrid"
LENS = (9, 3, 70, 1, 21, 90, 4, 33)


def prompts(vocab_size: int) -> list[list[int]]:
    return random_prompts(LENS, vocab_size)


def answers() -> list[SamplingParams]:
    """Answers of different lengths, so that late prompts run while others decode."""
    return [SamplingParams(max_new_tokens=4 + 3 * index, ignore_eos=True) for index in range(len(LENS))]


def small_llm(*, has_draft: bool = True, **engine: Any) -> LLM:
    target = load_target(open_target(PAIR / "target"), placement())
    settings: dict[str, Any] = {"max_num_requests": 5, "page_size": 8, "num_pages": 200} | engine
    return random_llm(
        target, random_draft(target, block_size=4) if has_draft else None, 3 if has_draft else 0, **settings
    )


def traces(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts, str(output.error)) for output in outputs]


def said(llm: LLM) -> list[Any]:
    return traces(llm.generate(prompts(llm.limits.vocab_size), answers()))


@pytest.mark.parametrize("has_draft", [True, False])
def test_forwards_in_pieces_change_no_result(has_draft: bool) -> None:
    """Every recurrence ends a piece. In the first run buckets are captured, the second run replays them."""
    given: dict[str, Any] = {"has_draft": has_draft, "max_batched_tokens": 48, "kernels": "reference"}
    wanted, llm = said(small_llm(**given)), small_llm(**given)
    pieces = with_tapes(llm)
    for _ in range(2):
        assert said(llm) == wanted
    assert len(pieces.captured) >= 2


@pytest.mark.interpreter
@pytest.mark.slow
def test_rooms_for_prompts_change_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A capture beside a later chunk of a prompt does not advance the prompt's states: at first every step captures."""
    monkeypatch.setattr(limits, "RIDGE_ROWS", 24)
    monkeypatch.setattr(limits, "RIDGE_GRAIN", 8)
    monkeypatch.setattr(step_load, "REQUESTS_PER_PROMPT", 2)
    make_model(tmp_path, "qwen3_5_text", initializer_range=0.15)
    target: Any = load_target(open_target(tmp_path), placement())
    for layer in target._decoder.layers:
        if hasattr(layer.mixer, "log_rate"):
            layer.mixer.log_rate.fill_(-6.0)  # states that last: others hide the fault
    given = random_prompts((3, 4, 5, 40), target.config.vocab_size)
    settings: dict[str, Any] = {"max_num_requests": 3, "page_size": 8, "num_pages": 60, "kernels": "triton"}
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (6, 6, 1, 4)]
    wanted = traces(random_llm(target, None, 0, **settings).generate(given, params))
    llm = random_llm(target, None, 0, **settings)
    graphs = with_stand_ins(llm)
    runner = llm.engine.runner
    replay = runner._replay

    def forgetful(*step: Any) -> Any:
        graphs._graphs.clear()
        return replay(*step)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_replay", forgetful)
        assert traces(llm.generate(given, params)) == wanted
    assert traces(llm.generate(given, params)) == wanted
    assert sum(bool(mode.num_prompt_rows) for _, mode in graphs.captured) >= 1


def test_a_chunk_that_keeps_a_snapshot_has_no_room() -> None:
    """A captured step runs each chunk of a prompt in one launch of the delta rule."""
    llm = small_llm(has_draft=False)
    llm.engine.scheduler.add(Request(index=0, prompt_token_ids=tuple(range(9)), params=SamplingParams()))
    (chunk,) = llm.engine.scheduler.schedule(is_drained=True).chunks
    assert [keep.position for keep in chunk.keeps] == [8]
    room = llm.engine.runner._room(16)
    assert not room.holds([chunk])
    assert room.holds([replace(chunk, keeps=())])


def gpu_llm(dtype: str, *, has_draft: bool = True, **engine: Any) -> LLM:
    settings: dict[str, Any] = {"device": "cuda", "dtype": dtype, "num_pages": 400, "max_num_requests": 4}
    settings |= {"prefix_cache": False} | engine  # hits change the number of rows of a forward
    draft = open_draft(PAIR / "draft") if has_draft else None
    return LLM(open_target(PAIR / "target"), draft, EngineConfig(**settings))


@pytest.mark.gpu
@pytest.mark.parametrize("has_draft", [True, False])
def test_captured_steps_equal_uncaptured_steps(has_draft: bool) -> None:
    wanted = said(gpu_llm("float32", has_draft=has_draft, graphs=False))
    llm = gpu_llm("float32", has_draft=has_draft)
    assert llm.engine.runner.graphs is not None
    for _ in range(2):
        assert said(llm) == wanted
    assert len(llm.engine.runner.graphs.captured) > 2
    assert llm.engine.runner.pieces is not None
    assert llm.engine.runner.pieces.captured


@pytest.mark.gpu
@pytest.mark.parametrize("num_nodes", [8, 63])
def test_captured_trees_equal_uncaptured_trees_and_the_cpu(num_nodes: int) -> None:
    given: dict[str, Any] = {"num_tree_nodes": num_nodes, "max_num_requests": 1}
    llm = gpu_llm("float32", **given)
    wanted = said(gpu_llm("float32", graphs=False, **given))
    for _ in range(2):
        assert said(llm) == wanted
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    assert graphs.captured
    settings = EngineConfig(device="cpu", num_pages=400, prefix_cache=False, **given)
    assert said(LLM(open_target(PAIR / "target"), open_draft(PAIR / "draft"), settings)) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize(("has_draft", "num_nodes"), [(True, None), (True, 16), (False, None)])
def test_hits_change_no_text(has_draft: bool, num_nodes: int | None) -> None:
    """Snapshots are restored before captured steps, and written by them."""
    given: dict[str, Any] = {"has_draft": has_draft, "page_size": 8, "num_tree_nodes": num_nodes}
    beginning = random_prompts((50,), 90)[0]
    llm, without = (gpu_llm("float32", prefix_cache=is_on, **given) for is_on in (True, False))
    prompts_ = [beginning + prompt for prompt in prompts(llm.limits.vocab_size)]
    for _ in range(2):
        outputs, wanted = (item.generate(prompts_, answers()) for item in (llm, without))
        assert [item.token_ids for item in outputs] == [item.token_ids for item in wanted]
        assert sum(item.num_cached for item in outputs) >= 48 * (len(prompts_) - 4)
        turns = zip(prompts_, outputs, strict=True)
        prompts_ = [[*prompt, *item.token_ids, 5, 6, 7] for prompt, item in turns]
    llm.engine.scheduler.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["exact", "at-once"])
def test_texts_equal_the_cpu(rows: str) -> None:
    on_cpu = LLM(
        open_target(PAIR / "target"), open_draft(PAIR / "draft"),
        EngineConfig(device="cpu", num_pages=400, max_num_requests=1),
    )  # fmt: skip
    assert said(gpu_llm("float32", max_num_requests=1, recurrent_rows=rows)) == said(on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("num_nodes", [None, 16])
def test_no_step_waits_for_the_device(num_nodes: int | None) -> None:
    llm = gpu_llm("bfloat16", max_batched_tokens=40, prefix_cache=True, num_tree_nodes=num_nodes)
    said(llm)  # warm up: compile kernels and fill allocators
    for index, (prompt, params) in enumerate(zip(prompts(llm.limits.vocab_size), answers(), strict=True)):
        llm.engine.add(Request(index=index, prompt_token_ids=tuple(prompt), params=params))
    with detecting_syncs():
        while llm.engine.scheduler.has_work:
            llm.engine.step()
