"""Trees of draft tokens: the text of plain decoding, and the acceptance of a search without an engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.setup.attention import check_capability
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.drafts.draft import SelectingDraft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.hybrid_pair import random_hybrid_target
from dflash_testing.pairs import (
    DFLASH2,
    DSPARK,
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
from dflash_testing.poison import poison_free_slots
from dflash_testing.preemption import run_preempted
from dflash_testing.tree_search import NUM_DRAFTS, brute_force

NODES = (8, 16, 32, 64)


def prompts(lengths: Sequence[int] = (1, 16, 31, 40)) -> list[tuple[int, ...]]:
    return [prompt[:length] for prompt, length in zip(bundled_prompts(), lengths, strict=False)]


def tree_llm(num_nodes: int | None, draft: str = "tiny", dtype: torch.dtype = torch.float32, **engine: Any) -> LLM:
    return bundled_llm(
        bundled_draft_model(draft, dtype), NUM_DRAFTS, dtype=dtype, num_tree_nodes=num_nodes, **engine
    )  # fmt: skip


def texts(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("draft", ["tiny", pytest.param("tiny:reduced", marks=pytest.mark.slow)])
def test_acceptance_equals_a_search_without_a_cache(draft: str) -> None:
    prompt, num_tokens = bundled_prompts()[1][:24], 20
    text, lengths = brute_force(bundled_target_model(), bundled_draft_model(draft), prompt, num_tokens, NODES)
    for num_nodes in NODES:
        output = tree_llm(num_nodes, draft).generate([prompt], SamplingParams(max_new_tokens=num_tokens + 1))[0]
        assert output.token_ids == tuple(text[: num_tokens + 1])
        assert list(output.acceptance_lengths) == lengths[num_nodes]
    assert sum(lengths[8]) / len(lengths[8]) < sum(lengths[64]) / len(lengths[64])


@pytest.mark.parametrize("draft", ["tiny", "tiny:dflash2"])
def test_one_candidate_per_position_gives_the_steps_of_a_block(draft: str) -> None:
    params = SamplingParams(max_new_tokens=16)
    wanted = tree_llm(None, draft, max_num_requests=3).generate(prompts(), params)
    outputs = tree_llm(NUM_DRAFTS, draft, tree_candidates=1, max_num_requests=3).generate(prompts(), params)
    assert outputs == wanted
    assert [output.drafts for output in outputs] == [output.drafts for output in wanted]


@pytest.mark.parametrize("num_nodes", [3, 32])
def test_a_text_equals_plain_decoding(num_nodes: int) -> None:
    """Answers end at stops and at limits, within the accepted path of a tree or after it."""
    stop = bundled_llm(None, 0).generate(prompts()[3:], SamplingParams(max_new_tokens=12))[0].token_ids[-1]
    params = [SamplingParams(max_new_tokens=length, stop_token_ids=(stop,)) for length in (1, 2, 17, 30)]
    plain = bundled_llm(None, 0).generate(prompts(), params)
    assert any(output.finish_reason == "stop" for output in plain)
    assert texts(tree_llm(num_nodes).generate(prompts(), params)) == texts(plain)


@torch.inference_mode()
def test_scores_of_pairs_are_the_logits_along_a_text_of_candidates() -> None:
    target = random_target(torch.float64)
    draft = random_draft(target, torch.float64, **DFLASH2)
    assert isinstance(draft, SelectingDraft)
    blocks = torch.tensor([[5, *[96] * NUM_DRAFTS], [7, *[96] * NUM_DRAFTS]])
    positions = torch.arange(NUM_DRAFTS + 1).expand(2, -1)
    attend = PagedAttention.in_order(
        REFERENCE, KVCache(draft.config, 1, 8, placement(torch.float64)), 0, draft.config.causal, draft.config.windows
    )
    attend = replace(attend, page_table=attend.page_table.expand(2, -1), context_lens=torch.zeros(2).long())
    candidates, scores = draft.candidate_scores(blocks, positions, attend, NUM_DRAFTS)
    for place in range(candidates.shape[2]):
        text = candidates[:, :, place]
        along = draft.logits_along(blocks, positions, attend, text).gather(-1, candidates)
        torch.testing.assert_close(scores[:, 1:, place], along[:, 1:])
        torch.testing.assert_close(scores[:, 0, place], along[:, 0])


def test_windows_see_as_far_from_a_branch_as_from_a_chain() -> None:
    """Rows of a tree have positions by depth. By order in the tree, windows of 5 would cut off rows of the text."""
    target = random_target(torch.float64, windows=(5, None, 3, 5))
    draft = random_draft(target, torch.float64)
    given, params = random_prompts((3, 9, 20), 97), SamplingParams(max_new_tokens=25)
    plain = random_llm(target, None, 0).generate(given, params)
    outputs = random_llm(target, draft, NUM_DRAFTS, num_tree_nodes=24).generate(given, params)
    assert texts(outputs) == texts(plain)


MODES: list[dict[str, Any]] = [
    {"scheduling": "async", "max_num_requests": 4},
    {"max_batched_tokens": 16, "num_pages": 14, "max_num_requests": 3, "prefix_cache": False},
]


def test_texts_and_steps_do_not_depend_on_the_mode() -> None:
    """Some requests sample. The last prompt begins with pages of another. One mode preempts a request now and then."""
    given = [*prompts((5, 31, 40)), bundled_prompts()[2][:36]]
    params = [
        SamplingParams(max_new_tokens=12, seed=seed, temperature=0.9 * (seed % 2), top_p=0.9)
        for seed in range(len(given))
    ]
    wanted = tree_llm(16, dtype=torch.float64).generate(given, params)
    plain = bundled_llm(None, 0, dtype=torch.float64).generate(given, params)
    assert texts(wanted) == texts(plain)
    for index, engine in enumerate(MODES):
        llm = tree_llm(16, dtype=torch.float64, **engine)
        requests = run_preempted(llm, given, params, every=4 if index == 0 else 0)
        assert [tuple(request.output_token_ids) for request in requests] == texts(wanted)
        assert [tuple(request.steps) for request in requests] == [output.drafts for output in wanted]


def test_slots_of_rejected_rows_are_never_read() -> None:
    """Every slot is NaN before each step, except the true KV of running requests."""
    params = SamplingParams(max_new_tokens=12)
    wanted = tree_llm(16).generate(prompts(), params)
    llm = tree_llm(16, max_num_requests=2, num_pages=24)
    requests = [Request(index=index, prompt_token_ids=prompt, params=params) for index, prompt in enumerate(prompts())]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.scheduler.has_work:
        poison_free_slots(llm, requests)
        llm.engine.step()
    assert [tuple(request.output_token_ids) for request in requests] == texts(wanted)


def test_a_verify_width_bounds_the_path_and_not_the_tree() -> None:
    params = SamplingParams(max_new_tokens=20)
    whole = tree_llm(16).generate(prompts((16, 31)), params)
    outputs = tree_llm(16).generate(prompts((16, 31)), replace(params, verify_width=3))
    assert texts(outputs) == texts(whole)
    assert max(length for output in outputs for length in output.acceptance_lengths) == 3
    assert max(length for output in whole for length in output.acceptance_lengths) > 3


def test_a_trace_with_a_small_verify_width_does_not_depend_on_wider_requests() -> None:
    given, wide = prompts((16, 31, 40)), SamplingParams(max_new_tokens=40)
    narrow = replace(wide, max_new_tokens=30, verify_width=3)
    alone = tree_llm(4, max_num_requests=4).generate(given, narrow)
    beside = tree_llm(4, max_num_requests=4).generate([*given, given[0]], [narrow, narrow, narrow, wide])
    assert [output.drafts for output in beside[:3]] == [output.drafts for output in alone]


def test_no_tree_is_drafted_where_it_would_pass_the_models_limit() -> None:
    params = SamplingParams(max_new_tokens=60)
    llm = tree_llm(16, max_model_len=64)
    output = llm.generate([bundled_prompts()[0][:20]], params)[0]
    plain = bundled_llm(None, 0, max_model_len=64).generate([bundled_prompts()[0][:20]], params)[0]
    assert output.token_ids == plain.token_ids
    assert len(output.token_ids) == 44
    assert output.num_plain_steps >= 9
    assert all(20 + step.start - 1 + 17 <= 64 for step in output.drafts)


def test_what_a_tree_cannot_verify_is_refused_by_name() -> None:
    target = random_target().config
    cases: list[tuple[Any, Any, str]] = [
        (random_hybrid_target().config, None, "tree-too-wide-for-recurrent-layers"),
        (target, random_draft_config(target, **DSPARK), "tree-of-markov-draft"),
    ]
    for config, draft, expected in cases:
        check_capability("triton", config, draft, "float32")
        with pytest.raises(UnsupportedError) as refusal:
            check_capability("triton", config, draft, "float32", num_tree_nodes=200)
        assert (refusal.value.id, refusal.value.field) == (expected, "--tree")
    hybrid = random_hybrid_target().config
    for backend, most in (("triton", 63), ("reference", 200)):
        check_capability(backend, hybrid, None, "float32", num_tree_nodes=most)
    check_capability("reference", hybrid, None, "float32", num_tree_nodes=8, recurrent_rows="exact")
    with pytest.raises(UnsupportedError) as refusal:
        check_capability("triton", hybrid, None, "float32", num_tree_nodes=8, recurrent_rows="exact")
    assert (refusal.value.id, refusal.value.field) == ("tree-rows-not-exact", "--recurrent-rows")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_tree_nodes": 4, "draft_sampling": "probabilistic"}, "tree-of-sampled-drafts"),
        ({"num_tree_nodes": 4, "num_draft_tokens": 0}, "tree-without-drafts"),
        ({"tree_candidates": 4}, "option-needs-another"),
        ({"num_tree_nodes": 4, "drafting": "ngram"}, "tree-beside-blocks"),
        ({"num_tree_nodes": 4, "row_budget": True}, "tree-beside-blocks"),
        ({"num_tree_nodes": 4, "draft_confidence": True}, "tree-beside-blocks"),
    ],
)
def test_settings_that_exclude_a_tree_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as refusal:
        EngineConfig(**changes)
    assert refusal.value.id == expected
