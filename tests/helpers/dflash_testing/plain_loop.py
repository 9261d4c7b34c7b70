"""The loop of drafting and verifying without an engine: no pages, no batch, no cache. It reads the whole text again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.device.storage.recurrent import recall_alone
from dflash_runtime.drafts.draft import Draft, WalkingDraft
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.target import Target
from dflash_runtime.target_config import TargetConfig
from dflash_testing.pairs import DenseAttention, placement

Step = tuple[tuple[int, ...], int]
"""Drafted tokens, and how many of them the target accepts."""

Read = Callable[[list[int]], tuple[Tensor, Tensor]]
"""Returns the target's logits [T, V] after each token of a text, and the features [T, F] that a draft reads."""


class WholeText:
    """A target that transformers runs on the whole text, without a cache. It keeps nothing of rejected tokens.

    A draft reads the mean of several residual streams [T, N, hidden].
    """

    def __init__(self, model: Any, config: TargetConfig) -> None:
        self.config, self.embedding_scale = config, 1.0
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head = Linear(model.get_output_embeddings().weight.detach())
        self._model = model

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out = self._model.model(token_ids[None], output_hidden_states=True, use_cache=False)
        tapped = [out.hidden_states[tap + 1][0] for tap in taps]
        streams = [item if item.dim() == 2 else item.sum(1) / item.shape[1] for item in tapped]
        return out.last_hidden_state[0], torch.cat(streams, dim=-1)


@dataclass(frozen=True)
class Trace:
    """A text and its verify steps, with the smallest gap between the two best logits that decided each of them.

    token_gaps   of the target, for each token of `text`
    draft_gaps   of the draft, for each step
    """

    text: list[int]
    steps: list[Step]
    starts: list[int]
    token_gaps: list[float]
    draft_gaps: list[float]


@torch.inference_mode()
def plain_loop(
    target: Target, draft: Draft, prompt: list[int], num_drafts: int, num_tokens: int
) -> tuple[list[int], list[Step]]:
    """Return at least `num_tokens` greedy tokens after a prompt, and the verify steps."""
    trace = trace_of(partial(read, target, draft), draft, prompt, num_drafts, num_tokens)
    return trace.text, trace.steps


@torch.inference_mode()
def trace_of(
    read: Read,
    draft: Draft,
    prompt: list[int],
    num_drafts: int,
    num_tokens: int,
    widths: Mapping[int, int] | None = None,
) -> Trace:
    """Trace at least `num_tokens` greedy tokens after a prompt.

    `widths` maps the number of output tokens before a step to its verify width. Other steps decode plainly. Without
    `widths` every step verifies its whole block.
    """
    text, gaps = list(prompt), list[float]()
    found = Trace([], [], [], [], [])
    logits, features = read(text)
    text.append(int(logits[-1].argmax()))
    gaps.append(gap_of(logits[-1:]))
    while len(text) - len(prompt) < num_tokens:
        start, length = len(text) - len(prompt), len(text) - 1
        verified = num_drafts if widths is None else widths.get(start, 1) - 1
        drafted, draft_gap = list[int](), torch.inf
        if verified:
            drafted, draft_gap = propose(draft, features[:length], text[-1], num_drafts, verified)
        logits, features = read(text + drafted)
        right = logits[length:].argmax(-1).tolist()
        accepted = next((place for place in range(verified) if drafted[place] != right[place]), verified)
        if verified:
            found.steps.append((tuple(drafted), accepted))
            found.starts.append(start)
            found.draft_gaps.append(draft_gap)
        gaps += [gap_of(logits[length + place][None]) for place in range(accepted + 1)]
        text += [*drafted[:accepted], right[accepted]]
    found.text.extend(text[len(prompt) :])
    found.token_gaps.extend(gaps)
    return found


def propose(draft: Draft, features: Tensor, anchor: int, num_drafts: int, num_verified: int) -> tuple[list[int], float]:
    """The first draft tokens of a block after the features [T, F] of a text, and the smallest gap of the draft."""
    length = len(features)
    placed = placement(features.dtype)
    cache = KVCache(draft.config, 1, length, placed)
    draft.write_context(features, torch.arange(length), cache, torch.arange(length))
    attend = PagedAttention.in_order(REFERENCE, cache, length, draft.config.causal, draft.config.windows)
    block = torch.tensor([[anchor, *[draft.config.mask_token_id] * num_drafts]])
    positions = torch.arange(length, length + 1 + num_drafts)[None]
    if isinstance(draft, WalkingDraft):
        ids = draft.propose(block, positions, attend, num_verified, None).token_ids
        logits = draft.logits_along(block, positions, attend, ids)
    else:
        logits = draft.logits(block, positions, attend, num_verified)
        ids = logits.argmax(-1)
    return (ids if draft.target_ids is None else draft.target_ids[ids])[0].tolist(), gap_of(logits[0])


def gap_of(logits: Tensor) -> float:
    """The smallest distance between the two best logits of a row [T, V]."""
    best = logits.topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


def read(target: Target, draft: Draft, text: list[int]) -> tuple[Tensor, Tensor]:
    """The target's logits after each token of a text, and the features of the draft."""
    memory = recall_alone(target.config.recurrence, len(text), placement(target.embedding.dtype))
    attend = DenseAttention(is_causal=True, memory=memory)
    hidden, features = target(torch.tensor(text), torch.arange(len(text)), attend, draft.config.target_layer_ids)
    assert features is not None
    return target.head(hidden), features
