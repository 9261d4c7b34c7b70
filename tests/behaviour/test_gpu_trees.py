"""Trees of draft tokens on a GPU: exact in float32, close in bfloat16, captured, and without waits for the device."""

from collections.abc import Sequence
from typing import Any

import pytest

from dflash_runtime.drafts.draft import load_draft
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.gpu import detecting_syncs, gpu_llm
from dflash_testing.pairs import bundled_llm, bundled_prompts, bundled_target_model, placement
from dflash_testing.walking_drafts import stored_draft

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_new_tokens=64)
REGRET = 0.2
"""Limit in nats: how far a chosen token may be below the target's best token, in float32."""


def texts(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def acceptance(outputs: Sequence[RequestOutput]) -> float:
    lengths = [length for output in outputs for length in output.acceptance_lengths]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize(
    "engine",
    [{}, {"graphs": False}, {"kernels": "reference"}, {"scheduling": "sync", "max_batched_tokens": 40}],
    ids=str,
)
@pytest.mark.parametrize(("draft", "num_nodes"), [("tiny", 8), ("tiny", 64), ("tiny", 100), ("dflash2", 32)])
def test_float32_steps_equal_the_cpu(draft: str, num_nodes: int, engine: dict[str, Any]) -> None:
    prompts = bundled_prompts()[:8]
    same = load_draft(stored_draft(draft).source, bundled_target_model(), placement())
    wanted = bundled_llm(same, same.config.num_draft_tokens, num_tree_nodes=num_nodes).generate(prompts, PARAMS)
    found = gpu_llm(draft, "float32", max_num_requests=1, num_tree_nodes=num_nodes, **engine).generate(prompts, PARAMS)
    assert texts(found) == texts(wanted)
    assert [output.acceptance_lengths for output in found] == [output.acceptance_lengths for output in wanted]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_bfloat16_texts_are_the_targets_choices(kv_dtype: str) -> None:
    """A tree of 32 nodes accepts clearly more than a block. With KV in FP8 only the acceptance is compared."""
    prompts = bundled_prompts()[:16]
    outputs = gpu_llm("tiny", "bfloat16", num_tree_nodes=32, kv_dtype=kv_dtype).generate(prompts, PARAMS)
    block = gpu_llm("tiny", "bfloat16", kv_dtype=kv_dtype).generate(prompts, PARAMS)
    print(f"{kv_dtype}: trees {acceptance(outputs):.3f}, blocks {acceptance(block):.3f}")
    assert acceptance(outputs) > 1.15 * acceptance(block)
    if kv_dtype == "auto":
        assert bundled_llm(None, 0).check_lossless(outputs).largest_regret_nats <= REGRET


def test_steps_are_captured_and_nothing_is_compiled_after_the_warm_up() -> None:
    params = [PARAMS, SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.9)]
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=4, num_tree_nodes=16)
    llm.warm_up(params)
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    captured = graphs.captured
    assert 8 in {mode.verify_width for _, mode in captured}
    llm.generate(bundled_prompts()[:8], [params[index % 2] for index in range(8)])
    assert graphs.captured == captured


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("graphs", [True, False])
def test_the_steady_loop_never_waits_for_the_device(sampling: dict[str, Any], graphs: bool) -> None:
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=4, max_batched_tokens=150, num_tree_nodes=32, graphs=graphs)
    params = SamplingParams(max_new_tokens=40, **sampling)
    llm.generate(bundled_prompts()[:8], params)  # warm up: compile kernels and fill allocators
    for index, prompt in enumerate(bundled_prompts()[8:24]):
        llm.engine.add(Request(index=index, prompt_token_ids=prompt, params=params))
    with detecting_syncs():
        while llm.engine.scheduler.has_work:
            llm.engine.step()
