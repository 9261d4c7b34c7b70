"""Forwards in captured pieces give the same tokens, drafts and KV as uncaptured forwards."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_runtime.device.graphs.piecewise_graphs import PiecewiseGraphs
from dflash_runtime.device.graphs.row_buckets import LEAST_ROWS, MOST_ROWS, bucket_of_rows, piecewise_rows, row_buckets
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.target_config import TargetConfig
from dflash_testing.graphs import with_stand_ins
from dflash_testing.pairs import random_draft, random_llm, random_prompts, random_target
from dflash_testing.tapes import TapeRecorder, with_tapes

PROMPTS = random_prompts([31, 3, 19, 1, 40, 16, 7, 33, 90], 97)
PARAMS = [SamplingParams(max_new_tokens=5 + 7 * index) for index in range(len(PROMPTS))]


def small_llm(taps: tuple[int, ...] = (0, 2), **engine: Any) -> LLM:
    """An LLM for three requests at a time, so that prompts join decoding requests. Long prompts run in chunks."""
    target = random_target(num_layers=3, max_position_embeddings=256, windows=(None, 20, None))
    draft = random_draft(target, block_size=4, target_layer_ids=taps, num_layers=1) if taps else None
    settings: dict[str, Any] = {"max_num_requests": 3, "max_batched_tokens": 64, "page_size": 8, "num_pages": 120}
    return random_llm(target, draft, 3 if taps else 0, **(settings | {"kernels": "reference"} | engine))


def traces(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts) for output in outputs]


def num_runs(pieces: PiecewiseGraphs) -> list[int]:
    """A list that gets the rows of every later forward in pieces."""
    seen: list[int] = []
    run = pieces._run

    def counted(*given: Any) -> None:
        seen.append(len(given[3]))
        run(*given)

    pieces._run = counted  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize(
    "taps", [(0, 2), *(pytest.param(taps, marks=pytest.mark.slow) for taps in ((1,), ()))], ids=str
)
def test_pieces_change_no_result(taps: tuple[int, ...]) -> None:
    """In the first run buckets are captured while other requests decode. The second run only replays them."""
    wanted = traces(small_llm(taps).generate(PROMPTS, PARAMS))
    llm = small_llm(taps)
    pieces = with_tapes(llm)
    seen = num_runs(pieces)
    for _ in range(2):
        assert traces(llm.generate(PROMPTS, PARAMS)) == wanted
    assert {bucket_of_rows(count) for count in seen} == set(pieces.captured)
    assert any(count % 16 for count in seen)
    assert len(pieces.captured) >= 3


def test_pages_are_the_same_with_pieces() -> None:
    plainly, llm = small_llm(prefix_cache=False), small_llm(prefix_cache=False)
    with_tapes(llm)
    for engine in (plainly, llm):
        engine.generate(PROMPTS, PARAMS)
    for name in ("target_kv", "draft_kv"):
        found, wanted = (getattr(item.engine.runner, name).pages for item in (llm, plainly))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert wanted.any()


def test_without_memory_for_a_capture_forwards_run_uncaptured() -> None:
    wanted = traces(small_llm().generate(PROMPTS, PARAMS))
    llm = small_llm()
    pieces = with_tapes(llm)
    recorder = pieces._recorder
    assert isinstance(recorder, TapeRecorder)
    recorder.refused = {0, 1}
    assert traces(llm.generate(PROMPTS, PARAMS)) == wanted
    assert recorder.num_recordings == len(pieces.captured) + 2
    assert pieces.shortage is not None
    assert pieces.shortage.id == "no-memory-for-graphs"


def test_all_buckets_are_captured_at_start() -> None:
    llm = small_llm(max_batched_tokens=40)
    with_stand_ins(llm)
    pieces = with_tapes(llm)
    llm.warm_up()
    assert pieces.captured == (64, 32, 16)
    assert not pieces.missing()


def test_long_forwards_run_uncaptured() -> None:
    target = random_target(num_layers=2, max_position_embeddings=2 * MOST_ROWS)
    llm = random_llm(target, None, 0, max_num_requests=2, max_batched_tokens=2 * MOST_ROWS, kernels="reference")
    pieces = with_tapes(llm)
    seen = num_runs(pieces)
    llm.generate(random_prompts([MOST_ROWS + 1], 97), SamplingParams(max_new_tokens=1))
    assert not seen
    llm.generate(random_prompts([1], 97), SamplingParams(max_new_tokens=1))
    assert seen == [1]


def sized(**changes: Any) -> TargetConfig:
    """The config of Qwen3-8B, changed."""
    sizes = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 12288}
    return replace(random_target(num_layers=2).config, **(sizes | changes))


@pytest.mark.parametrize("max_rows", [1, 100, 5000])
@pytest.mark.parametrize("inner", [12288, 3072])
def test_every_row_count_has_a_bucket(max_rows: int, inner: int) -> None:
    target = sized(intermediate_size=inner)
    buckets, most = row_buckets(max_rows, target), piecewise_rows(target)
    assert buckets == sorted(set(buckets))
    assert min(max_rows, most) <= buckets[-1] <= most
    for count in range(1, min(max_rows, most) + 1):
        bucket = bucket_of_rows(count)
        assert bucket in buckets
        assert count <= bucket < count + 64


def test_small_layers_have_larger_captured_forwards() -> None:
    rows = [piecewise_rows(sized(hidden_size=size)) for size in (8192, 4096, 2048, 512)]
    assert rows == sorted(rows)
    assert rows[:2] == [LEAST_ROWS] * 2
    assert LEAST_ROWS < rows[2] < rows[3] == MOST_ROWS
