"""Trees of draft tokens on targets with recurrent layers: the text of plain decoding, and exact acceptance."""

from typing import Any

import pytest
import torch

from dflash_kernels.recurrent.delta_blocks import MAX_TREE_ROWS
from dflash_runtime.device.setup.attention import MAX_RECURRENT_NODES
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.hybrid_pair import hybrid_draft, hybrid_llm, hybrid_prompts, hybrid_target, random_hybrid_target
from dflash_testing.pairs import random_draft, random_llm, random_prompts
from dflash_testing.preemption import run_preempted
from dflash_testing.tree_search import NUM_DRAFTS, brute_force

NODES = (3, 24, 60)


def texts(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def test_acceptance_equals_a_search_without_a_cache() -> None:
    """The bundled draft is so often right that only some prompts tell trees from blocks."""
    prompt, num_tokens = hybrid_prompts()[5], 24
    text, lengths = brute_force(hybrid_target(), hybrid_draft(), prompt, num_tokens, NODES)
    for num_nodes in NODES:
        llm = hybrid_llm(num_tree_nodes=num_nodes)
        output = llm.generate([prompt], SamplingParams(max_new_tokens=num_tokens + 1, ignore_eos=True))[0]
        assert output.token_ids == tuple(text[: num_tokens + 1])
        assert list(output.acceptance_lengths) == lengths[num_nodes]
    assert len(lengths[60]) < len(lengths[24]) < len(lengths[3])


def test_one_candidate_per_position_gives_the_steps_of_a_block() -> None:
    params = SamplingParams(max_new_tokens=24)
    wanted = hybrid_llm().generate(hybrid_prompts()[:3], params)
    outputs = hybrid_llm(num_tree_nodes=NUM_DRAFTS, tree_candidates=1).generate(hybrid_prompts()[:3], params)
    assert [(item.token_ids, item.drafts) for item in outputs] == [(item.token_ids, item.drafts) for item in wanted]


MODES: list[dict[str, Any]] = [
    {"scheduling": "async", "max_num_requests": 4},
    {"max_batched_tokens": 16, "num_pages": 30, "max_num_requests": 3, "page_size": 4},
]


def test_texts_and_steps_do_not_depend_on_the_mode() -> None:
    """Some requests sample. One mode preempts a request now and then, the other has a prefix cache and few pages."""
    given = [*hybrid_prompts()[4:8], (*hybrid_prompts()[5], *hybrid_prompts()[1][:5])]
    params = [
        SamplingParams(max_new_tokens=14, seed=seed, temperature=0.9 * (seed % 2), ignore_eos=True)
        for seed in range(len(given))
    ]
    wanted = hybrid_llm(dtype=torch.float64, num_tree_nodes=24).generate(given, params)
    assert texts(wanted) == texts(hybrid_llm(0, dtype=torch.float64).generate(given, params))
    for index, engine in enumerate(MODES):
        llm = hybrid_llm(dtype=torch.float64, num_tree_nodes=24, **engine)
        requests = run_preempted(llm, given, params, every=3 if index == 0 else 0)
        assert [tuple(request.output_token_ids) for request in requests] == texts(wanted)
        assert [tuple(request.steps) for request in requests] == [output.drafts for output in wanted]


def test_a_later_turn_begins_at_a_state_that_a_tree_passed() -> None:
    """The states at page boundaries of the answer are those of the accepted path."""
    params = SamplingParams(max_new_tokens=21, ignore_eos=True)
    llm = hybrid_llm(dtype=torch.float64, num_tree_nodes=24, page_size=4)
    (first,) = llm.generate([hybrid_prompts()[7]], params)
    later = (*hybrid_prompts()[7], *first.token_ids, *hybrid_prompts()[2][:6])
    (second,) = llm.generate([later], params)
    assert second.num_cached > len(hybrid_prompts()[7]) + 8
    assert texts([second]) == texts(hybrid_llm(0, dtype=torch.float64).generate([later], params))


@pytest.mark.interpreter
def test_triton_kernels_give_the_text() -> None:
    target = random_hybrid_target()
    draft, given, params = random_draft(target), random_prompts((5,), 97), SamplingParams(max_new_tokens=4)
    wanted = random_llm(target, draft, NUM_DRAFTS, num_tree_nodes=6).generate(given, params)
    found = random_llm(target, draft, NUM_DRAFTS, num_tree_nodes=6, kernels="triton").generate(given, params)
    assert [(item.token_ids, item.drafts) for item in found] == [(item.token_ids, item.drafts) for item in wanted]


def test_the_limit_of_early_refusals_is_the_kernels() -> None:
    assert MAX_RECURRENT_NODES == MAX_TREE_ROWS - 1
