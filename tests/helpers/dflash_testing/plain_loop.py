"""The loop of drafting and verifying without an engine: no pages, no batch, no cache. It reads the whole text again."""

import torch

from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.kv import KVCache, PagedAttention
from dflash_runtime.drafts.draft import Draft, WalkingDraft
from dflash_runtime.models.target import Target
from dflash_testing.pairs import DenseAttention, placement

Step = tuple[tuple[int, ...], int]
"""Drafted tokens, and how many of them the target accepts."""


@torch.inference_mode()
def plain_loop(
    target: Target, draft: Draft, prompt: list[int], num_drafts: int, num_tokens: int
) -> tuple[list[int], list[Step]]:
    """Return at least `num_tokens` greedy tokens after a prompt, and the verify steps."""
    dtype = target.embedding.dtype
    text, steps = list(prompt), list[Step]()
    choices, _ = read(target, draft, text)
    text.append(choices[-1])
    while len(text) - len(prompt) < num_tokens:
        length = len(text) - 1
        _, features = read(target, draft, text[:-1])
        cache = KVCache(draft.config, 1, length, placement(dtype))
        draft.write_context(features, torch.arange(length), cache, torch.arange(length))
        attend = PagedAttention.in_order(REFERENCE, cache, length, draft.config.causal, draft.config.windows)
        block = torch.tensor([[text[-1], *[draft.config.mask_token_id] * num_drafts]])
        positions = torch.arange(length, length + 1 + num_drafts)[None]
        if isinstance(draft, WalkingDraft):
            ids = draft.propose(block, positions, attend, num_drafts, None).token_ids[0]
        else:
            ids = draft.logits(block, positions, attend, num_drafts)[0].argmax(-1)
        drafted = (ids if draft.target_ids is None else draft.target_ids[ids]).tolist()
        choices, _ = read(target, draft, text + drafted)
        right = choices[length:]
        accepted = next((place for place in range(num_drafts) if drafted[place] != right[place]), num_drafts)
        steps.append((tuple(drafted), accepted))
        text += [*drafted[:accepted], right[accepted]]
    return text[len(prompt) :], steps


def read(target: Target, draft: Draft, text: list[int]) -> tuple[list[int], torch.Tensor]:
    """The target's choice after each token of a text, and the features of the draft."""
    attend = DenseAttention(is_causal=True)
    hidden, features = target(torch.tensor(text), torch.arange(len(text)), attend, draft.config.target_layer_ids)
    assert features is not None
    choices: list[int] = target.head(hidden).argmax(-1).tolist()
    return choices, features
