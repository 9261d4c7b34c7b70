"""Memory for steps, memory for loading, and constant host memory while requests come and go."""

import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_kernels.suite import REFERENCE
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.capacity import memory
from dflash_runtime.device.capacity.memory import (
    GRAPH_BYTES,
    NUM_GRAPHS,
    WORKSPACE_BYTES,
    Fit,
    WeightBytes,
    fit_num_pages,
    fit_num_snapshots,
    is_out_of_memory,
    row_bytes,
    scratch_bytes,
    text_bytes,
)
from dflash_runtime.device.setup import loading, spreading
from dflash_runtime.device.setup.settings import rows_of_a_step
from dflash_runtime.device.storage.recurrent import snapshot_bytes
from dflash_runtime.draft_config import ConvolutionConfig, DraftConfig, MarkovConfig, SelectorConfig
from dflash_runtime.drafts.draft import load_draft_weights
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError
from dflash_runtime.llm import LLM
from dflash_runtime.models.placement import Placement, Spread
from dflash_runtime.models.target_loading import target_bytes
from dflash_runtime.scheduling.limits import RIDGE_ROWS, Limits
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.target_config import ExpertsConfig, OwnCache, RecurrenceConfig, TargetConfig
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.graphs import with_stand_ins
from dflash_testing.pairs import bundled_draft, random_draft, random_llm, random_prompts, random_target
from dflash_testing.refusals import refuses
from dflash_testing.walking_drafts import KINDS, walking_folder

GIB = 2**30
GPU = Placement(torch.device("cuda", 0), torch.bfloat16, replace(REFERENCE, name="triton"), 40_976)
COMMON: dict[str, Any] = {
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960,
    "rope": RopeConfig(theta=1e6), "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
}  # fmt: skip
TARGET = TargetConfig(model_type="qwen3", num_layers=36, windows=(None,) * 36, **COMMON)
DRAFT = DraftConfig(
    num_layers=5, block_size=16, target_layer_ids=(1, 9, 17, 25, 33), mask_token_id=151_669, draft_vocab_size=151_936,
    causal=(False,) * 5, windows=(None,) * 5, **COMMON,
)  # fmt: skip
LIMITS = Limits(num_draft_tokens=15, max_model_len=40_960, max_num_requests=16, vocab_size=151_936)


def scratch(
    max_num_requests: int = 16, placement: Placement = GPU, max_batched_tokens: int | None = 2048, **engine: Any
) -> int:
    config = EngineConfig(max_num_requests=max_num_requests, max_batched_tokens=max_batched_tokens, **engine)
    rows = rows_of_a_step(config, placement.kernels)
    limits = replace(LIMITS, max_num_requests=max_num_requests, max_batched_tokens=rows)
    return scratch_bytes(config, TARGET, DRAFT, limits, placement)


def test_memory_for_steps_follows_from_the_shapes_of_the_pair() -> None:
    """A Qwen3-8B pair has logits of 31 rows per request in the run's dtype, and again for captured steps."""
    logits = 2 * 31 * 151_936
    assert scratch(64) - scratch(32) >= 2 * 32 * logits
    assert scratch(64) - scratch(32) < 2 * 32 * (logits + 16 * 2 * 100_000 + 8 * 2 * 40_976)
    assert 0.5 * GIB < scratch() < 2 * GIB
    assert scratch(max_batched_tokens=None) == scratch(max_batched_tokens=8192) < 3 * GIB


def test_a_row_of_many_experts_takes_more_than_a_dense_one() -> None:
    """The shape is Qwen3-30B-A3B's. An expert's inner row, and its output three times, are alive at once."""
    experts = ExpertsConfig(
        num_experts=128, num_chosen=8, intermediate_size=768, has_normalised_scores=True, layers=tuple(range(36))
    )
    dense = replace(TARGET, model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144)
    plain, chosen = (row_bytes(item, 5, torch.bfloat16) for item in (dense, replace(dense, experts=experts)))
    assert chosen - plain + 2 * 3 * 6144 >= 2 * 8 * (768 + 3 * 2048)
    shared = row_bytes(replace(dense, experts=replace(experts, shared_size=2 * 768)), 5, torch.bfloat16)
    assert shared - chosen >= 2 * 2 * (768 + 3 * 2048)


def test_only_references_write_distributions_of_sampled_drafts() -> None:
    rows = 16 * 16 * 151_936
    on_cpu = Placement(torch.device("cpu"), torch.bfloat16, REFERENCE, 40_976)
    greedy, sampled = (scratch(placement=on_cpu, draft_sampling=kind) for kind in ("greedy", "probabilistic"))
    assert sampled - greedy > 2 * rows * 8 - 2048 * 2 * 100_000  # a prefill may need more than greedy steps
    assert scratch(draft_sampling="probabilistic") == scratch()


def test_a_targets_own_cache_takes_its_measured_bytes() -> None:
    """1 MiB of state per text, and scores of 2048 rows for 32 heads. Pages count its tokens."""
    own = replace(TARGET, own_cache=OwnCache(token_bytes=1000, text_bytes=2**20))
    assert text_bytes(own, replace(LIMITS, max_batched_tokens=2048), torch.float32) == 16 * 2**20 + 2 * 4 * 32 * 2048**2
    assert text_bytes(own, replace(LIMITS, max_batched_tokens=16), torch.float32) == 16 * 2**20 + 256 * 2**20
    assert text_bytes(TARGET, LIMITS, torch.float32) == 0
    limits = replace(LIMITS, num_draft_tokens=0)
    assert fit_num_pages(EngineConfig(kv_memory_bytes=16 * 1000 * 100), own, None, limits, GPU) == 100
    weightless = replace(TARGET, own_cache=OwnCache(text_bytes=2**20))
    assert fit_num_pages(EngineConfig(kv_memory_bytes=2**30), weightless, None, limits, GPU) == 16 * 40_960 // 16 + 1


def test_every_width_has_graphs_of_its_own() -> None:
    """Blocks of 16 have eight widths: 1, 2, 3, 4, 6, 8, 12 and 16. With width 1, prompt rows take memory too."""
    room = RIDGE_ROWS * row_bytes(TARGET, len(DRAFT.target_layer_ids), torch.bfloat16)
    assert scratch(adaptive_width=True) - scratch() == 8 * NUM_GRAPHS * GRAPH_BYTES + room


def test_plain_engines_have_two_graphs_per_bucket() -> None:
    plain = replace(LIMITS, num_draft_tokens=0)
    captured, launched = (
        scratch_bytes(EngineConfig(graphs=graphs), TARGET, None, plain, GPU) for graphs in (True, False)
    )
    assert captured - launched > 2 * NUM_GRAPHS * GRAPH_BYTES + RIDGE_ROWS * row_bytes(TARGET, 0, torch.bfloat16)


def test_prefill_counts_if_it_is_wider_than_a_step() -> None:
    wide, narrow = (scratch(max_num_requests=1, max_batched_tokens=count) for count in (16_384, 2048))
    assert wide - narrow > (16_384 - 2048) * 2 * (3 * 12_288 + 10 * 4096)


def test_without_graphs_no_memory_is_reserved_for_them() -> None:
    assert scratch() - scratch(graphs=False) > WORKSPACE_BYTES
    on_cpu = Placement(torch.device("cpu"), torch.bfloat16, REFERENCE, 40_976)
    assert scratch(placement=on_cpu) == scratch(graphs=False)


@pytest.mark.parametrize("is_known", [True, False])
def test_out_of_memory_is_known_by_class_or_text(is_known: bool) -> None:
    known = [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("CUDA out of memory"),
             RuntimeError("DefaultCPUAllocator: can't allocate memory")]  # fmt: skip
    others = [None, ValueError("out of memory"), RuntimeError("odd")]
    assert all(is_out_of_memory(error) is is_known for error in (known if is_known else others))


class TestSnapshots:
    """A hybrid target with four recurrent layers, whose snapshots share the KV memory with pages."""

    recurrence = RecurrenceConfig(
        layers=(0, 1, 2, 3), num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, num_taps=4
    )  # fmt: skip
    target = replace(TARGET, recurrence=recurrence)
    size = snapshot_bytes(recurrence, torch.bfloat16)

    def fit(self, **engine: Any) -> tuple[int, int]:
        config, given = EngineConfig(**engine), (self.target, DRAFT, LIMITS, GPU)
        return fit_num_snapshots(config, *given), fit_num_pages(config, *given)

    def test_a_snapshot_is_as_large_as_its_tensors(self) -> None:
        assert self.size == 4 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)

    @pytest.mark.parametrize("num_states", [10, 1000])
    def test_snapshots_take_a_quarter_of_the_kv_memory_at_most(self, num_states: int) -> None:
        budget = 4 * num_states * self.size
        num_snapshots, num_pages = self.fit(kv_memory_bytes=budget)
        assert num_snapshots == min(num_states, 8 * LIMITS.max_num_requests)
        without = self.fit(kv_memory_bytes=budget - num_snapshots * self.size, prefix_cache=False)
        assert (0, num_pages) == without

    def test_a_given_memory_decides_and_leaves_less_for_pages(self) -> None:
        budget = 400 * self.size
        few, many = (
            self.fit(kv_memory_bytes=budget, snapshot_memory_bytes=count * self.size + 1) for count in (2, 300)
        )
        assert (few[0], many[0]) == (2, 300)
        assert few[1] > 3 * many[1]

    def test_snapshots_that_leave_no_page_are_refused(self) -> None:
        with refuses(CapacityError, "kv-cache-too-small"):
            self.fit(kv_memory_bytes=400 * self.size, snapshot_memory_bytes=400 * self.size)

    def test_other_targets_have_none(self) -> None:
        assert fit_num_snapshots(EngineConfig(snapshot_memory_bytes=2**40), TARGET, DRAFT, LIMITS, GPU) == 0


class TestFit:
    """A pair that is too large is refused by its headers, and the error has the bytes of each part."""

    def check(self, free: int, monkeypatch: pytest.MonkeyPatch, *, host: int = 10**12, **engine: Any) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(memory, "available_bytes", lambda: host)
        config = EngineConfig(gpu_memory_utilization=1.0, **engine)
        Fit(config, TARGET, DRAFT, LIMITS, GPU).check(WeightBytes(16 * GIB, 2 * GIB, 16 * GIB))

    def test_the_error_has_the_bytes_of_each_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with refuses(CapacityError, "pair-too-large") as refused:
            self.check(18 * GIB, monkeypatch)
        parts = [16 * GIB, 2 * GIB, 3 * 16 * 2 * (36 + 5) * 8 * 128 * 2, scratch()]
        assert list(refused.value.found.values()) == parts
        for number in (*parts, sum(parts), 18 * GIB):
            assert f"{number / GIB:.2f} GiB" in refused.value.message
        assert "cuda:0" in refused.value.message
        assert "--device-map auto" in (refused.value.hint or "")
        assert refused.value.exit_code == 6

    @pytest.mark.parametrize("is_hybrid", [True, False])
    def test_given_memory_for_snapshots_counts_for_a_hybrid(
        self, is_hybrid: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules[__name__], "TARGET", TestSnapshots.target if is_hybrid else TARGET)
        with refuses(CapacityError, "pair-too-large") as refused:
            self.check(18 * GIB, monkeypatch, snapshot_memory_bytes=GIB)
        assert (GIB in refused.value.found.values()) is is_hybrid

    def test_a_pair_that_fits_is_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(20 * GIB, monkeypatch)

    def test_memory_for_steps_does_not_count_if_the_cache_has_a_fixed_size(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.check(18 * GIB + 2**26, monkeypatch, kv_memory_bytes=2**24)

    def test_the_host_must_hold_weights_that_pass_through_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with refuses(CapacityError, "pair-too-large") as refused:
            self.check(20 * GIB, monkeypatch, host=8 * GIB)
        assert list(refused.value.found.values()) == [16 * GIB]
        assert "8.00 GiB" in refused.value.message


class TestSpread:
    """The engine's device holds a spread target's embedding and head. Other weights may be on any device."""

    def check(self, target: int, monkeypatch: pytest.MonkeyPatch, spread: Spread, host: int = 100) -> Placement:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(spreading, "available_bytes", lambda: host * GIB)
        config = EngineConfig(gpu_memory_utilization=1.0, device_map="auto")
        placement = replace(GPU, spread=spread)
        return Fit(config, TARGET, DRAFT, LIMITS, placement).check(WeightBytes(target * GIB, 2 * GIB, target * GIB))

    def test_devices_share_weights_that_one_does_not_hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spread = self.check(120, monkeypatch, Spread()).spread
        assert spread is not None
        assert spread.max_bytes is not None
        borrowed = 2 * 151_936 * 4096 * 2
        left = 40 * GIB - 2 * GIB - borrowed - scratch() - 3 * 16 * 2 * (36 + 5) * 8 * 128 * 2
        assert spread.max_bytes[0] == int(left * (1 - spreading.KV_SHARE))
        assert spread.max_bytes[1] == 40 * GIB - scratch()
        assert spread.max_bytes["cpu"] == int(100 * GIB * spreading.HOST_SHARE)

    def test_too_large_for_all_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with refuses(CapacityError, "too-large-to-spread") as refused:
            self.check(120, monkeypatch, Spread(), host=10)
        assert list(refused.value.found.values()) == [120 * GIB]
        assert all(named in refused.value.message for named in ("cuda:0", "cuda:1", "9.00 GiB"))

    def test_a_given_device_map_is_not_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spread = Spread({"": "cpu"})
        assert self.check(10_000, monkeypatch, spread).spread == spread


@pytest.mark.parametrize("runtime", ["native", "transformers"])
def test_too_large_a_pair_is_refused_before_a_weight_is_read(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = support.make_target(tmp_path / "target"), support.make_native(tmp_path / "draft")
    read: list[object] = []
    monkeypatch.setattr(Checkpoint, "load_many", lambda *given: read.append(given))
    monkeypatch.setattr(loading, "load_target", lambda *given: read.append(given))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**16)
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [1]}\n')
    command = ("generate", "-p", tmp_path / "ids.jsonl", "-d", draft, "-t", target, "--device", "cpu")
    outcome = invoke(*command, "--target-runtime", runtime)
    assert outcome.code == 6
    assert "0.00 GiB weights of the target in float32 + " in outcome.err
    assert "--dtype bfloat16" in outcome.err
    assert not read


def test_weights_count_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    support.make_target(tmp_path)
    source = open_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors").values()
    for runtime in ("native", "transformers"):
        numbers = sum(tensor.size for tensor in tensors)
        assert target_bytes(source, torch.bfloat16, runtime) == 2 * numbers
        assert target_bytes(source, torch.float64, runtime) == 8 * numbers


def step_often(llm: LLM, num_steps: int, arrivals: Iterator[int]) -> None:
    """Run steps with new requests. Every seventh step drops a request."""
    prompts = random_prompts([3 + 5 * index for index in range(9)], 97)
    for step in range(num_steps):
        if len(llm.engine.scheduler.live) < 6:
            index = next(arrivals)
            params = SamplingParams(max_new_tokens=4 + index % 9)
            llm.engine.add(Request(index=index, prompt_token_ids=tuple(prompts[index % 9]), params=params))
        if step % 7 == 0:
            llm.engine.abort(llm.engine.scheduler.live[:1])
        llm.engine.step()


def test_host_objects_do_not_grow_with_steps() -> None:
    target = random_target(num_layers=1, max_position_embeddings=96)
    draft = random_draft(target, block_size=4, target_layer_ids=(0,), num_layers=1)
    llm = random_llm(target, draft, 3, scheduling="async", max_num_requests=4, num_pages=40, page_size=8)
    with_stand_ins(llm)
    llm.warm_up()
    arrivals = itertools.count()
    step_often(llm, 100, arrivals)
    sizes = []
    for _ in range(3):
        step_often(llm, 150, arrivals)
        gc.collect()
        sizes.append((len(gc.get_objects()), sys.getallocatedblocks()))
    (first_objects, first_blocks), _, (objects, blocks) = sizes
    # The number of unfinished requests varies by a few. One leaked object per step would be 300 more.
    assert objects - first_objects < 100
    assert blocks - first_blocks < 400


def test_logits_of_a_walk_take_memory() -> None:
    """A Markov head writes the biased logits, the best tokens alone and sampled scores. A selector writes scores."""

    def step(draft: DraftConfig, draft_sampling: str = "greedy") -> int:
        config = EngineConfig(max_num_requests=64, draft_sampling=draft_sampling, graphs=False)
        limits = replace(LIMITS, max_num_requests=64, max_batched_tokens=64)
        return scratch_bytes(config, TARGET, draft, limits, GPU)

    logits = 64 * LIMITS.num_draft_tokens * LIMITS.vocab_size
    markov = replace(DRAFT, family="dspark", markov=MarkovConfig(rank=256))
    limited = replace(markov, markov=MarkovConfig(rank=256, top_k=64))
    selecting = replace(
        DRAFT, family="dflash2", convolution=ConvolutionConfig(kernel_size=2, group_size=16),
        selector=SelectorConfig(rank=256, top_k=16),
    )  # fmt: skip
    assert step(markov) - step(DRAFT) == 2 * logits
    assert step(limited) - step(markov) == 2 * logits
    assert step(markov, "probabilistic") - step(markov) == 2 * logits
    assert step(selecting) == step(DRAFT)
    assert step(selecting, "probabilistic") - step(DRAFT) == 4 * logits
    rows = row_bytes(selecting, 0, torch.bfloat16) - row_bytes(DRAFT, 0, torch.bfloat16)
    assert rows == 2 * (2 * DRAFT.hidden_size + 2 * 2 * DRAFT.hidden_size // 16)


@pytest.mark.parametrize("kind", ["tiny", *KINDS])
def test_codebooks_and_markov_tables_count_as_weights(kind: str) -> None:
    source = bundled_draft().source if kind == "tiny" else open_draft(walking_folder(kind)).source
    target = open_target(tiny_directory() / "target")
    loaded = load_draft_weights(source, Placement(torch.device("cpu"), torch.float32, REFERENCE, 64))
    found = loading._weight_bytes(target, source, torch.float32, "native").draft
    assert found == sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())
