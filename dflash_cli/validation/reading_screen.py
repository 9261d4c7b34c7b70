"""A quick estimate of how a draft accepts under a reading, without generating: blocks drafted along a known text.

The target's hidden states of the texts are computed once. Each reading then drafts from anchors spread over all texts,
and what it would have had accepted there is counted. That costs one forward of the draft for many anchors, so every
reading can be tried on all prompts before the best are run.

Axis letters: R anchors, N block rows, P pages, T rows of all texts, V output vocabulary.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dflash_runtime.device.kv import KVCache, PagedAttention
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.models.placement import as_current
from dflash_runtime.models.weights import Weights
from dflash_runtime.scheduling.request import RequestOutput

MAX_LOGITS = 1 << 26
"""Logits computed at a time."""


class ReadingScreen:
    """Prompts with the target's greedy continuations, ready to be drafted along, in pages one text after another.

    `num_drafts` is the K that the draft's own config states; of a longer block no more drafts count, or longer would
    always be better.
    """

    @torch.inference_mode()
    def __init__(
        self, pair: LoadedPair, outputs: Sequence[RequestOutput], taps: Collection[int], num_drafts: int
    ) -> None:
        self._num_drafts = num_drafts
        self._last: tuple[Weights | None, tuple[object, ...], KVCache] | None = None
        self._page_size = page_size = pair.config.page_size
        device = pair.placement.device
        texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        self._num_pages = [-(-len(text) // page_size) for text in texts]
        starts = [page_size * sum(self._num_pages[:index]) for index in range(len(texts))]
        self._slots = torch.cat([start + torch.arange(len(text)) for start, text in zip(starts, texts, strict=True)])
        self._slots = self._slots.to(device)
        self._positions = torch.cat([torch.arange(len(text)) for text in texts]).to(device)
        self._token_ids = torch.zeros(page_size * sum(self._num_pages), dtype=torch.int64, device=device)
        self._token_ids[self._slots] = torch.tensor([token for text in texts for token in text], device=device)
        self._anchors = [
            (start, position)
            for start, text, output in zip(starts, texts, outputs, strict=True)
            for position in range(len(output.prompt_token_ids), len(text) - num_drafts)
        ]
        layers = tuple(sorted(taps))
        with as_current(device):
            features = torch.cat([_features(pair, text, layers) for text in texts])
        self._outputs = dict(zip(layers, features.chunk(len(layers), dim=-1), strict=True))

    @torch.inference_mode()
    def acceptance_len(self, pair: LoadedPair, max_anchors: int) -> float:
        """Tokens a block would give, over at most so many anchors: 1 and the drafts before the first wrong one."""
        stride = max(1, -(-len(self._anchors) // max_anchors))
        chosen = self._anchors[::stride]
        if not chosen:
            return 1.0
        num_drafts = pair.limits.num_draft_tokens
        assert pair.draft is not None
        piece = max(1, MAX_LOGITS // (num_drafts * pair.draft.config.draft_vocab_size))
        parts = [chosen[begin : begin + piece] for begin in range(0, len(chosen), piece)]
        with as_current(pair.placement.device):
            cache = self._context(pair)
            found = [self._accepted(pair, cache, part) for part in parts]
        return 1 + float(torch.cat(found).float().mean())

    def _context(self, pair: LoadedPair) -> KVCache:
        """The draft's context KV of all texts as this reading makes it; most make it as the one before did."""
        assert pair.draft is not None
        config, weights = pair.draft.config, pair.draft_weights
        made_from = (config.target_layer_ids, config.rope)
        if self._last is not None and self._last[0] is weights and self._last[1] == made_from:
            return self._last[2]
        cache = KVCache(pair.draft.config, sum(self._num_pages), self._page_size, pair.placement)
        features = torch.cat([self._outputs[tap] for tap in pair.draft.config.target_layer_ids], dim=-1)
        pair.draft.write_context(features, self._positions, cache, self._slots)
        self._last = (weights, made_from, cache)
        return cache

    def _accepted(self, pair: LoadedPair, cache: KVCache, anchors: Sequence[tuple[int, int]]) -> Tensor:
        """How many drafts of each anchor's block are right, [R]."""
        draft, device = pair.draft, pair.placement.device
        assert draft is not None
        config, num_drafts = draft.config, pair.limits.num_draft_tokens
        starts, positions = torch.tensor(anchors, device=device).unbind(dim=1)
        pages = torch.arange(max(self._num_pages), device=device)
        # Pages past a text's own are never read; the clamp only keeps them inside the cache.
        table = (starts[:, None] // self._page_size + pages).clamp(max=sum(self._num_pages) - 1)
        masks = starts.new_full((len(starts), num_drafts), config.mask_token_id)
        block = torch.cat((self._token_ids[starts + positions][:, None], masks), dim=1)
        rows = positions[:, None] + torch.arange(num_drafts + 1, device=device)
        attend = PagedAttention(pair.placement.kernels, cache, table, positions, config.causal, config.windows)
        ids = draft.logits(block, rows, attend).argmax(-1)
        ids = ids if draft.target_ids is None else draft.target_ids[ids]
        counted = min(num_drafts, self._num_drafts)
        wanted = self._token_ids[(starts + positions)[:, None] + 1 + torch.arange(counted, device=device)]
        return (ids[:, :counted] == wanted).long().cumprod(dim=1).sum(dim=1)


def _features(pair: LoadedPair, text: Sequence[int], layers: tuple[int, ...]) -> Tensor:
    """Outputs of these layers over a text, side by side, by one forward of the target that uses no pages."""
    device, target = pair.placement.device, pair.target
    cache = KVCache(target.config, 1, pair.config.page_size, pair.placement)
    causal = (True,) * target.config.num_layers
    attend = PagedAttention.in_order(pair.placement.kernels, cache, 0, causal, target.config.windows)
    _, features = target(torch.tensor(text, device=device), torch.arange(len(text), device=device), attend, layers)
    assert features is not None
    return features
