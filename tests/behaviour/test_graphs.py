"""Captured decode steps: the same tokens, drafts and counts as steps launched one by one, whatever the batch does."""

from typing import Any

import pytest
import torch

from dflash_runtime.device.decode_graphs import bucket_of
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import RequestOutput, SamplingParams
from dflash_testing.gpu import gpu_llm
from dflash_testing.pairs import bundled_prompts

PARAMS = SamplingParams(max_new_tokens=48)


@pytest.mark.parametrize("max_requests", [1, 3, 16, 64, 100])
def test_a_bucket_is_at_most_a_quarter_larger(max_requests: int) -> None:
    for count in range(1, max_requests + 1):
        bucket = bucket_of(count, max_requests)
        assert count <= bucket <= max_requests
        assert bucket <= 1.25 * count
    assert len({bucket_of(count, 256) for count in range(1, 257)}) <= 30


def traces(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts, output.finish_reason) for output in outputs]


def fixed(llm: LLM, **sampling: Any) -> list[Any]:
    """Requests of different lengths through fewer rows: the batch grows, shrinks and changes places."""
    prompts = bundled_prompts()[:11]
    params = [SamplingParams(max_new_tokens=8 + 9 * index, seed=index, **sampling) for index in range(len(prompts))]
    return traces(llm.generate(prompts, params))


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["tiny", "tiny:reduced", None])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("max_num_requests", [1, 5, 11])
def test_graphs_change_nothing(draft: str | None, sampling: dict[str, Any], max_num_requests: int) -> None:
    """In float32, where a bucket's padding must not even change how a product is rounded to another token."""
    settings: dict[str, Any] = {"max_num_requests": max_num_requests, "num_pages": 400}
    plainly = gpu_llm(draft, "float32", graphs=False, **settings)
    captured = gpu_llm(draft, "float32", **settings)
    assert plainly.engine.runner.graphs is None
    wanted = fixed(plainly, **sampling)
    assert fixed(captured, **sampling) == wanted
    assert captured.engine.runner.graphs is not None
    assert len(captured.engine.runner.graphs) >= min(max_num_requests, 3)
    assert fixed(captured, **sampling) == wanted  # the graphs that are there, replayed


@pytest.mark.gpu
def test_probabilistic_drafts_in_graphs() -> None:
    settings: dict[str, Any] = {"max_num_requests": 4, "num_pages": 400, "draft_sampling": "probabilistic"}
    wanted = fixed(gpu_llm("tiny", "float32", graphs=False, **settings), temperature=0.9)
    assert fixed(gpu_llm("tiny", "float32", **settings), temperature=0.9) == wanted


@pytest.mark.gpu
def test_greedy_and_sampled_requests_take_turns() -> None:
    """A step is greedy only where all of its requests are; graphs of both kinds follow one another."""
    prompts = bundled_prompts()[:10]
    params = [SamplingParams(max_new_tokens=10 + 7 * index, temperature=index % 2, seed=index) for index in range(10)]
    wanted = traces(gpu_llm("tiny", "float32", graphs=False, max_num_requests=3).generate(prompts, params))
    assert traces(gpu_llm("tiny", "float32", max_num_requests=3).generate(prompts, params)) == wanted


@pytest.mark.gpu
def test_padding_reads_and_writes_nothing() -> None:
    """With NaN in every slot that no request owns, and in the slots that page 0 stands for."""
    wanted = fixed(gpu_llm("tiny", "float32", graphs=False, max_num_requests=5, num_pages=400))
    llm = gpu_llm("tiny", "float32", max_num_requests=5, num_pages=400)
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    for cache in (runner.target_kv, runner.draft_kv):
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    assert fixed(llm) == wanted
    for cache in (runner.target_kv, runner.draft_kv):
        assert cache.keys[:, :16].isnan().all()  # page 0


@pytest.mark.gpu
def test_memory_does_not_grow_with_steps() -> None:
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=4, num_pages=400)
    prompts = bundled_prompts()[:12]
    for _ in range(2):
        llm.generate(prompts, PARAMS)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        llm.generate(prompts, PARAMS)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
