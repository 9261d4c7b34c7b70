"""CUDA graphs of decode steps give the same tokens, drafts and counts as eager steps, for every batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_runtime.device.graphs.decode_graphs import bucket_of
from dflash_runtime.device.step_times import find_step_times
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.width import AdaptiveWidth
from dflash_testing.gpu import gpu_llm
from dflash_testing.handoffs import traces
from dflash_testing.pairs import bundled_prompts
from dflash_testing.widths import RandomWidths

PARAMS = SamplingParams(max_new_tokens=48)


@pytest.mark.parametrize("max_requests", [1, 3, 16, 64, 100])
def test_a_bucket_is_at_most_a_quarter_larger(max_requests: int) -> None:
    for count in range(1, max_requests + 1):
        bucket = bucket_of(count, max_requests)
        assert count <= bucket <= max_requests
        assert bucket <= 1.25 * count
    assert len({bucket_of(count, 256) for count in range(1, 257)}) <= 30


def fixed(llm: LLM, **sampling: Any) -> list[Any]:
    """Run requests of different lengths through fewer batch rows, so that the batch grows, shrinks and reuses rows."""
    prompts = bundled_prompts()[:11]
    params = [SamplingParams(max_new_tokens=8 + 9 * index, seed=index, **sampling) for index in range(11)]
    return traces(llm.generate(prompts, params))


def without_graphs(draft: str | None, sampling: dict[str, Any], **settings: Any) -> LLM:
    """An engine that launches kernels one by one, for comparison with CUDA graphs.

    The padding of a graph changes how some products round. Greedy choices must be equal despite that, so their engine
    does not pad. A random number may fall on the edge between two tokens (seen twice in about 200 runs), so the engine
    for sampling pads like the graphs.
    """
    if not sampling.get("temperature"):
        return gpu_llm(draft, "float32", graphs=False, **settings)
    llm = gpu_llm(draft, "float32", **settings)
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    graphs.capture = lambda bucket, mode: graphs._graphs.update({(bucket, mode): None})  # type: ignore[method-assign]
    return llm


def check_twice(captured: LLM, plainly: LLM, **sampling: Any) -> None:
    """Compare two runs: the first captures the graphs, the second replays them.

    Both engines have the same pages in the prefix cache in each run. Otherwise prompts would run different numbers of
    rows, and their products could round differently.
    """
    assert not plainly.engine.runner.graphs
    for _ in range(2):
        assert fixed(captured, **sampling) == fixed(plainly, **sampling)


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["tiny", "tiny:reduced", None])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("max_num_requests", [1, 5, 11])
def test_graphs_change_nothing(draft: str | None, sampling: dict[str, Any], max_num_requests: int) -> None:
    """In float32, where the rounding caused by a bucket's padding must not change any token."""
    settings: dict[str, Any] = {"max_num_requests": max_num_requests, "num_pages": 400}
    plainly = without_graphs(draft, sampling, **settings)
    captured = gpu_llm(draft, "float32", **settings)
    check_twice(captured, plainly, **sampling)
    assert captured.engine.runner.graphs is not None
    assert len(captured.engine.runner.graphs) >= min(max_num_requests, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_graphs_change_nothing_at_any_width(width: int, draft_sampling: str) -> None:
    """Graphs verify exactly `width` rows. With probabilistic drafts the text depends on the drafts."""
    sampling: dict[str, Any] = {"verify_width": width, "temperature": float(draft_sampling != "greedy")}
    settings: dict[str, Any] = {"max_num_requests": 5, "num_pages": 400, "draft_sampling": draft_sampling}
    plainly, captured = without_graphs("tiny", sampling, **settings), gpu_llm("tiny", "float32", **settings)
    check_twice(captured, plainly, **sampling)
    assert captured.engine.runner.graphs is not None
    assert {mode.verify_width for _, mode in captured.engine.runner.graphs._graphs} == {width}


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_changing_widths_in_graphs_give_the_text_of_plain_decoding(temperature: float) -> None:
    prompts = bundled_prompts()[:11]
    params = [SamplingParams(max_new_tokens=20 + 9 * index, temperature=temperature, seed=index) for index in range(11)]
    wanted = [item.token_ids for item in gpu_llm(None, "float32", max_num_requests=5).generate(prompts, params)]
    llm = gpu_llm("tiny", "float32", max_num_requests=5, num_pages=400)
    for seed in range(2):
        llm.engine.scheduler.width_policy = RandomWidths(seed, 8)
        assert [item.token_ids for item in llm.generate(prompts, params)] == wanted
        llm.engine.scheduler.check_integrity()


@pytest.mark.gpu
def test_an_adaptive_run_has_the_text_of_plain_decoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first run measures step times, and the second reads them from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = bundled_prompts()[:11]
    params = [SamplingParams(max_new_tokens=40 + 9 * index) for index in range(11)]
    wanted = [item.token_ids for item in gpu_llm(None, "float32", max_num_requests=5).generate(prompts, params)]
    for _ in range(2):
        llm = gpu_llm("tiny", "float32", max_num_requests=5, num_pages=400, adaptive_width=True)
        policy = llm.engine.scheduler.width_policy
        assert isinstance(policy, AdaptiveWidth)
        times = policy._times
        assert set(times.table) == {1, 2, 3, 4, 5}
        assert all(0 < row[1] <= row[2] <= row[8] for row in times.table.values())
        assert [item.token_ids for item in llm.generate(prompts, params)] == wanted
    assert len(list((tmp_path / "dflash" / "step_times").iterdir())) == 1


@pytest.mark.gpu
def test_measuring_step_times_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Padding rows read and write no KV, so measuring leaves the engine unchanged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = fixed(gpu_llm("tiny", "float32", max_num_requests=5, num_pages=400))
    llm = gpu_llm("tiny", "float32", max_num_requests=5, num_pages=400)
    find_step_times(llm.engine.runner)
    for cache in (llm.engine.runner.target_kv, llm.engine.runner.draft_kv):
        assert cache is not None
        assert not cache.pages.any()
    assert fixed(llm) == wanted


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
        cache.pages.fill_(torch.nan)
    assert fixed(llm) == wanted
    for cache in (runner.target_kv, runner.draft_kv):
        assert cache.pages[0].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["tiny", None])
@pytest.mark.parametrize("max_num_requests", [1, 4])
def test_prompts_in_captured_pieces(draft: str | None, max_num_requests: int) -> None:
    """Prompts alone, together with decoding requests, in chunks, and longer than the captured sizes, each run twice."""
    start = bundled_prompts()
    prompts = [tuple((start[index] * 300)[:length]) for index, length in enumerate((5, 40, 200, 700, 1500, 64, 333))]
    params = [SamplingParams(max_new_tokens=16 + 9 * index) for index in range(len(prompts))]
    settings: dict[str, Any] = {"max_num_requests": max_num_requests, "num_pages": 600, "prefix_cache": False}
    plainly = gpu_llm(draft, "float32", graphs=False, **settings)
    captured = gpu_llm(draft, "float32", **settings)
    pieces = captured.engine.runner.pieces
    assert pieces is not None
    wanted = traces(plainly.generate(prompts, params))
    for _ in range(2):
        assert traces(captured.generate(prompts, params)) == wanted
    assert pieces.captured, "no piece was captured: plain steps had room for all prompts"


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["tiny", None])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str)
def test_prompts_in_captured_steps(draft: str | None, sampling: dict[str, Any]) -> None:
    """Few prompts run in the captured steps of many decoding requests: whole, several at once, and in chunks.

    With a draft this happens in its plain steps. Later steps of the draft read the context KV that these steps write.
    """
    start = bundled_prompts()
    lengths = (5, 40, 200, 700, 1500, 64, 333, 9, 80, 500, 17, 600)
    prompts = [tuple((start[index % len(start)] * 300)[:length]) for index, length in enumerate(lengths)]
    params = [SamplingParams(max_new_tokens=12 + 7 * index, seed=index, **sampling) for index in range(len(prompts))]
    settings: dict[str, Any] = {"max_num_requests": 9, "num_pages": 800, "prefix_cache": False, "scheduling": "sync"}
    found = []
    for has_room in (False, True, True):
        llm = gpu_llm(draft, "float32", **settings)
        if draft is not None:
            llm.engine.scheduler.width_policy = RandomWidths(0, 2)
        if not has_room:
            llm.engine.runner.room_beside = lambda batch: None  # type: ignore[method-assign]
        found.append(traces(llm.generate(prompts, params)))
        graphs = llm.engine.runner.graphs
        assert graphs is not None
        assert any(mode.num_prompt_rows for _, mode in graphs.captured) == has_room
    assert found[1] == found[2] == found[0]


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
