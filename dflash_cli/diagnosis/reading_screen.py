"""A quick estimate of how a draft accepts under a reading, without generating: blocks drafted along a known text.

The target's hidden states of the texts are computed once. Each reading then drafts from anchors spread over all texts,
and what it would have had accepted there is counted. That costs one forward of the draft for many anchors, so every
reading can be tried on all prompts before the best are run.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dflash_runtime.device.kv import KVCache
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.device.text_pages import Anchor, TextPages, read_features
from dflash_runtime.models.weights import Weights
from dflash_runtime.scheduling.request import RequestOutput


class ReadingScreen:
    """Prompts with the target's greedy continuations, ready to be drafted along.

    `num_drafts` is the K that the draft's own config states; of a longer block no more drafts count, or longer would
    always be better.
    """

    def __init__(
        self, pair: LoadedPair, outputs: Sequence[RequestOutput], taps: Collection[int], num_drafts: int
    ) -> None:
        self._num_drafts = num_drafts
        self._last: tuple[Weights | None, tuple[object, ...], KVCache] | None = None
        page_size = pair.config.page_size
        texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        self._texts = TextPages(texts, page_size, pair.placement)
        self._anchors = [
            (index, position)
            for index, (text, output) in enumerate(zip(texts, outputs, strict=True))
            for position in range(len(output.prompt_token_ids), len(text) - num_drafts)
        ]
        layers = tuple(sorted(taps))
        features = torch.cat([read_features(pair.target, pair.placement, page_size, text, layers) for text in texts])
        self._outputs = dict(zip(layers, features.chunk(len(layers), dim=-1), strict=True))

    def acceptance_len(self, pair: LoadedPair, max_anchors: int) -> float:
        """Tokens a block would give, over at most so many anchors: 1 and the drafts before the first wrong one."""
        stride = max(1, -(-len(self._anchors) // max_anchors))
        chosen = self._anchors[::stride]
        if not chosen:
            return 1.0
        return 1 + float(self._accepted(pair, chosen).float().mean())

    def _accepted(self, pair: LoadedPair, anchors: Sequence[Anchor]) -> Tensor:
        """How many drafts of each anchor's block are right, [R]."""
        assert pair.draft is not None
        proposed = self._texts.propose(pair.draft, self._context(pair), anchors, pair.limits.num_draft_tokens)
        return self._texts.count_right(anchors, proposed[:, : self._num_drafts])

    def _context(self, pair: LoadedPair) -> KVCache:
        """The draft's context KV of all texts as this reading makes it; most make it as the one before did."""
        assert pair.draft is not None
        config, weights = pair.draft.config, pair.draft_weights
        made_from = (config.target_layer_ids, config.rope)
        if self._last is not None and self._last[0] is weights and self._last[1] == made_from:
            return self._last[2]
        features = torch.cat([self._outputs[tap] for tap in config.target_layer_ids], dim=-1)
        cache = self._texts.write_context(pair.draft, features)
        self._last = (weights, made_from, cache)
        return cache
