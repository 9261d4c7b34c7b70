"""Draft trees and their acceptance by a search over single nodes, without an engine and without a cache."""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.models.target import Target
from dflash_testing.pairs import placement
from dflash_testing.plain_loop import read

NUM_DRAFTS = 7


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
def brute_force(
    target: Target, draft: Draft, prompt: Sequence[int], num_tokens: int, nodes: Sequence[int]
) -> tuple[list[int], dict[int, list[int]]]:
    """A greedy text without cache, and the acceptance lengths along it for trees of each size."""
    text = list(prompt)
    text.append(int(read(target, draft, text)[0][-1].argmax()))
    first = len(text)
    while len(text) < first + num_tokens + NUM_DRAFTS + 1:
        text.append(int(read(target, draft, text)[0][-1].argmax()))
    _, features = read(target, draft, text)
    lengths: dict[int, list[int]] = {}
    for num_nodes in nodes:
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
