"""Trees of draft tokens: the text of plain decoding, and the acceptance of a search without an engine."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.suite import REFERENCE
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.attention import check_capability
from dflash_runtime.device.kv import KVCache, PagedAttention
from dflash_runtime.drafts.draft import Draft, SelectingDraft
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request, RequestOutput, SamplingParams
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
from dflash_testing.plain_loop import read
from dflash_testing.poison import poison_free_slots
from dflash_testing.preemption import preempt_youngest

NODES = (8, 16, 32, 64)
NUM_DRAFTS = 7


def prompts(lengths: Sequence[int] = (1, 16, 31, 40)) -> list[tuple[int, ...]]:
    return [prompt[:length] for prompt, length in zip(bundled_prompts(), lengths, strict=False)]


def tree_llm(num_nodes: int | None, draft: str = "tiny", dtype: torch.dtype = torch.float32, **engine: Any) -> LLM:
    return bundled_llm(
        bundled_draft_model(draft, dtype), NUM_DRAFTS, dtype=dtype, num_tree_nodes=num_nodes, **engine
    )  # fmt: skip


def texts(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def draft_log_probs(draft: Draft, features: Tensor, anchor: int) -> Tensor:
    """Log-probabilities [K, V'] of a block after the features [T, F] of a text, without an engine."""
    length, config = len(features), draft.config
    cache = KVCache(config, 1, length, placement(features.dtype))
    draft.write_context(features, torch.arange(length), cache, torch.arange(length))
    attend = PagedAttention.in_order(REFERENCE, cache, length, config.causal, config.windows)
    block = torch.tensor([[anchor, *[config.mask_token_id] * NUM_DRAFTS]])
    positions = torch.arange(length, length + 1 + NUM_DRAFTS)[None]
    return draft.logits(block, positions, attend, NUM_DRAFTS)[0].log_softmax(-1)


def best_paths(log_probs: Tensor, num_nodes: int) -> set[tuple[int, ...]]:
    """The most likely paths, found one node at a time. A node's next sibling and first child are looked at later."""
    values, ids = (item.tolist() for item in log_probs.sort(dim=-1, descending=True, stable=True))
    heap: list[tuple[float, tuple[int, ...]]] = [(-values[0][0], (0,))]
    found: set[tuple[int, ...]] = set()
    while len(found) < num_nodes:
        score, ranks = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        found.add(tuple(ids[place][index] for place, index in enumerate(ranks)))
        heapq.heappush(heap, (score + values[depth][rank] - values[depth][rank + 1], (*ranks[:-1], rank + 1)))
        if len(ranks) < len(values):
            heapq.heappush(heap, (score - values[depth + 1][0], (*ranks, 0)))
    return found


@torch.inference_mode()
def brute_force(draft: Draft, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], dict[int, list[int]]]:
    """A greedy text without cache, and the acceptance lengths along it for trees of each size."""
    target, text = bundled_target_model(), list(prompt)
    text.append(int(read(target, draft, text)[0][-1].argmax()))
    first = len(text)
    while len(text) < first + num_tokens + NUM_DRAFTS + 1:
        text.append(int(read(target, draft, text)[0][-1].argmax()))
    _, features = read(target, draft, text)
    lengths: dict[int, list[int]] = {}
    for num_nodes in NODES:
        position, lengths[num_nodes] = first - 1, []
        while position < first - 1 + num_tokens:
            log_probs = draft_log_probs(draft, features[:position], text[position])
            if draft.target_ids is not None:
                whole = torch.full((NUM_DRAFTS, target.config.vocab_size), -torch.inf)
                log_probs = whole.index_copy(1, draft.target_ids, log_probs)
            paths, accepted = best_paths(log_probs, num_nodes), 0
            while tuple(text[position + 1 : position + 2 + accepted]) in paths:
                accepted += 1
            lengths[num_nodes].append(accepted + 1)
            position += accepted + 1
    return text[first - 1 :], lengths


@pytest.mark.parametrize("draft", ["tiny", pytest.param("tiny:reduced", marks=pytest.mark.slow)])
def test_acceptance_equals_a_search_without_a_cache(draft: str) -> None:
    prompt, num_tokens = bundled_prompts()[1][:24], 20
    text, lengths = brute_force(bundled_draft_model(draft), prompt, num_tokens)
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
        requests = [
            Request(index=place, prompt_token_ids=prompt, params=item)
            for place, (prompt, item) in enumerate(zip(given, params, strict=True))
        ]
        for request in requests:
            llm.engine.add(request)
        num_steps = 0
        while llm.engine.scheduler.has_work:
            llm.engine.step()
            num_steps += 1
            if index == 0 and num_steps % 4 == 0:
                preempt_youngest(llm)
        assert [tuple(request.output_token_ids) for request in requests] == texts(wanted)
        assert [tuple(request.steps) for request in requests] == [output.drafts for output in wanted]
        llm.engine.scheduler.check_integrity()


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
        (random_hybrid_target().config, None, "tree-of-recurrent-layers"),
        (target, random_draft_config(target, **DSPARK), "tree-of-markov-draft"),
    ]
    for config, draft, expected in cases:
        check_capability("reference", config, draft, "float32")
        with pytest.raises(UnsupportedError) as refusal:
            check_capability("reference", config, draft, "float32", has_trees=True)
        assert (refusal.value.id, refusal.value.field) == (expected, "--tree")


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
