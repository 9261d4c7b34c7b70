"""The logits along a text are those of the walk: along its own tokens a draft chooses each of them again."""

from typing import Any

import pytest
import torch

from dflash_kernels.suite import REFERENCE
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, owned_shapes
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.draft_config import MarkovConfig
from dflash_runtime.drafts.draft import WalkingDraft, build_draft
from dflash_runtime.models.weights import stack_projections
from dflash_testing.pairs import DFLASH2, placement, random_draft_config, random_target, random_weights

NUM_DRAFTS, NUM_BLOCKS = 5, 6
DSPARK: dict[str, Any] = {"family": "dspark"}
CHANGES: dict[str, dict[str, Any]] = {
    "dflash2": DFLASH2,
    "dspark": {**DSPARK, "markov": MarkovConfig(rank=4)},
    "anchor-first": {**DSPARK, "markov": MarkovConfig(rank=4, top_k=6), "sample_from_anchor": True},
    "gated": {**DSPARK, "markov": MarkovConfig(rank=4, head_type="gated"), "logit_scale": 0.5},
    "rnn": {**DSPARK, "markov": MarkovConfig(rank=4, head_type="rnn")},
    "rnn, anchor-first": {**DSPARK, "markov": MarkovConfig(rank=4, head_type="rnn"), "sample_from_anchor": True},
    "no head": {**DSPARK, "markov": None},
    "reduced": {**DSPARK, "markov": MarkovConfig(rank=4), "draft_vocab_size": 40},
}


def walking_draft(name: str) -> WalkingDraft:
    target = random_target()
    config = random_draft_config(target.config, **CHANGES[name])
    weights = random_weights(owned_shapes(config), torch.float32, 1)
    if config.has_reduced_vocab:
        ids = torch.linspace(0, config.vocab_size - 1, config.draft_vocab_size).long()
        weights[DRAFT_TO_TARGET] = ids - torch.arange(config.draft_vocab_size)
    draft = build_draft(config, stack_projections(weights.items()), target, placement())
    assert isinstance(draft, WalkingDraft)
    return draft


def blocks_of(draft: WalkingDraft) -> tuple[torch.Tensor, torch.Tensor, PagedAttention]:
    """Blocks after a context of 3 rows of zeros."""
    config = draft.config
    cache = KVCache(config, 2, 16, placement())
    anchors = torch.arange(7, 7 + NUM_BLOCKS)[:, None]
    block = torch.cat((anchors, anchors.new_full((NUM_BLOCKS, NUM_DRAFTS), config.mask_token_id)), dim=1)
    positions = 3 + torch.arange(NUM_DRAFTS + 1).expand(NUM_BLOCKS, -1)
    table, lens = torch.ones((NUM_BLOCKS, 1), dtype=torch.int64), torch.full((NUM_BLOCKS,), 3)
    return block, positions, PagedAttention(REFERENCE, cache, table, lens, config.causal, config.windows)


@pytest.mark.parametrize("name", CHANGES)
def test_along_its_own_tokens_a_draft_chooses_them_again(name: str) -> None:
    draft = walking_draft(name)
    inputs = blocks_of(draft)
    ids = draft.propose(*inputs, NUM_DRAFTS, None).token_ids
    text = ids if draft.target_ids is None else draft.target_ids[ids]
    assert torch.equal(draft.logits_along(*inputs, text).argmax(-1), ids)


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"no head"}))
def test_a_token_changes_the_logits_of_the_next(name: str) -> None:
    draft = walking_draft(name)
    inputs = blocks_of(draft)
    text = torch.zeros((NUM_BLOCKS, NUM_DRAFTS), dtype=torch.int64)
    before = draft.logits_along(*inputs, text)
    text[:, 1] = 9
    after = draft.logits_along(*inputs, text)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])
    has_state = draft.config.markov is not None and draft.config.markov.head_type == "rnn"
    assert torch.equal(before[:, 3:], after[:, 3:]) is not has_state
