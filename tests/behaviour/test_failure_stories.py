"""Failures that shipped elsewhere do not happen here. docs/explanation/failures.md lists them with their tests."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.layout import HEAD
from dflash_runtime.checkpoint.pair import DraftSource
from dflash_runtime.device.setup.settings import resolve_limits
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.drafts.draft import load_draft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import (
    bundled_draft,
    bundled_draft_model,
    bundled_llm,
    bundled_prompts,
    bundled_target_model,
    placement,
    random_draft,
    random_draft_config,
    random_llm,
    random_prompts,
    random_target,
)
from dflash_testing.refusals import refuses


@pytest.mark.parametrize("window", [None, 20])
def test_windowed_drafts_hit_the_prefix_cache_as_often(window: int | None) -> None:
    """vllm#50457."""
    num_layers = bundled_draft().config.num_layers
    llm = bundled_llm(bundled_draft_model(windows=(window,) * num_layers), 7)
    prompt = max(bundled_prompts(), key=len)
    llm.generate([prompt], SamplingParams(max_new_tokens=4))
    again = llm.generate([prompt], SamplingParams(max_new_tokens=4))[0]
    assert again.num_cached == (len(prompt) - 1) // 16 * 16


def test_any_number_of_rows_at_full_load() -> None:
    """vllm#50065, TensorRT-LLM#17154: buffers sized for one batch and used by another."""
    target = random_target(torch.float64)
    draft = random_draft(target, torch.float64)
    prompts = random_prompts([3, 9, 16, 17, 5] * 4, target.config.vocab_size)
    params = SamplingParams(max_new_tokens=7)
    wanted = random_llm(target, draft, 7, max_num_requests=1).generate(prompts, params)
    for max_num_requests in (2, 3, 7, 8, 9, 17):
        llm = random_llm(target, draft, 7, max_num_requests=max_num_requests, scheduling="async")
        assert [output.drafts for output in llm.generate(prompts, params)] == [output.drafts for output in wanted]


@pytest.mark.parametrize("page_size", [1, 64, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 256))])
def test_any_page_size(page_size: int) -> None:
    """vllm#47698."""
    draft = bundled_draft_model(dtype=torch.float64)
    prompts = [prompt[:length] for prompt, length in zip(bundled_prompts(), (1, 17, 40), strict=False)]
    params = SamplingParams(max_new_tokens=20)
    wanted = bundled_llm(draft, 7, dtype=torch.float64).generate(prompts, params)
    # A pool of a few thousand tokens whatever the page size.
    llm = bundled_llm(
        draft, 7, dtype=torch.float64, page_size=page_size, num_pages=max(20, 1000 // page_size), max_num_requests=2,
        scheduling="async",
    )  # fmt: skip
    assert [output.drafts for output in llm.generate(prompts, params)] == [output.drafts for output in wanted]


def test_the_draft_borrows_the_targets_head_and_embedding() -> None:
    """vllm#46435: a head that was not shared gave an acceptance of exactly 1."""
    target, draft = bundled_target_model(torch.float32), bundled_draft_model()
    assert isinstance(draft, DFlashDraft)
    assert draft._head.plain.data_ptr() == target.head.plain.data_ptr()
    assert draft._embedding.data_ptr() == target.embedding.data_ptr()


def test_a_drafts_own_head_is_not_overwritten() -> None:
    """vllm-ascend#11374: acceptance fell from 25 % to 1.7 %."""
    draft = bundled_draft_model("tiny:reduced")
    assert isinstance(draft, DFlashDraft)
    stored = bundled_draft("tiny:reduced").checkpoint.load(HEAD).float()
    assert torch.equal(draft._head.plain, stored)


@pytest.mark.parametrize("name", ["mask_embedding.pt", "mask_embedding.safetensors"])
def test_a_learned_mask_embedding_is_not_ignored(tmp_path: Any, name: str) -> None:
    """vllm#46104: served without it, acceptance was low; this runtime refuses what it does not apply."""
    import shutil

    copy = tmp_path / "draft"
    shutil.copytree(tiny_directory() / "draft", copy)
    (copy / name).write_bytes(b"never read")
    with pytest.raises(UnsupportedError, match=name):
        load_draft(open_draft(copy), bundled_target_model(), placement())


def test_judging_leaves_every_page_as_it_is() -> None:
    """vllm#56734: a forward beside the batch wrote through stale rows."""
    llm = bundled_llm(bundled_draft_model(), 7)
    outputs = llm.generate([bundled_prompts()[0][:20]], SamplingParams(max_new_tokens=20))
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    tensors = [kv.pages for kv in (runner.target_kv, runner.draft_kv)]
    before = [tensor.clone() for tensor in tensors]
    assert llm.check_lossless(outputs).is_lossless
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


def test_a_tap_on_the_last_layer_is_its_output_before_the_final_norm() -> None:
    """sglang#32204: an IndexError there, another feature elsewhere."""
    target = random_target()
    taken: list[torch.Tensor] = []
    kernels = target._decoder.norms[-1].kernels

    def watched(
        parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(parts.sum(0) + residual)
        return kernels.add_rms_norm(parts, residual, weight, eps)

    target._decoder.norms[-1] = replace(target._decoder.norms[-1], kernels=replace(kernels, add_rms_norm=watched))
    draft = random_draft(target, target_layer_ids=(0, 3))
    features: list[torch.Tensor] = []
    write = draft.write_context
    draft.write_context = lambda rows, *rest: (features.append(rows), write(rows, *rest))[1]  # type: ignore
    random_llm(target, draft, 3).generate([[1, 2, 3, 4]], SamplingParams(max_new_tokens=2))
    assert torch.equal(features[0][:, 32:], taken[0])


def test_identical_prompts_in_one_step_share_pages_soundly() -> None:
    """sglang#38140: two mappings for the last prompt token, and a race to insert."""
    draft = bundled_draft_model(dtype=torch.float64)
    prompt = max(bundled_prompts(), key=len)[:49]
    params = SamplingParams(max_new_tokens=20)
    wanted = bundled_llm(draft, 7, dtype=torch.float64, prefix_cache=False).generate([prompt], params)[0]
    llm = bundled_llm(draft, 7, dtype=torch.float64, max_num_requests=4, scheduling="async")
    for index in range(4):
        llm.engine.add(Request(index=index, prompt_token_ids=prompt, params=params))
    llm.engine.step()
    llm.engine.scheduler.check_integrity()
    requests = list(llm.engine.scheduler._running)
    assert all(llm.engine.scheduler.pages._references[page] == 1 for item in requests for page in item.pages)
    late = Request(index=4, prompt_token_ids=prompt, params=params)
    llm.engine.add(late)
    while llm.engine.scheduler.has_work:
        llm.engine.step()
        llm.engine.scheduler.check_integrity()
    assert late.num_cached == 48
    assert all(tuple(request.steps) == wanted.drafts for request in [*requests, late])


def test_context_kv_of_a_hit_stands_where_a_full_prefill_puts_it() -> None:
    """Avarok atlas#693: captured features were shifted by the length of the cached prefix."""
    prompt = max(bundled_prompts(), key=len)[:60]
    found = {}
    for name, runs in (("hit", 2), ("full", 1)):
        llm = bundled_llm(bundled_draft_model(dtype=torch.float64), 7, dtype=torch.float64)
        for _ in range(runs):
            item = Request(index=0, prompt_token_ids=prompt, params=SamplingParams(max_new_tokens=30))
            llm.engine.add(item)
            for _ in range(4):
                llm.engine.step()
            runner = llm.engine.runner
            assert runner.draft_kv is not None
            positions = torch.arange(item.kv_len)
            rows = runner.draft_kv.keys[:, torch.tensor(item.pages)[positions // 16], positions % 16]
            found[name] = (item.num_cached, rows)
            while llm.engine.scheduler.has_work:
                llm.engine.step()
    assert found["hit"][0] == 48
    assert (found["hit"][1] - found["full"][1]).abs().max() < 1e-9


def test_a_draft_with_fewer_positions_limits_the_pair_and_says_so() -> None:
    """vllm#48894, vllm#57964: a table read past its end."""
    target = random_target().config
    draft = random_draft_config(target, max_position_embeddings=64)
    assert resolve_limits(EngineConfig(), target, draft).max_model_len == 64
    assert resolve_limits(EngineConfig(num_draft_tokens=0), target, draft).max_model_len == 256
    with refuses(UsageError, field="max_model_len", found=65) as refused:
        resolve_limits(EngineConfig(max_model_len=65), target, draft)
    assert "64" in str(refused.value.expected)


def test_the_rope_table_reaches_a_block_past_the_limit() -> None:
    """vllm#57964: the last request of all drafts up to the model's last position."""
    config = EngineConfig(device="cpu", num_pages=40, max_model_len=64, max_num_requests=1)
    llm = LLM(open_target(tiny_directory() / "target"), bundled_draft(), config)
    output = llm.generate([bundled_prompts()[0][:20]], SamplingParams(max_new_tokens=100))[0]
    assert len(output.token_ids) == 64 - 20
    draft = llm.engine.runner.draft
    assert isinstance(draft, DFlashDraft)
    assert len(draft._decoder.rope.table) == 64 + 8


def test_four_runs_of_one_request_in_one_process_draft_alike() -> None:
    """tenstorrent's demo: every second generation's acceptance collapsed; llama.cpp#22105: the second request's did."""
    llm = bundled_llm(bundled_draft_model(dtype=torch.float64), 7, dtype=torch.float64, scheduling="async")
    runs = [llm.generate([bundled_prompts()[1]], SamplingParams(max_new_tokens=40))[0].drafts for _ in range(4)]
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_taps_are_read_in_the_configs_order() -> None:
    """vllm#40727 and formats with unsorted taps: features are concatenated as the checkpoint lists them."""
    source = bundled_draft().source
    swapped = DraftSource(
        replace(source.config, target_layer_ids=source.config.target_layer_ids[::-1]), source.checkpoint
    )
    draft = load_draft(swapped, bundled_target_model(), placement())
    prompts = bundled_prompts()[:6]
    params = SamplingParams(max_new_tokens=24)
    wrong = bundled_llm(draft, 7).generate(prompts, params)
    right = bundled_llm(bundled_draft_model(), 7).generate(prompts, params)
    assert [output.token_ids for output in wrong] == [output.token_ids for output in right]
    wrong_steps, right_steps = (sum(len(item.acceptance_lengths) for item in outputs) for outputs in (wrong, right))
    assert wrong_steps > 1.3 * right_steps
