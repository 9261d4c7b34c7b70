"""Starting on a GPU: nothing is compiled after the warm-up, memory does not grow, and any device works."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dflash_cli.diagnosis.reading_screen import KnownTexts, ReadingScreen
from dflash_runtime.device.capacity import memory
from dflash_runtime.llm import LLM
from dflash_runtime.models.hosting.stream_capture import capture_stream
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.gpu import gpu_llm, require_single_worker
from dflash_testing.pairs import bundled_prompts
from dflash_testing.walking_drafts import KINDS

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8)
FILTERED = SamplingParams(max_new_tokens=24, temperature=0.8, top_k=20, top_p=0.9)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles or loads while the block runs."""
    import triton

    names: list[str] = []
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = lambda *, repr, **_: names.append(repr)
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = before


def many_lengths(count: int) -> list[tuple[int, ...]]:
    """Prompts of 1, 2, 3, ... tokens with different first tokens."""
    text = [token for prompt in bundled_prompts() for token in prompt]
    return [tuple(text[7 * index : 8 * index + 1]) for index in range(count)]


@pytest.mark.parametrize("draft", ["tiny", "tiny:reduced", None, *KINDS])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_nothing_is_compiled_after_the_warm_up(draft: str | None, params: SamplingParams, draft_sampling: str) -> None:
    llm = gpu_llm(draft, "bfloat16", max_num_requests=9, max_batched_tokens=96, draft_sampling=draft_sampling)
    llm.warm_up(params)
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    captured = graphs.captured
    with compilations() as names:
        llm.generate(many_lengths(80), params)
        llm.generate(many_lengths(5), params)
    assert not names
    assert graphs.captured == captured


def test_greedy_and_sampled_requests_are_warmed_up_together() -> None:
    params = [(GREEDY, SAMPLED, FILTERED)[index % 3] for index in range(40)]
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=5)
    llm.warm_up(params)
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    captured = graphs.captured
    with compilations() as names:
        llm.generate(many_lengths(40), params)
    assert not names
    assert graphs.captured == captured


def token_ids(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts, output.num_cached) for output in outputs]


def test_a_warm_up_changes_no_text() -> None:
    cold, warm = (gpu_llm("tiny", "float32", max_num_requests=4, seed=3) for _ in range(2))
    warm.warm_up(SAMPLED)
    assert token_ids(warm.generate(many_lengths(20), SAMPLED)) == token_ids(cold.generate(many_lengths(20), SAMPLED))


def test_another_thread_may_use_the_device_while_steps_are_captured() -> None:
    llm = gpu_llm("tiny", "float32", max_num_requests=16)
    wanted = token_ids(gpu_llm("tiny", "float32", max_num_requests=16).generate(many_lengths(16), GREEDY))
    is_over, failures, rounds = threading.Event(), [], 0

    def work() -> None:
        nonlocal rounds
        try:
            while not is_over.is_set():
                # A new size each time, so that memory must come from the driver. No random numbers, because the
                # generator of a device is part of every capture.
                square = torch.ones(64 + rounds % 512, 4096, device="cuda")
                (square @ square.T).sum().item()
                torch.empty(1024, pin_memory=True).to("cuda", non_blocking=True)
                rounds += 1
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        llm.warm_up()
    finally:
        is_over.set()
        thread.join()
    assert not failures
    assert rounds > 10
    assert token_ids(llm.generate(many_lengths(16), GREEDY)) == wanted


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("params", [GREEDY, FILTERED], ids=["greedy", "filtered"])
def test_a_pair_runs_on_the_second_device(params: SamplingParams) -> None:
    """The pair uses CUDA graphs on the second device, while the first is current and has captured graphs before."""
    torch.cuda.set_device(0)
    first = gpu_llm("tiny", "float32", max_num_requests=4, seed=3)
    first.warm_up(params)
    wanted = token_ids(first.generate(many_lengths(12), params))
    held = torch.cuda.memory_allocated(0)
    for is_warm in (True, False):
        llm = gpu_llm("tiny", "float32", device="cuda:1", max_num_requests=4, seed=3)
        if is_warm:
            llm.warm_up(params)
        assert token_ids(llm.generate(many_lengths(12), params)) == wanted
        assert llm.check_lossless(llm.generate(many_lengths(3), GREEDY)).is_lossless
        assert llm.engine.runner.graphs
        llm.close()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) <= held


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_readings_are_screened_on_the_second_device() -> None:
    torch.cuda.set_device(0)
    estimates = []
    for device in ("cuda:0", "cuda:1"):
        llm = gpu_llm("tiny", "float32", device=device, max_num_requests=4, seed=3)
        outputs = llm.generate(bundled_prompts()[:4], SamplingParams(max_new_tokens=64))
        assert llm.pair.draft is not None
        screen = ReadingScreen(KnownTexts(llm.pair, outputs, {0, 2, 3, 4}), llm.pair.draft.config)
        estimates.append(screen.score(llm.pair, 100).accepted)
    assert estimates[0] == estimates[1] > 1.5


def test_a_device_without_a_number_is_the_current_device() -> None:
    assert gpu_llm("tiny", "float32").device == torch.device("cuda", torch.cuda.current_device())


def test_steps_run_without_a_graph_if_its_capture_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised in the middle of a capture, which torch must then end."""
    wanted = token_ids(gpu_llm("tiny", "float32", max_num_requests=4).generate(many_lengths(12), GREEDY))
    llm = gpu_llm("tiny", "float32", max_num_requests=4)
    runner, head = llm.engine.runner, llm.engine.runner.target.head

    def out_of_memory(hidden: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and len(hidden) > 2 * llm.limits.num_lookahead_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return head(hidden)

    monkeypatch.setattr(runner.target, "head", out_of_memory)
    llm.warm_up()
    assert runner.graphs is not None
    assert [bucket for bucket, _ in runner.graphs.captured] == [2, 1]
    assert len(llm.warnings) == 1
    assert token_ids(llm.generate(many_lengths(12), GREEDY)) == wanted


def test_4096_requests_at_once() -> None:
    """Grids and buffers work at the largest expected batch. Graphs of large buckets are captured on first use."""
    llm = gpu_llm("tiny", "float32", max_num_requests=4096, num_pages=13_000, max_model_len=64, max_batched_tokens=8192)
    prompts = [(index % 2000, 1 + index // 2000, 5) for index in range(4096)]
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=10))
    assert all(len(output.token_ids) == 10 for output in outputs)
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    assert max(bucket for bucket, _ in graphs.captured) >= 3584
    few = gpu_llm("tiny", "float32", max_num_requests=64).generate(prompts[:64], SamplingParams(max_new_tokens=10))
    same = sum(a.token_ids == b.token_ids for a, b in zip(outputs, few, strict=False))
    assert same >= 60  # a wider product rounds differently, which may decide a near-tie


def test_steps_use_no_more_memory_than_was_kept_free() -> None:
    """The memory that warm-up and steps take from the driver is at most the amount derived from shapes."""
    require_single_worker()
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=64, max_batched_tokens=2048)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(llm.device)[0]
    llm.warm_up()
    llm.generate(bundled_prompts()[:64], GREEDY)
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info(llm.device)[0]
    pair = llm.pair
    assert pair.draft is not None
    kept = memory.scratch_bytes(pair.config, pair.target.config, pair.draft.config, pair.limits, pair.placement)
    print(f"taken {taken / 2**20:.0f} MiB, kept free {kept / 2**20:.0f} MiB")
    assert taken <= kept


def test_collecting_an_engine_does_not_break_a_capture() -> None:
    """Garbage collection may free another engine in the middle of a capture."""
    forgotten = [gpu_llm("tiny", "float32", num_pages=400)]
    forgotten[0].generate(bundled_prompts()[:2], GREEDY)
    llm = gpu_llm("tiny", "float32", num_pages=400)
    verifier, attend = llm.engine.runner.verifier, llm.engine.runner.verifier.attend

    def collecting(*inputs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and forgotten:
            cycle: list[Any] = [forgotten.pop()]
            cycle.append(cycle)
            del cycle
            if gc.isenabled():
                gc.collect()
        return attend(*inputs)

    verifier.attend = collecting  # type: ignore[assignment]
    (output,) = llm.generate(bundled_prompts()[:1], GREEDY)
    assert not forgotten
    assert output.error is None


def run_steps(llm: LLM, num_steps: int) -> None:
    """Run requests of many lengths for at least `num_steps` steps."""
    prompts, done = bundled_prompts(), 0
    params = [SamplingParams(max_new_tokens=8 + 5 * index, ignore_eos=True) for index in range(32)]
    step = llm.engine.step

    def counted() -> Any:
        nonlocal done
        done += 1
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    try:
        while done < num_steps:
            llm.generate(prompts[:32], params)
    finally:
        llm.engine.step = step  # type: ignore[method-assign]


@pytest.mark.slow
def test_memory_does_not_grow_from_1000_to_10000_steps() -> None:
    """Neither torch's allocator nor the driver gives out more. The driver also counts graphs and loaded kernels."""
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=6, num_pages=400)
    llm.warm_up()
    run_steps(llm, 1000)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    run_steps(llm, 9000)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    require_single_worker()
    assert before[2] - after[2] < 2**21, "memory that the driver took"


def test_each_device_has_one_stream_for_captures() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert capture_stream(device) is capture_stream(device)
    assert capture_stream(device).device == device
