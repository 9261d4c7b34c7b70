"""The warm-up: the captured steps and their order, the compiled kernels, and no trace in later results."""

import gc
import logging
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention import ragged_attention
from dflash_kernels.attention.ragged_config import RaggedShape
from dflash_kernels.products import many_rows
from dflash_kernels.products.product_config import ManyRowsShape
from dflash_kernels.steps.row_changes import ReadyRows
from dflash_kernels.steps.step_rows import RowState
from dflash_kernels.suite import pick_kernels
from dflash_runtime import warm_up
from dflash_runtime.device import prefill
from dflash_runtime.device.graphs.decode_graphs import START_REQUESTS, StepMode
from dflash_runtime.errors import UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.scheduling.width import AdaptiveWidth, StepTimes
from dflash_runtime.warm_up import step_modes
from dflash_testing.graphs import StandInGraphs, with_stand_ins
from dflash_testing.launches import seen_launches
from dflash_testing.pairs import random_draft, random_llm, random_prompts, random_target
from dflash_testing.refusals import refuses

GREEDY, SAMPLED = SamplingParams(max_new_tokens=6), SamplingParams(max_new_tokens=6, temperature=1.0)
FILTERED = SamplingParams(max_new_tokens=6, temperature=1.0, top_p=0.9)
PROMPTS = random_prompts([31, 3, 19, 1, 40, 16, 7, 33], 97)


def small_llm(**engine: Any) -> LLM:
    kernels = pick_kernels(engine.get("kernels", "reference"), torch.device("cpu"), torch.float32)
    heads: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1}
    target = random_target(num_layers=2, max_position_embeddings=64, kernels=kernels, **heads)
    draft = random_draft(target, block_size=4, target_layer_ids=(0,), num_layers=1, kernels=kernels, **heads)
    settings: dict[str, Any] = {"max_num_requests": 3, "max_batched_tokens": 16, "page_size": 8, "num_pages": 60}
    return random_llm(target, draft, 3, **(settings | engine))


def test_every_mix_of_sampling_has_its_modes() -> None:
    greedy, sampled, filtered = (StepMode(4, *kind) for kind in ((True, False), (False, False), (False, True)))
    engine = small_llm().engine
    assert step_modes(engine, [GREEDY, GREEDY], 3) == [greedy]
    assert set(step_modes(engine, [GREEDY, SAMPLED], 3)) == {greedy, sampled}
    assert set(step_modes(engine, [GREEDY, FILTERED], 3)) == {greedy, filtered}
    assert set(step_modes(engine, [SAMPLED, FILTERED, GREEDY], 3)) == {greedy, sampled, filtered}
    narrow = replace(GREEDY, verify_width=2)
    assert step_modes(engine, [GREEDY, narrow], 3) == [greedy, StepMode(2, is_greedy=True, has_filters=False)]


def test_every_width_of_an_adaptive_engine_is_captured() -> None:
    engine = small_llm().engine
    times = StepTimes({3: {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.5}})
    engine.scheduler.width_policy = AdaptiveWidth(times, 3)
    modes = [(mode.verify_width, mode.num_prompt_rows) for mode in step_modes(engine, [GREEDY], 3)]
    assert modes == [(4, 0), (3, 0), (2, 0), (1, 192), (1, 0)]


def test_every_bucket_is_captured_once_and_the_largest_first() -> None:
    llm = small_llm(max_num_requests=12)
    graphs = with_stand_ins(llm)
    seen: list[tuple[int, int]] = []
    llm.warm_up(progress=lambda num_done, total: seen.append((num_done, total)))
    assert [bucket for bucket, _ in graphs.captured] == [12, 10, 8, 7, 6, 5, 4, 3, 2, 1]
    assert seen == [(index, len(seen) - 1) for index in range(len(seen))]
    llm.warm_up()
    llm.warm_up([GREEDY, SAMPLED], max_requests=2)
    assert [bucket for bucket, _ in graphs.captured[10:]] == [2, 1]
    num_captured = len(graphs.attempts)
    llm.generate(PROMPTS, GREEDY)
    assert len(graphs.attempts) == num_captured


def test_any_mix_of_requests_finds_its_graph() -> None:
    """Greedy, sampled and filtered requests are in one queue, and share steps in any mix."""
    params = [(GREEDY, SAMPLED, FILTERED)[index % 3] for index in range(len(PROMPTS))]
    llm = small_llm()
    graphs = with_stand_ins(llm)
    llm.warm_up(params)
    num_captured = len(graphs.attempts)
    llm.generate(PROMPTS, params)
    assert len(graphs.attempts) == num_captured == 3 * 3


class Echo:
    """A step that returns its rows, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def decode(self, rows: torch.Tensor, mode: StepMode) -> tuple[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return (rows,)


def test_large_batches_are_captured_when_first_needed() -> None:
    echo = Echo()
    graphs = StandInGraphs(echo.decode, 4096)
    modes = [StepMode(4, is_greedy=True, has_filters=False)]
    missing = graphs.missing(lambda bucket: modes)
    assert missing[0][0] == START_REQUESTS
    assert len(missing) <= 32
    with torch.inference_mode():
        assert graphs.replay(range(3000), modes[0])[0].tolist() == list(range(3000))
    assert graphs.captured == ((3072, modes[0]),)


def traces(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.drafts, output.num_cached) for output in outputs]


def test_a_warm_up_leaves_no_trace() -> None:
    """Drawn seeds, the prefix cache and the expected length of answers are the same as without a warm-up."""
    cold, warm = small_llm(seed=5, scheduling="async"), small_llm(seed=5, scheduling="async")
    with_stand_ins(warm)
    warm.warm_up(SAMPLED)
    assert warm.engine.scheduler.room.share == cold.engine.scheduler.room.share
    warm.engine.scheduler.check_integrity()
    assert traces(warm.generate(PROMPTS, SAMPLED)) == traces(cold.generate(PROMPTS, SAMPLED))


def test_without_graphs_a_warm_up_does_nothing() -> None:
    llm = small_llm()
    seen: list[int] = []
    llm.warm_up(progress=lambda num_done, total: seen.append(num_done))
    assert not seen


def test_a_busy_llm_is_not_warmed_up() -> None:
    llm = small_llm()
    stream = llm.stream(PROMPTS[:2], GREEDY)
    next(stream)
    with refuses(UsageError, "llm-busy"):
        llm.warm_up()
    llm.close()
    llm.warm_up()


def test_a_step_without_memory_for_its_graph_runs_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    """There is one warning, also in `LLM.warnings`, and the text is the same for every batch size."""
    llm = small_llm()
    graphs = with_stand_ins(llm)
    graphs.refused = {3, 2}
    with caplog.at_level(logging.WARNING):
        llm.warm_up()
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [bucket for bucket, _ in graphs.captured] == [1]
    assert len(graphs.attempts) == 3, "a capture without memory is not repeated in every step"
    assert [record.message for record in caplog.records] == list(llm.warnings)
    assert [warning.id for warning in llm.warnings] == ["no-memory-for-graphs"]
    assert "3 requests" in llm.warnings[0]
    assert traces(outputs) == traces(small_llm().generate(PROMPTS, GREEDY))


def test_other_errors_of_a_capture_are_raised() -> None:
    echo = Echo(ValueError("odd"))
    graphs = StandInGraphs(echo.decode, 4)
    with pytest.raises(ValueError, match="odd"):
        graphs.capture(1, StepMode(4, is_greedy=True, has_filters=False))


def test_pages_are_freed_with_their_llm() -> None:
    """They are freed at once, even with graphs, so that a second LLM gets their memory."""
    llm = small_llm()
    with_stand_ins(llm)
    llm.warm_up()
    llm.generate(PROMPTS[:2], GREEDY)
    pages = ref(llm.engine.runner.target_kv.pages)
    gc.disable()
    try:
        del llm
        assert pages() is None
    finally:
        gc.enable()


@pytest.mark.interpreter
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nothing_is_compiled_after_the_warm_up(params: SamplingParams) -> None:
    """Later launches use only kernels, by Triton's cache keys, of the warm-up. Prompts and batches have many sizes."""
    llm = small_llm(kernels="triton", page_size=2, num_pages=200, seed=5)
    with_stand_ins(llm)
    with seen_launches(compute="choices") as launches:
        llm.warm_up(params)
        warm = {launch.key for launch in launches}
        num_warm = len(launches)
        llm.generate(PROMPTS, params)
    late = {launch.key for launch in launches} - warm
    assert len(launches) > num_warm + 300
    assert not late


@pytest.mark.interpreter
def test_attention_of_prompts_after_contexts_is_not_compiled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs in parts and whole, and with tiles for short and for long contexts.

    Every prompt fits one step, but other requests leave a step few rows, so that it divides prompts.
    """
    short, long = RaggedShape(16, 16, 4, 2, has_descriptors=True), RaggedShape(32, 16, 8, 2)
    monkeypatch.setattr(
        prefill, "ragged_shape", lambda *_, longest_context, **__: long if longest_context > 31 else short
    )
    monkeypatch.setattr(ragged_attention, "MIN_PART", 1)
    monkeypatch.setattr(ragged_attention, "num_multiprocessors", lambda device: 4)
    monkeypatch.setattr(warm_up, "CONTEXTS", (16, 32))
    llm = small_llm(kernels="triton", page_size=2, num_pages=200, max_batched_tokens=63, seed=5)
    with_stand_ins(llm)
    with seen_launches(compute="choices") as launches:
        llm.warm_up()
        warm = {launch.key for launch in launches}
        llm.generate(random_prompts([48, 50, 60, 40, 61, 3, 60], 97), GREEDY)
    attention = {
        launch.key for launch in launches if launch.key[0] in ("_ragged_attention_kernel", "_sum_parts_kernel")
    }
    assert len(attention) == 4
    assert not {launch.key for launch in launches} - warm


@pytest.mark.interpreter
def test_gated_products_of_many_rows_are_not_compiled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here powers of two never use this kernel."""
    shape = ManyRowsShape(16, 16, 16, tiles_together=2, num_stages=3, num_warps=4)

    def only_some(num_rows: int, *_: object) -> ManyRowsShape | None:
        return shape if num_rows > 32 and num_rows.bit_count() == 3 else None

    for module in (many_rows, warm_up):
        monkeypatch.setattr(module, "many_rows_shape", only_some)
    monkeypatch.setattr(warm_up, "GATED_ROWS", 33)
    llm = small_llm(kernels="triton", page_size=2, num_pages=200, max_batched_tokens=63, seed=5)
    with_stand_ins(llm)
    with seen_launches(compute="choices") as launches:
        llm.warm_up()
        warm = {launch.key for launch in launches}
        llm.generate(random_prompts([38, 37, 3, 44], 97), GREEDY)
    assert [key for key in warm if key[0] == "_many_rows_kernel"]
    assert not {launch.key for launch in launches} - warm


@pytest.mark.interpreter
def test_preempted_requests_compile_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed request is switched on together with a fresh request, or alone."""
    llm = small_llm(kernels="triton", page_size=2, num_pages=36, seed=5)
    with_stand_ins(llm)
    switched_on: list[tuple[int, int]] = []
    kernels = llm.engine.runner.kernels

    def watched(state: RowState, ready: ReadyRows, chosen: Tensor, is_finite: Tensor) -> Tensor:
        switched_on.append((len(chosen), len(ready.anchors)))
        return kernels.switch_on_rows(state, ready, chosen, is_finite)

    monkeypatch.setattr(llm.engine.runner, "kernels", replace(kernels, switch_on_rows=watched))
    with seen_launches(compute="choices") as launches:
        llm.warm_up()
        warm = {launch.key for launch in launches}
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=30))
    assert {(1, 1), (0, 1)} <= set(switched_on)
    assert not {launch.key for launch in launches} - warm
