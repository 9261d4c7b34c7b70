"""What is kept free for steps, what loading takes, and that nothing grows while requests come and go."""

import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_kernels.suite import REFERENCE
from dflash_runtime.config import DraftConfig, EngineConfig, ExpertsConfig, OwnCache, RopeConfig, TargetConfig
from dflash_runtime.device.memory import (
    GRAPH_BYTES,
    NUM_GRAPHS,
    WORKSPACE_BYTES,
    fit_num_pages,
    is_out_of_memory,
    own_cache_bytes,
    row_bytes,
    scratch_bytes,
)
from dflash_runtime.device.settings import prompt_rows
from dflash_runtime.llm import LLM
from dflash_runtime.models.placement import Placement
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.request import Request, SamplingParams
from dflash_testing.graphs import with_stand_ins
from dflash_testing.pairs import random_draft, random_llm, random_prompts, random_target

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
    rows = prompt_rows(config, placement.kernels)
    limits = replace(LIMITS, max_num_requests=max_num_requests, max_batched_tokens=rows)
    return scratch_bytes(config, TARGET, DRAFT, limits, placement)


def test_what_is_kept_free_follows_from_the_shapes_of_the_pair() -> None:
    """A Qwen3-8B pair: logits of 31 rows a request, in the dtype of the run; once more for captured steps."""
    logits = 2 * 31 * 151_936
    assert scratch(64) - scratch(32) >= 2 * 32 * logits
    assert scratch(64) - scratch(32) < 2 * 32 * (logits + 16 * 2 * 100_000 + 8 * 2 * 40_976)
    assert 0.5 * GIB < scratch() < 2 * GIB
    assert scratch(max_batched_tokens=None) == scratch(max_batched_tokens=8192) < 3 * GIB


def test_a_row_of_many_experts_takes_more_than_a_dense_one() -> None:
    """At the shape of Qwen3-30B-A3B; alive at once are an expert's inner row and its outputs, three times."""
    experts = ExpertsConfig(
        num_experts=128, num_chosen=8, intermediate_size=768, has_normalised_scores=True, layers=tuple(range(36))
    )
    dense = replace(TARGET, model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144)
    plain, chosen = (row_bytes(item, 5, torch.bfloat16) for item in (dense, replace(dense, experts=experts)))
    assert chosen - plain + 2 * 3 * 6144 >= 2 * 8 * (768 + 3 * 2048)


def test_only_references_write_distributions_of_sampled_drafts() -> None:
    rows = 16 * 16 * 151_936
    on_cpu = Placement(torch.device("cpu"), torch.bfloat16, REFERENCE, 40_976)
    greedy, sampled = (scratch(placement=on_cpu, draft_sampling=kind) for kind in ("greedy", "probabilistic"))
    assert sampled - greedy > 2 * rows * 8 - 2048 * 2 * 100_000  # where a prefill took more than greedy steps
    assert scratch(draft_sampling="probabilistic") == scratch()


def test_a_cache_of_the_targets_own_takes_what_was_measured_of_it() -> None:
    """A state of 1 MiB a text, and 32 heads' scores of 2048 rows; pages stand for the tokens beside them."""
    own = replace(TARGET, own_cache=OwnCache(token_bytes=1000, text_bytes=2**20))
    assert own_cache_bytes(own, replace(LIMITS, max_batched_tokens=2048)) == 16 * 2**20 + 2 * 4 * 32 * 2048**2
    assert own_cache_bytes(own, replace(LIMITS, max_batched_tokens=16)) == 16 * 2**20 + 256 * 2**20
    assert own_cache_bytes(TARGET, LIMITS) == 0
    limits = replace(LIMITS, num_draft_tokens=0)
    assert fit_num_pages(EngineConfig(kv_memory_bytes=16 * 1000 * 100), own, None, limits, GPU) == 100
    weightless = replace(TARGET, own_cache=OwnCache(text_bytes=2**20))
    assert fit_num_pages(EngineConfig(kv_memory_bytes=2**30), weightless, None, limits, GPU) == 16 * 40_960 // 16 + 1


def test_every_width_has_graphs_of_its_own() -> None:
    """Blocks of 16 are verified in eight widths: 1, 2, 3, 4, 6, 8, 12 and 16."""
    assert scratch(adaptive_width=True) - scratch() == 7 * NUM_GRAPHS * GRAPH_BYTES


def test_prefill_counts_where_it_is_wider_than_a_step() -> None:
    wide, narrow = (scratch(max_num_requests=1, max_batched_tokens=count) for count in (16_384, 2048))
    assert wide - narrow > (16_384 - 2048) * 2 * (3 * 12_288 + 10 * 4096)


def test_without_graphs_their_memory_is_not_kept_free() -> None:
    assert scratch() - scratch(graphs=False) > WORKSPACE_BYTES
    on_cpu = Placement(torch.device("cpu"), torch.bfloat16, REFERENCE, 40_976)
    assert scratch(placement=on_cpu) == scratch(graphs=False)


@pytest.mark.parametrize("is_known", [True, False])
def test_out_of_memory_is_known_by_its_class_or_its_words(is_known: bool) -> None:
    known = [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("CUDA out of memory"),
             RuntimeError("DefaultCPUAllocator: can't allocate memory")]  # fmt: skip
    others = [None, ValueError("out of memory"), RuntimeError("odd")]
    assert all(is_out_of_memory(error) is is_known for error in (known if is_known else others))


def step_often(llm: LLM, num_steps: int, arrivals: Iterator[int]) -> None:
    """Requests come and go; one in seven is dropped on its way."""
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
    step_often(llm, 200, arrivals)
    sizes = []
    for _ in range(3):
        step_often(llm, 250, arrivals)
        gc.collect()
        sizes.append((len(gc.get_objects()), sys.getallocatedblocks()))
    (first_objects, first_blocks), _, (objects, blocks) = sizes
    # Some more or less are those of requests that are under way; one a step would be 500 more.
    assert objects - first_objects < 100
    assert blocks - first_blocks < 400
