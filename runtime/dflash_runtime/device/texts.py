"""Run the rows of a step through a target with its own cache, one request after another.

Each row of the state has a cache. The cache is created with the request's first chunk, and dropped when the request
ends, is preempted or begins again. A step needs to know how many tokens of the last block were committed, so it waits
for the step before it.

Axis letters: R requests, W verified rows of a block, T flat rows, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_runtime.errors import HandoffMismatch
from dflash_runtime.models.cache_state import TextState, put_state, take_state
from dflash_runtime.models.own_cache import OwnCacheTarget, TextCache
from dflash_runtime.scheduling.batch import Chunk
from dflash_runtime.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class RowText:
    """The target's cache of one request."""

    request: Request
    generation: int
    cache: TextCache = field(default_factory=TextCache)

    def is_of(self, row: int) -> bool:
        """Whether the request still holds this row."""
        return self.request.row == row and self.request.generation == self.generation


class Texts:
    """The caches of a target that keeps its own cache, one per row of the state."""

    def __init__(self, target: OwnCacheTarget) -> None:
        self._target = target
        self._rows: dict[int, RowText] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def drop_ended(self) -> None:
        """Drop the caches of requests that left their rows."""
        self._rows = {row: text for row, text in self._rows.items() if text.is_of(row)}

    def take(self, request: Request) -> TextState:
        """A copy of a request's state right after its prompt. Later steps do not change it."""
        text = next(text for text in self._rows.values() if text.request is request)
        assert not len(text.cache.tokens), "a step ran after the prompt"
        return take_state(text.cache.cache)

    def put(self, request: Request, state: TextState, first_token: Tensor, num_tokens: int) -> None:
        """Give a request's row a state that another engine took after `num_tokens` tokens.

        Raises:
            HandoffMismatch: the state is of another target.
        """
        assert request.row is not None
        template = TextCache()
        self._target.read(template, first_token, 0, (), is_final=True)
        problem = put_state(template.cache, state)
        if problem is not None:
            raise HandoffMismatch(f"the state of the target's own cache: {problem}", id="state-of-another-target")
        text = RowText(request, request.generation)
        text.cache.hold(template.cache, num_tokens)
        self._rows[request.row] = text

    def fill(self, chunks: Sequence[Chunk], token_ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Run the T rows of chunks -> hidden states [T, hidden], features [T, F]."""
        parts = token_ids.split([chunk.end - chunk.start for chunk in chunks])
        return _join([self._fill(chunk, part, taps) for chunk, part in zip(chunks, parts, strict=True)])

    def verify(
        self, rows: Sequence[int], context_lens: Sequence[int], token_ids: Tensor, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Run blocks [R, W] after `context_lens` tokens -> hidden states [R * W, hidden], features [R * W, F].

        Rows past the model's last position are zeros, and so are the rows of a done request (context length 0).
        """
        blocks = zip(rows, context_lens, token_ids, strict=True)
        return _join([self._verify(row, context_len, block, taps) for row, context_len, block in blocks])

    def _fill(self, chunk: Chunk, token_ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        row = chunk.request.row
        assert row is not None
        if chunk.start == 0:
            self._rows[row] = RowText(chunk.request, chunk.generation)
        return self._target.read(self._rows[row].cache, token_ids, chunk.start, taps, is_final=True)

    def _verify(self, row: int, context_len: int, block: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        size, head = self._target.config.hidden_size, self._target.embedding
        hidden = head.new_zeros(len(block), size)
        features = head.new_zeros(len(block), size * len(taps)) if taps else None
        if context_len:
            block = block[: self._target.config.max_position_embeddings - context_len]
            text = self._rows[row].cache
            hidden[: len(block)], tapped = self._target.read(text, block, context_len, taps, is_final=False)
            if features is not None and tapped is not None:
                features[: len(block)] = tapped
        return hidden, features


def _join(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    tapped = [features for _, features in parts if features is not None]
    return torch.cat([hidden for hidden, _ in parts]), torch.cat(tapped) if tapped else None
