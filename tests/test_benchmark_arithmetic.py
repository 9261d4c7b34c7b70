"""Arithmetic of the benchmarks of speed: loads, steps, forced acceptance, floors, and the tables in the documents."""

import re
import shlex
import statistics

import pytest
import torch

import host_time
import load
import step_time
from dflash_cli.terminal import documentation
from dflash_kernels.steps.step_rows import Bounds, RowState
from dflash_kernels.suite import REFERENCE, Kernels
from dflash_runtime.scheduling.prefix_cache import PrefixCache
from dflash_runtime.scheduling.width import AdaptiveWidth, StepTimes
from dflash_testing.graphs import with_stand_ins
from dflash_testing.pairs import random_draft, random_llm, random_target
from timing import accounting, engine_arms, forced, report
from timing.floors import Rates, StepFloor, least_ms
from timing.shapes import BLOCK, SHAPES

RATES = Rates(bandwidth=4.3e12, operations=790e12, origin="stated")


def test_a_load_is_the_same_in_every_run() -> None:
    shape = SHAPES["small"]
    made = load.make_load(shape, 256, 4096, 512)
    assert made == load.make_load(shape, 256, 4096, 512)
    lengths = sorted(len(prompt) for prompt in made.prompts)
    assert 64 <= lengths[0] < 80
    assert 400 < lengths[128] < 640, "log-uniform: half of the prompts are shorter than the geometric mean, 512"
    assert 3600 < lengths[-1] <= 4096
    assert 32 <= min(made.output_lengths) < max(made.output_lengths) <= 512


@pytest.mark.parametrize("mean", [1.3, 4.24, 6.5])
def test_forced_acceptance_has_its_mean(mean: float) -> None:
    """16,000 draws (160 steps of 100 requests) with a standard deviation of at most 5 determine the mean to 0.6%."""
    rates = forced.acceptance_rates(mean, BLOCK)
    assert 1 + sum(rates) == pytest.approx(mean)
    kernels = forced._forcing(REFERENCE, forced.draw_table(rates))
    state = rows_of_a_state(100, remaining=10_000_000)
    counts = [statistics.fmean(committed(kernels, state, width) for _ in range(160)) for width in (BLOCK, 4)]
    assert counts[0] == pytest.approx(mean, rel=0.02)
    assert counts[1] == pytest.approx(1 + sum(rates[:3]), rel=0.02), "a smaller width truncates the same draw"


@pytest.mark.parametrize(("mean", "num_rows"), [(6.5, 16), (4.24, 8)])
def test_forced_acceptance_is_the_draw_of_vllm(mean: float, num_rows: int) -> None:
    """vLLM accepts a draft token with its rate over the rate before it, until the first is rejected."""
    rates = forced.acceptance_rates(mean, num_rows)
    expected, reached = [], 1.0
    for rate, before in zip(rates, [1.0, *rates[:-1]], strict=True):
        expected.append(reached * (1 - rate / before))
        reached *= rate / before
    counts = torch.bincount(forced.draw_table(rates), minlength=num_rows)
    assert (counts / forced.TABLE_SIZE).tolist() == pytest.approx([*expected, reached], abs=2 / forced.TABLE_SIZE)


def rows_of_a_state(num_rows: int, remaining: int) -> RowState:
    def ints(value: int, *shape: int) -> torch.Tensor:
        return torch.full((num_rows, *shape), value)

    return RowState(
        done=torch.zeros(num_rows, dtype=torch.bool), kv_lens=ints(5), anchors=ints(1), remaining=ints(remaining),
        reserved_lens=ints(100), widths=ints(BLOCK), generations=ints(1), stop_ids=ints(-1, 1), page_table=ints(1, 9),
    )  # fmt: skip


def committed(kernels: Kernels, state: RowState, width: int) -> float:
    """Mean number of tokens per request that one step commits, with `width` rows verified per block."""
    rows = torch.arange(len(state.done))
    bounds = Bounds(max_model_len=2**40, last_draft_len=2**39, page_size=16, mask_id=0)
    state.kv_lens.fill_(5)
    step = kernels.open_step(state, rows, BLOCK, width, bounds)
    chosen = torch.arange(width)[None].expand(len(rows), -1).contiguous()
    drafts, is_finite = torch.full((len(rows), width - 1), -1), torch.ones_like(chosen, dtype=torch.bool)
    packed, _ = kernels.close_step(state, rows, step, drafts, chosen, step.max_accepted, is_finite)
    return float(packed[:, 0].double().mean())


def test_forced_acceptance_keeps_stops_and_limits() -> None:
    kernels = forced._forcing(REFERENCE, forced.draw_table(forced.acceptance_rates(BLOCK, BLOCK)))
    state = rows_of_a_state(1, remaining=100)
    state.stop_ids.fill_(4)
    assert committed(kernels, state, BLOCK) == 5
    assert bool(state.done.all())
    assert committed(kernels, rows_of_a_state(1, remaining=3), BLOCK) == 3
    assert committed(kernels, rows_of_a_state(1, remaining=9), 1) == 1


def test_floors_follow_from_bytes_and_operations() -> None:
    """Qwen3-8B by hand: 15.14 GB of weights at 4.3 TB/s. With 512 rows, operations are the limit."""
    floor = StepFloor(SHAPES["qwen3-8b"])
    assert least_ms(floor.plain(1, 512), RATES) == pytest.approx(3.54, abs=0.01)
    assert least_ms(floor.draft(1, 512, 6.5), RATES) == pytest.approx(0.78, abs=0.01)
    assert least_ms(floor.verify(32, 2048), RATES) == pytest.approx(12.1, abs=0.05)
    assert least_ms(floor.draft(32, 2048, 6.5), RATES) == pytest.approx(2.39, abs=0.01)
    assert least_ms(floor.verify(32, 2048, width=6), RATES) < least_ms(floor.verify(32, 2048), RATES) - 3
    assert least_ms(floor.prefill([2048], has_draft=False), RATES) == pytest.approx(37.6, abs=0.1)


def test_floors_count_the_experts_that_are_read() -> None:
    """Qwen3.6-35B-A3B by hand: 3.15 MB an expert, 40 layers, and 256 * (1 - (1 - 8 / 256) ** 16) = 102 for 16 rows."""
    shape = SHAPES["qwen3.6-35b-a3b"]
    assert shape.experts is not None
    floor = StepFloor(shape)
    assert [shape.experts.distinct(rows) for rows in (1, 16, 512)] == pytest.approx([8, 101.96, 256], abs=0.01)
    assert 2 * floor.experts_read(16) == pytest.approx(102 * 40 * 3 * 2048 * 512 * 2, rel=0.001)
    assert floor.body + floor.head == pytest.approx(2.95e9, rel=0.005), "about 3 billion weights are active"
    everything = floor.read(100_000) + 2 * floor.head
    assert everything == pytest.approx(34.66e9, rel=0.001)
    assert least_ms(floor.plain(1, 512), RATES) == pytest.approx(1.40, abs=0.01)
    assert least_ms(floor.verify(1, 512), RATES) == pytest.approx(6.9, abs=0.1)


def test_floors_of_sliding_layers_and_packed_experts() -> None:
    """gpt-oss-20b by hand: 13.2 MB an expert, 12 layers that see 512 tokens of 1,024 bytes, and 12 that see 128."""
    floor = StepFloor(SHAPES["gpt-oss-20b"])
    assert floor.experts_bytes(1) == pytest.approx(4 * 24 * 3 * 2880**2 * 17 / 32, rel=0.001)
    assert floor.experts_bytes(10_000) == pytest.approx(32 * 24 * 3 * 2880**2 * 17 / 32, rel=0.001)
    assert floor.plain(1, 512)[1].num_bytes == 2 * 2 * 8 * 64 * 12 * (513 + 129)
    assert least_ms(floor.plain(1, 512), RATES) == pytest.approx(0.866, abs=0.001)


@pytest.mark.parametrize(("name", "num_weights"), [("gemma-4-31b", 30.7e9), ("gemma-4-26b-a4b", 25.23e9)])
def test_floors_of_full_layers_with_other_heads(name: str, num_weights: float) -> None:
    shape = SHAPES[name]
    floor = StepFloor(shape)
    assert floor.read(100_000) + floor.head == pytest.approx(num_weights, rel=0.001)
    num_full = shape.layers // 6
    assert shape.full_heads is not None
    numbers = 5 * num_full * shape.kv_heads * 256 + num_full * shape.full_heads[0] * 512
    assert floor.plain(1, 512)[1].num_bytes == 2 * 2 * 513 * numbers


def test_time_is_accounted_by_kernel_and_by_gap() -> None:
    kernels = [
        accounting.Interval("nvjet_tst_64x8_64x16", 0, 600),
        accounting.Interval("_block_attention_kernel", 600, 700),
        accounting.Interval("_rms_norm_kernel", 650, 750),
        accounting.Interval("Memcpy DtoH", 800, 850),
    ]
    later = [accounting.Interval(item.name, item.begin + 2000, item.end + 2000) for item in kernels]
    found = accounting.account(later + kernels, 2)
    assert found.busy_ms == pytest.approx(0.8)
    assert found.num_nodes == 4
    assert found.kinds_us["matrix products"] == 600
    assert found.kinds_us["norms, rotation, activation, KV store"] == 50  # launched early, it waited for the other 50
    levels = accounting.waterfall([("floor", 0.4), ("unknown", None)], accounting.account(kernels, 1), 1.0)
    assert [value for _, value in levels] == pytest.approx([0.4, 0.6, 0.7, 0.8, 1.0])
    assert "+0.200" in report.waterfall_text("a step", levels).splitlines()[-1]


def test_a_disturbed_round_does_not_count() -> None:
    assert engine_arms.tokens_per_second([2.0, 2.0, 9.0], [40, 60, 50], steps=10) == pytest.approx(2500)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix products"),
        ("_combine_kernel", "attention"),
        ("_markov_walk_kernel", "matrix products"),
        ("_top_tokens_kernel", "argmax and sampling"),
        ("_candidate_walk_kernel", "argmax and sampling"),
        ("_conv_add_norm_kernel", "norms, rotation, activation, KV store"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<ArgMaxOps>>", "argmax and sampling"),
        ("_qk_norm_rope_kernel", "norms, rotation, activation, KV store"),
        ("void at::native::elementwise_kernel<128, 2>", "bookkeeping"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    assert accounting.kind_of(name) == kind


SPEED_LOGS = ("decode-steps", "products", "attention", "prefill", "mixed-load", "other-times", "draft-kinds")
DATE = r"\b20\d\d-\d\d-\d\d\b"


def texts_before_tables(topic: str) -> list[str]:
    """For each section of a page that has a table: the text before its first table."""
    sections = documentation.text(topic).split("\n## ")[1:]
    return [part.partition("|---|")[0] for part in sections if "|---|" in part]


@pytest.mark.parametrize("topic", ["performance", *SPEED_LOGS])
def test_every_table_of_speed_says_how_it_was_measured(topic: str) -> None:
    """Machine, versions and a command precede the tables of each section, and a date in the logs only."""
    texts = texts_before_tables(topic)
    assert texts
    for before in texts:
        is_host = before.startswith("Host\n")  # without a device
        assert re.search(r"^\d+ cores of " if is_host else r"H[12]00", before, re.M)
        assert re.search(r"Python \d" if is_host else r"torch \d", before)
        assert "```sh" in before
        assert bool(re.search(rf"; {DATE}\.", before)) == (topic != "performance"), before
    assert topic != "performance" or not re.search(DATE, documentation.text(topic))


def test_commands_of_speed_are_accepted() -> None:
    pages = "\n".join(documentation.text(topic) for topic in ("performance", *SPEED_LOGS))
    commands = re.findall(r"^python3 examples/benchmarks/(step_time|load)\.py(.*)$", pages, re.M)
    assert len(commands) >= 8
    for name, options in commands:
        given = {"step_time": step_time, "load": load}[name].make_parser().parse_args(shlex.split(options))
        known = load.ARMS if name == "load" else step_time.KNOWN_ARMS
        assert {*given.arms.split(",")} <= {*known}


def test_a_prompt_in_a_full_pool_evicts_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[int] = []
    forget = PrefixCache._forget

    def watched(cache: PrefixCache, page: int) -> None:
        evicted.append(page)
        forget(cache, page)

    monkeypatch.setattr(PrefixCache, "_forget", watched)
    assert host_time.evicting_ms(64) > 0
    assert len(evicted) >= 64 // engine_arms.PAGE_SIZE


@pytest.mark.skipif(torch.cuda.is_available(), reason="uses stand-ins for graphs")
def test_every_width_is_captured_before_steps_are_timed() -> None:
    """For the current number of requests, and without steps that prompts join."""
    target = random_target(num_layers=2)
    llm = random_llm(target, random_draft(target, block_size=4, num_layers=1), 3, max_num_requests=3)
    graphs = with_stand_ins(llm)
    times = {batch: {width: 1.0 + width for width in (1, 2, 3, 4)} for batch in (1, 2, 3)}
    llm.engine.scheduler.width_policy = AdaptiveWidth(StepTimes(times), 3)
    engine_arms.capture_widths(llm, engine_arms.make_requests(SHAPES["small"], [5, 5, 5], 8))
    assert sorted((bucket, mode.verify_width) for bucket, mode in graphs.captured) == [(3, 1), (3, 2), (3, 3), (3, 4)]
    assert not any(mode.num_prompt_rows for _, mode in graphs.captured)
