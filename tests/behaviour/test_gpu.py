"""The bundled pair on a GPU: exact in float32, close in bfloat16, and without waits for the device."""

from typing import Any

import pytest
import torch

from dflash_kernels.attention import ragged_attention
from dflash_runtime.drafts.draft import load_draft
from dflash_runtime.metrics import count_acceptance
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.gpu import detecting_syncs, gpu_llm
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts, bundled_target_model, placement
from dflash_testing.walking_drafts import ALL, stored_draft

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_new_tokens=64)
REGRET = 0.2
"""Limit in nats: how far a chosen token may be below the target's best token, in float32."""


def acceptance(outputs: list[RequestOutput]) -> float:
    length = count_acceptance(outputs, 7).acceptance_len
    assert length is not None
    return length


def largest_regret(outputs: list[RequestOutput]) -> float:
    """The largest difference, in nats, between the target's best token and a generated token.

    Computed in float32 with the reference kernels.
    """
    judge = bundled_llm(None, 0)
    return judge.check_lossless(outputs).largest_regret_nats


@pytest.mark.parametrize("name", ["tiny", "tiny:reduced"])
@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_requests": 1},
        {"max_num_requests": 16},
        {"max_num_requests": 16, "max_batched_tokens": 17, "num_pages": 60},
        {"max_num_requests": 5, "scheduling": "sync", "prefix_cache": False},
    ],
    ids=str,
)
def test_bfloat16_regret_and_acceptance(name: str, engine: dict[str, Any]) -> None:
    prompts = bundled_prompts()[:16]
    llm = gpu_llm(name, "bfloat16", **engine)
    assert llm.engine.runner.kernels.name == "triton"
    outputs = llm.generate(prompts, PARAMS)
    regret = largest_regret(outputs)
    exact = bundled_llm(bundled_draft_model(name), 7, prefix_cache=False).generate(prompts, PARAMS)
    measured, expected = acceptance(outputs), acceptance(exact)
    print(f"{name} {engine}: regret {regret:.4f} nat, acceptance {measured:.3f}, float32 {expected:.3f}")
    assert regret <= REGRET
    assert abs(measured - expected) < 0.15 * expected


@pytest.mark.parametrize("draft", ALL)
@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_float32_traces_equal_the_cpu(kernels: str, scheduling: str, draft: str) -> None:
    prompts = bundled_prompts()[:12]
    on_gpu = gpu_llm(draft, "float32", max_num_requests=1, kernels=kernels, scheduling=scheduling)
    same = load_draft(stored_draft(draft).source, bundled_target_model(), placement())
    on_cpu = bundled_llm(same, same.config.num_draft_tokens)
    wanted = on_cpu.generate(prompts, PARAMS)
    found = on_gpu.generate(prompts, PARAMS)
    for one, other in zip(found, wanted, strict=True):
        for values, others in zip(one.draft_confidences, other.draft_confidences, strict=True):
            assert values == pytest.approx(others, abs=1e-4)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert [output.drafts for output in found] == [output.drafts for output in wanted]
    plain = gpu_llm(None, "float32", max_num_requests=1, kernels=kernels).generate(prompts, PARAMS)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize(
    ("draft", "draft_sampling"), [("tiny", "greedy"), *((draft, "probabilistic") for draft in ALL)]
)
def test_the_steady_loop_never_waits_for_the_device(sampling: dict[str, Any], draft: str, draft_sampling: str) -> None:
    """Prefill, decode, admission and paging run under torch's sync detector (vllm#39546)."""
    llm = gpu_llm(draft, "bfloat16", max_num_requests=4, max_batched_tokens=40, draft_sampling=draft_sampling)
    params = SamplingParams(max_new_tokens=40, **sampling)
    llm.generate(bundled_prompts()[:8], params)  # warm up: compile kernels and fill allocators
    for index, prompt in enumerate(bundled_prompts()[8:24]):
        llm.engine.add(Request(index=index, prompt_token_ids=prompt, params=params))
    steps = 0
    with detecting_syncs():
        while llm.engine.scheduler.has_work:
            llm.engine.step()
            steps += 1
    assert steps > 40


def test_the_detector_detects() -> None:
    with detecting_syncs(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


def test_64_concurrent_requests_with_shared_prefixes_accept_as_one_by_one() -> None:
    prompt = max(bundled_prompts(), key=len)
    tails = bundled_prompts()
    prompts = [prompt[: 16 * (1 + index % 5) + index % 3 - 1] + tails[index][:12] for index in range(64)]
    alone = gpu_llm("tiny", "bfloat16", max_num_requests=1, prefix_cache=False).generate(prompts, PARAMS)
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=64)
    llm.generate([prompt], PARAMS)  # fills the cache first: prompts of one step cannot use each other's pages
    together = llm.generate(prompts, PARAMS)
    hits = sum(output.num_cached > 0 for output in together)
    print(f"alone {acceptance(alone):.3f}, together {acceptance(together):.3f}, {hits} of 64 hit the prefix cache")
    assert hits > 32
    assert abs(acceptance(together) - acceptance(alone)) < 0.05 * acceptance(alone)
    assert largest_regret(together) <= REGRET


def test_sampled_text_is_the_same_with_and_without_speculation() -> None:
    """Random numbers depend only on seed and position, so in float32 the texts are equal."""
    prompts = bundled_prompts()[:8]
    params = [SamplingParams(max_new_tokens=40, temperature=0.9, top_p=0.95, seed=seed) for seed in range(8)]
    speculative = gpu_llm("tiny", "float32", max_num_requests=1).generate(prompts, params)
    plain = gpu_llm(None, "float32", max_num_requests=1).generate(prompts, params)
    same = sum(a.token_ids == b.token_ids for a, b in zip(speculative, plain, strict=True))
    print(f"{same} of 8 sampled texts equal")
    assert same >= 7  # rounding may change a sample that falls on the boundary between two tokens


def test_poisoned_pages_change_nothing() -> None:
    prompts = bundled_prompts()[:6]
    clean = gpu_llm("tiny", "float32", max_num_requests=1, prefix_cache=False).generate(prompts, PARAMS)
    llm = gpu_llm("tiny", "float32", max_num_requests=1, prefix_cache=False)
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    for cache in (runner.target_kv, runner.draft_kv):
        cache.pages.fill_(torch.nan)
    assert [output.drafts for output in llm.generate(prompts, PARAMS)] == [output.drafts for output in clean]


def test_first_tokens_of_prompts_in_one_forward_equal_the_cpu() -> None:
    """Prompts have many lengths. Some are partly in the prefix cache, and some are cut into chunks."""
    text = [token for prompt in bundled_prompts() for token in prompt]
    prompts = [tuple(text[7 * index :][: 1 + 5 * index]) for index in range(24)]
    params = SamplingParams(max_new_tokens=1)
    wanted = bundled_llm(None, 0, prefix_cache=False).generate(prompts, params)
    llm = gpu_llm("tiny", "float32", max_num_requests=24, max_batched_tokens=700)
    for _ in range(2):
        found = llm.generate(prompts, params)
        assert [output.token_ids for output in found] == [output.token_ids for output in wanted]


def test_prompts_of_any_length_run_on_the_compiled_kernels() -> None:
    llm = gpu_llm("tiny", "bfloat16", max_num_requests=8, max_batched_tokens=512, prefix_cache=False)
    text = [token for prompt in bundled_prompts() for token in prompt]
    params = SamplingParams(max_new_tokens=2)
    llm.generate([text[: llm.limits.max_model_len - 2], text[:5]], params)  # one prompt in chunks, one whole
    count = num_compiled()
    llm.generate([text[index : index + length] for index, length in enumerate(range(1, 300, 7))], params)
    assert num_compiled() == count > 0


def num_compiled() -> int:
    """The number of compiled variants of the prefill attention kernels."""
    kernels: Any = (ragged_attention._ragged_attention_kernel, ragged_attention._sum_parts_kernel)
    return sum(len(found[0]) for kernel in kernels for found in kernel.device_caches.values())
