"""The draft's context KV follows from the target's hidden states at every committed position.

Wrong context KV does not change the text. So the tests compute it independently: they project the hidden states of
transformers' model row by row.
"""

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, owned_shapes
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.errors import CheckpointError
from dflash_runtime.llm import LLM
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import (
    bundled_draft_model,
    bundled_llm,
    bundled_prompts,
    bundled_target_model,
    placement,
    random_draft_config,
    random_target,
    random_weights,
    target_logits,
)
from dflash_testing.refusals import refuses

TOLERANCE = 5e-5
"""For float32 values of up to about ten."""


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny_directory() / "target", dtype=torch.float32)
    return model.eval()


AROUND_PAGES = [(7, 1), (3, 15), (7, 16), (1, 17)]
OTHERS = [case for case in product((1, 3, 7), (1, 15, 16, 17, 60)) if case not in AROUND_PAGES]


@pytest.mark.parametrize(
    ("num_draft_tokens", "prompt_len"),
    [*AROUND_PAGES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_context_kv_equals_recomputation(reference: torch.nn.Module, num_draft_tokens: int, prompt_len: int) -> None:
    draft = bundled_draft_model()
    llm = bundled_llm(draft, num_draft_tokens)
    prompt = max(bundled_prompts(), key=len)[:prompt_len]
    request = Request(index=0, prompt_token_ids=prompt, params=SamplingParams(max_new_tokens=50))
    llm.engine.add(request)
    num_checks = 0
    while not request.is_finished:
        llm.engine.step()
        if request.pages and request.output_token_ids:
            check(reference, draft, llm, request)
            num_checks += 1
    assert num_checks > 5


def check(reference: torch.nn.Module, draft: Draft, llm: LLM, request: Request) -> None:
    tokens = [*request.prompt_token_ids, *request.output_token_ids][: request.kv_len]
    with torch.inference_mode():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1][0] for layer in draft.config.target_layer_ids], dim=-1)
    positions = torch.arange(request.kv_len)
    runner = llm.engine.runner
    assert runner.draft_kv is not None
    fresh = KVCache(draft.config, 1, request.kv_len, placement())
    draft.write_context(features, positions, fresh, positions)
    pages = torch.tensor(request.pages)[positions // runner.page_size]
    for kept, wanted in ((runner.draft_kv.keys, fresh.keys), (runner.draft_kv.values, fresh.values)):
        rows = kept[:, pages, positions % runner.page_size]
        assert (rows - wanted[:, 0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_logits_of_fewer_drafts_are_the_first_rows_of_all_logits(num_drafts: int) -> None:
    draft = bundled_draft_model()
    block = draft.config.block_size
    ids, positions = torch.randint(97, (2, block)), torch.arange(5, 5 + block).expand(2, -1)
    cache = KVCache(draft.config, 2, 16, placement())
    cache.pages.normal_()
    table, lens = torch.tensor([[1], [1]]), torch.tensor([5, 5])
    attend = PagedAttention(placement().kernels, cache, table, lens, draft.config.causal, draft.config.windows)
    whole = draft.logits(ids, positions, attend)
    assert whole.shape[1] == block - 1 == 7
    torch.testing.assert_close(draft.logits(ids, positions, attend, num_drafts), whole[:, :num_drafts])


def test_logits_agree_with_transformers(reference: torch.nn.Module) -> None:
    """Two correct float32 programs differ by this much; golden traces compare their logit gaps with it."""
    prompt = max(bundled_prompts(), key=len)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (target_logits(bundled_target_model(), prompt) - expected).abs().max() < 2e-5


def test_an_id_map_that_repeats_or_leaves_the_vocabulary_is_refused() -> None:
    """With a repeated id, sampled drafting would keep one of two probabilities and leave the target's distribution."""
    target = random_target()
    config = random_draft_config(target.config, draft_vocab_size=4)
    weights = random_weights(owned_shapes(config), torch.float32, 1)
    weights[DRAFT_TO_TARGET] = torch.tensor([3, 9, 8, 7])  # ids 3, 10, 10, 10
    with refuses(CheckpointError, "map-repeats-id", field=DRAFT_TO_TARGET, found=[1, 2]):
        DFlashDraft(config, stack_projections(weights.items()), target, placement())
    weights[DRAFT_TO_TARGET] = torch.tensor([3, -9, 8, 7])
    with refuses(CheckpointError, "map-outside-vocabulary", field=DRAFT_TO_TARGET, found=-8):
        DFlashDraft(config, stack_projections(weights.items()), target, placement())
