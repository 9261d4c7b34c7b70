"""Run the rows of a step through a target with its own cache, several requests in one forward where the target allows.

Each row of the state has a text in a cache, which texts may share. The text begins with the request's first chunk, and
is dropped when the request ends, is preempted or begins again. A step needs to know how many tokens of the last block
were committed, so it waits for the step before it.

Axis letters: R requests, W verified rows of a block, T flat rows, F features.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from dflash_runtime.device.early_end import EarlyEnd
from dflash_runtime.device.graphs.cache_graphs import CacheGraphs
from dflash_runtime.device.storage.state import row_of
from dflash_runtime.errors import HandoffMismatch
from dflash_runtime.models.hosting.cache_state import TextState, put_state, take_state
from dflash_runtime.models.hosting.own_cache import (
    MOST_PENDING,
    Member,
    OwnCacheTarget,
    TextCache,
    most_padding,
    rows_at_once,
)
from dflash_runtime.scheduling.batch import Chunk
from dflash_runtime.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class RowText:
    """The text of one request: its cache, and its row there."""

    request: Request
    generation: int
    cache: TextCache = field(default_factory=TextCache)
    row: int = 0

    def is_of(self, row: int) -> bool:
        """Whether the request still holds this row of the state."""
        return self.request.row == row and self.request.generation == self.generation

    def member(self, length: int) -> Member:
        """The text with this number of tokens."""
        return Member(self.cache, self.row, length)


class Texts:
    """The texts of a target that keeps its own caches, one per row of the state."""

    def __init__(self, target: OwnCacheTarget, graphs: CacheGraphs | None = None) -> None:
        self.graphs = graphs
        self._target = target if graphs is None else target.with_graphs(graphs)
        self._rows: dict[int, RowText] = {}

    @property
    def ends_early(self) -> bool:
        """Whether blocks may end early: the target reads them token by token."""
        return self._target.ends_early and not self._target.reads_at_once

    def drop_graphs(self) -> None:
        """Free the captured forwards. Later forwards run uncaptured."""
        self.graphs = None
        self._target = self._target.with_graphs(None)

    def __len__(self) -> int:
        return len(self._rows)

    def drop_ended(self) -> None:
        """Drop the texts of requests that left their rows."""
        self._rows = {row: text for row, text in self._rows.items() if text.is_of(row)}

    def take(self, request: Request) -> TextState:
        """A copy of a request's state right after its prompt. Later steps do not change it."""
        text = next(text for text in self._rows.values() if text.request is request)
        assert not text.cache.later, "a step ran after the prompt"
        alone = self._target.join([text.member(text.cache.lens[text.row])])
        return take_state(alone.cache)

    def put(self, request: Request, state: TextState, first_token: Tensor, num_tokens: int) -> None:
        """Give a request's row a state that another engine took after `num_tokens` tokens.

        Raises:
            HandoffMismatch: the state is of another target.
        """
        text = TextCache()
        self._target.fill(text, first_token[None], ())
        problem = put_state(text.cache, state)
        if problem is not None:
            raise HandoffMismatch(f"the state of the target's own cache: {problem}", id="state-of-another-target")
        text.lens = (num_tokens,)
        self._rows[row_of(request)] = RowText(request, request.generation, text)

    def fill(self, chunks: Sequence[Chunk], token_ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Run the T rows of chunks -> hidden states [T, hidden], features [T, F]."""
        parts = token_ids.split([chunk.end - chunk.start for chunk in chunks])
        runs = []
        for _, run in groupby(enumerate(chunks), key=self._prompt_key):
            indices, some = zip(*run, strict=True)
            hidden, features = self._fill(some, torch.stack([parts[index] for index in indices]), taps)
            runs.append((hidden.flatten(0, 1), None if features is None else features.flatten(0, 1)))
        return _join(runs)

    def _prompt_key(self, item: tuple[int, Chunk]) -> tuple[int, ...]:
        """Equal for neighbouring chunks that may run in one forward: the first chunks of prompts, of one length."""
        index, chunk = item
        is_shared = chunk.start == 0 and self._target.batching.same_length
        return (chunk.end,) if is_shared else (chunk.end, index)

    def _fill(self, chunks: Sequence[Chunk], token_ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Run chunks [B, T] that begin at the same token."""
        first = chunks[0]
        cache = TextCache() if first.start == 0 else self._alone(row_of(first.request), first.start)
        found = self._target.fill(cache, token_ids, taps)
        for index, chunk in enumerate(chunks):
            self._rows[row_of(chunk.request)] = RowText(chunk.request, chunk.generation, cache, index)
        return found

    def _alone(self, row: int, length: int) -> TextCache:
        """The text of a row of the state in a cache of its own."""
        return self._target.join([self._rows[row].member(length)])

    def verify(
        self,
        rows: Sequence[int],
        context_lens: Sequence[int],
        token_ids: Tensor,
        taps: Sequence[int],
        end: EarlyEnd | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run blocks [R, W] after `context_lens` tokens -> hidden states [R * W, hidden], features [R * W, F].

        The rows of a done request (context length 0), and rows behind an early end, are zeros.
        """
        head = self._target.embedding
        hidden = head.new_zeros(*token_ids.shape, head.shape[1])
        features = head.new_zeros(*token_ids.shape, head.shape[1] * len(taps)) if taps else None
        running = [index for index, length in enumerate(context_lens) if length]
        members = {index: self._rows[rows[index]].member(context_lens[index]) for index in running}
        for some in self._groups(members, token_ids.shape[1]):
            some = _by_cache(some, members)
            joined = self._target.join([members[index] for index in some])
            is_all = some == list(range(len(rows)))
            needs_next = end.needs_next if is_all and end is not None else None
            found, tapped = self._target.verify(joined, token_ids if is_all else token_ids[some], taps, needs_next)
            for row, index in enumerate(some):
                self._rows[rows[index]] = replace(self._rows[rows[index]], cache=joined, row=row)
            width = found.shape[1]
            if is_all and width == token_ids.shape[1]:
                hidden, features = found, tapped
                continue
            hidden[some, :width] = found
            if features is not None and tapped is not None:
                features[some, :width] = tapped
        return hidden.flatten(0, 1), None if features is None else features.flatten(0, 1)

    def _groups(self, members: dict[int, Member], width: int) -> Iterator[list[int]]:
        """Cut the members of a step into the groups that share a cache, the shortest texts first."""
        target = self._target
        lens = {index: target.length_of(member) for index, member in members.items()}
        group: list[int] = []
        for index in sorted(members, key=lambda index: (lens[index], index)):
            if group and not self._fits(lens[group[0]], lens[index], len(group) + 1, width):
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    def _fits(self, shortest: int, longest: int, count: int, width: int) -> bool:
        """Whether `count` texts of these lengths may share a cache."""
        batching, padding = self._target.batching, longest - shortest
        num_tokens = MOST_PENDING + width
        if count * num_tokens > rows_at_once(self._target.config, longest + num_tokens):
            return False
        if self._target.layout.grown and padding:
            return batching.any_length and padding <= most_padding(shortest)
        return batching.same_length


def _by_cache(indices: Sequence[int], members: Mapping[int, Member]) -> list[int]:
    """Sort members by their row in their cache, and caches by their first member. So whole caches keep their order."""
    first: dict[int, int] = {}
    for index in sorted(indices):
        first.setdefault(id(members[index].cache), index)
    return sorted(indices, key=lambda index: (first[id(members[index].cache)], members[index].row))


def _join(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    tapped = [features for _, features in parts if features is not None]
    return torch.cat([hidden for hidden, _ in parts]), torch.cat(tapped) if tapped else None
