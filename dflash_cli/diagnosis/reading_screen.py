"""A quick estimate of acceptance under a reading: the draft proposes blocks along known texts.

The target's hidden states of the texts are computed once. Each reading drafts from anchors spread over all texts, and
the right tokens are counted. One forward of the draft covers many anchors, so every reading can be tried on all prompts
before the best readings are run.
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
    """Texts to draft along: prompts with the target's greedy continuations.

    `num_drafts` is the K of the draft's own config. In a longer block only the first K tokens count. Otherwise a longer
    block would always be better.
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
        """Mean tokens per block over at most `max_anchors` anchors: 1 + drafted tokens before the first wrong token."""
        stride = max(1, -(-len(self._anchors) // max_anchors))
        chosen = self._anchors[::stride]
        if not chosen:
            return 1.0
        return 1 + float(self._accepted(pair, chosen).float().mean())

    def _accepted(self, pair: LoadedPair, anchors: Sequence[Anchor]) -> Tensor:
        """Number of tokens before the first wrong token, of each anchor's block, [R]."""
        assert pair.draft is not None
        proposed = self._texts.propose(pair.draft, self._context(pair), anchors, pair.limits.num_draft_tokens)
        return self._texts.count_right(anchors, proposed[:, : self._num_drafts])

    def _context(self, pair: LoadedPair) -> KVCache:
        """The draft's context KV of all texts under this reading, reused from the last reading if it is the same."""
        assert pair.draft is not None
        config, weights = pair.draft.config, pair.draft_weights
        made_from = (config.target_layer_ids, config.rope)
        if self._last is not None and self._last[0] is weights and self._last[1] == made_from:
            return self._last[2]
        features = torch.cat([self._outputs[tap] for tap in config.target_layer_ids], dim=-1)
        cache = self._texts.write_context(pair.draft, features)
        self._last = (weights, made_from, cache)
        return cache
