"""Targets with their own cache: transformers' modelling code and cache, several texts in one cache.

A cache holds only committed tokens. A block, in which the target may reject tokens, runs on a copy of the cache, after
the accepted tokens that the cache lacks. So a rejected token never reaches a state, and most steps are one forward.
Rows with fewer such tokens are padded on the right: no earlier token depends on the padding, and the copy is dropped.
A row in a cache of longer texts is padded on the left, and masked there.

Families differ in the forwards that they allow. `own_cache_trial.py` finds that out after loading.

Axis letters: B texts of one cache, T tokens, W rows of a block, F feature width.
"""

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dflash_runtime.models.hosting.cache_rows import (
    CacheLayout,
    CacheRow,
    append_blocks,
    copy_cache,
    gather_rows,
    take_columns,
)
from dflash_runtime.models.hosting.hosted import NOT_TRIED, TransformersTarget
from dflash_runtime.models.hosting.hosted_swaps import Swaps
from dflash_runtime.models.hosting.small_chunks import Chunked, small_chunks
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.placement import Placement
from dflash_runtime.notices import Notice
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""Names of the cache in decoders' arguments and outputs."""

SCORE_BYTES = 256 * 2**20
"""Most bytes of one layer's attention scores, which transformers writes twice: heads times rows times text."""

LEAST_ROWS = 64
"""Rows of one forward whatever the scores take, so that a block is never split."""

MOST_PENDING = 32
"""Accepted tokens that are read again before each block. More tokens than this go into the cache."""

GRAIN = 8
"""Tokens are put into a cache in multiples of 8 where possible. Forwards that are CUDA graphs have few sizes."""

LEAST_PADDING = 256
PADDED_SHARE = 0.25
"""Texts share a cache if each gets at most 256 tokens of padding, or a quarter of its length if that is more."""


@dataclass(slots=True, eq=False)
class TextCache:
    """A target's cache of B texts.

    cache     holds the first `lens` tokens of each text; None before the first token
    tokens    [B, T] tokens that ran after the cache; tokens before the next block's start are accepted
    pending   how many of `tokens` were accepted before the last block
    later     caches that also hold the first tokens of `tokens`, with the number of these tokens
    """

    cache: Any = None
    lens: Sequence[int] = (0,)
    tokens: Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.int64))
    pending: Sequence[int] = (0,)
    later: Sequence[tuple[int, Any]] = ()


class Member(NamedTuple):
    """A text in a cache: its row there, and its number of tokens. Later tokens in the cache are rejected."""

    cache: TextCache
    row: int = 0
    length: int = 0


NeedsNext = Callable[[Tensor, int], bool]
"""Hidden states [B, hidden] of a block's column, and the column -> whether the next column must run."""


class Replays(Protocol):
    """Forwards after a cache that were captured; see `device/graphs/cache_graphs.py`."""

    def run(
        self,
        token_ids: Tensor,
        lens: Sequence[int],
        taps: Sequence[int],
        cache: Any,
        *,
        makes_cache: bool,
        goes_on: bool,
    ) -> tuple[Tensor, Tensor | None, Any] | None:
        """See `CacheGraphs.run`."""


class OwnCacheTarget(TransformersTarget):
    """A decoder of transformers as a target that keeps caches of texts.

    reads_at_once   whether several tokens after a cache may run in one forward
    can_crop        whether the cache can drop its last tokens
    makes_masks     whether the whole attention mask is given, because transformers would make a wrong one
    masks_padding   whether the whole attention mask may be given for a cache with padding
    chunks          the code that reads blocks in smaller chunks
    batching        the texts that may share a cache
    layout          how the tokens of a text lie in a cache
    ends_early      whether blocks that are read token by token may end early
    swaps           the modules that our kernels compute
    uncaptured      the reason why its forwards cannot be captured as CUDA graphs, or None
    graphs          the captured forwards of one engine
    """

    def __init__(self, config: TargetConfig, model: "PreTrainedModel", placement: Placement) -> None:
        super().__init__(config, model, _find_decoder(model), placement)
        self.reads_at_once = False
        self.can_crop = False
        self.makes_masks = self.masks_padding = False
        self.chunks: Sequence[Chunked] = ()
        self.batching = Batching()
        self.layout = CacheLayout()
        self.ends_early = True
        self.swaps = Swaps()
        self.uncaptured: Notice | None = NOT_TRIED
        self.graphs: Replays | None = None
        known = inspect.signature(self.decoder.forward).parameters
        self._has_positions = "position_ids" in known
        self._cache_name = next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[0])

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.target.Target`. The rows are a text from its beginning, and no cache of it is kept."""
        hidden, features, _ = self._forward(token_ids[None], (0,), taps, use_cache=False)
        return hidden[0] if wanted is None else hidden[0][wanted], None if features is None else features[0]

    def fill(self, text: TextCache, token_ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Run tokens [B, T] of texts that are never rejected -> hidden states [B, T, hidden], features [B, T, F]."""
        assert not max(text.pending), "a block ran after the prompt"
        lens = text.lens if text.cache is not None else (0,) * len(token_ids)
        hidden, features, later = self._run(text.cache, token_ids, lens, taps)
        text.cache, text.lens = later[-1][1], [count + token_ids.shape[1] for count in lens]
        text.tokens, text.pending, text.later = token_ids[:, :0], (0,) * len(token_ids), ()
        return hidden, features

    def verify(
        self, text: TextCache, blocks: Tensor, taps: Sequence[int], needs_next: NeedsNext | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run blocks [B, W] after texts -> hidden states [B, W, hidden] and features [B, W, F].

        The next call of `join` says how many of the tokens were accepted. A target that reads token by token may return
        fewer columns: it asks `needs_next` after each.
        """
        first, is_even = max(text.pending), len(set(text.pending)) == 1
        if is_even:
            text.tokens = torch.cat((text.tokens[:, :first], blocks), dim=1)
        else:
            text.tokens, wanted = append_blocks(text.tokens, text.pending, blocks)
        hidden, features, later = self._run(
            text.cache, text.tokens, text.lens, taps, is_block=True, ask=None if first else needs_next
        )
        text.later = later if is_even and later[-1][1] is not None else ()
        if is_even:
            return hidden[:, first:], None if features is None else features[:, first:]
        return take_columns(hidden, wanted), None if features is None else take_columns(features, wanted)

    def join(self, members: Sequence[Member]) -> TextCache:
        """Reject the tokens after each member's length -> one cache with the members as rows.

        The members' former caches must not be used any more.
        """
        for text in {id(member.cache): member.cache for member in members}.values():
            self._drop_partial(text, members)
        sources = [self._source(member) for member in members]
        joined = _joined(sources, self.layout)
        return self._settle(joined)

    def with_graphs(self, graphs: Replays | None) -> "OwnCacheTarget":
        """The target with the captured forwards of one engine. Both targets have the same weights."""
        target = copy(self)
        target.graphs = graphs
        return target

    def length_of(self, member: Member) -> int:
        """The tokens of a member that its cache will hold after `join`."""
        return member.length if self.can_crop or not self.reads_at_once else member.cache.lens[member.row]

    def _drop_partial(self, text: TextCache, members: Sequence[Member]) -> None:
        """Drop the cache that holds a block, unless the whole block was accepted in every row.

        Otherwise the rows of a step would come from two caches, and be copied. Caches that can be cropped, or that were
        kept after every token, are copied in any case.
        """
        if text.later and self.reads_at_once and not self.can_crop:
            kept = [member.length - text.lens[member.row] for member in members if member.cache is text]
            if any(count != text.tokens.shape[1] for count in kept):
                text.later = ()

    def _source(self, member: Member) -> "_Source":
        """Find the cache that holds the most of a member's accepted tokens and, unless it can be cropped, no others."""
        text, row = member.cache, member.row
        num_kept = member.length - text.lens[row]
        assert num_kept >= 0, "the length is before the end of the cache"
        assert num_kept <= text.tokens.shape[1], "the length is after the last token"
        if self.can_crop and text.later:
            count, cache = text.later[-1]
            kept = CacheRow(cache, row, len(text.lens), member.length, count - num_kept)
            return _Source(kept, text.tokens, count, 0)
        caches = [(0, text.cache), *((count, cache) for count, cache in text.later if count <= num_kept)]
        count, cache = caches[-1]
        kept = CacheRow(cache, row, len(text.lens), text.lens[row] + count)
        return _Source(kept, text.tokens, count, num_kept - count)

    def _settle(self, text: TextCache) -> TextCache:
        """Put accepted tokens into the cache if a row has more than MOST_PENDING of them.

        Every such row gets the same number of tokens, because a padded row would put padding into its state.
        """
        while max(text.pending) > MOST_PENDING:
            many = [row for row, count in enumerate(text.pending) if 2 * count > MOST_PENDING]
            count = min(text.pending[row] for row in many)
            if len(many) == len(text.lens):
                self._hold(text, count)
                continue
            members = [_Source.of(text, row) for row in range(len(text.lens))]
            part = _joined([members[row] for row in many], self.layout)
            self._hold(part, count)
            for index, row in enumerate(many):
                members[row] = _Source.of(part, index)
            text = _joined(members, self.layout)
        return text

    def _hold(self, text: TextCache, count: int) -> None:
        """Put the first `count` pending tokens of every row into the cache, or a few tokens less."""
        count = count - count % GRAIN or count
        later = self._run(text.cache, text.tokens[:, :count], text.lens, ())[2]
        text.cache, text.lens = later[-1][1], [length + count for length in text.lens]
        text.tokens, text.pending = text.tokens[:, count:], [pending - count for pending in text.pending]

    def _run(
        self, cache: Any, token_ids: Tensor, lens: Sequence[int], taps: Sequence[int], *, is_block: bool = False,
        ask: NeedsNext | None = None,
    ) -> tuple[Tensor, Tensor | None, list[tuple[int, Any]]]:  # fmt: skip
        """Run tokens [B, T] after a cache in as few forwards as possible.

        Returns hidden states [B, T, hidden], features [B, T, F], and the new cache with the number of tokens that it
        holds more. With `is_block` the given cache stays as it is. Then a target that reads token by token returns the
        caches after every token, and ends where `ask` says so. The only cache of another target may be None.
        """
        num_rows, num_tokens = token_ids.shape
        if self.reads_at_once:
            size = max(1, rows_at_once(self.config, max(lens) + num_tokens) // num_rows)
        else:
            size = num_tokens if cache is None else 1
        rows, tapped = [], []
        later: list[tuple[int, Any]] = []
        keeps, is_replayed = is_block and not self.reads_at_once, False
        for begin in range(0, num_tokens, size):
            piece, piece_lens = token_ids[:, begin : begin + size], [length + begin for length in lens]
            makes_cache = not is_block or keeps or self.can_crop or begin + size < num_tokens
            ran = None
            if self.graphs is not None and cache is not None:
                ran = self.graphs.run(piece, piece_lens, taps, cache, makes_cache=makes_cache, goes_on=is_replayed)
            is_replayed = ran is not None
            if ran is None:
                if is_block and (keeps or not later):
                    cache = copy_cache(cache, self.layout)
                ran = self._forward(piece, piece_lens, taps, cache=cache)
            hidden, features, cache = ran
            later.append((begin + piece.shape[1], cache))
            if is_replayed and size < num_tokens:  # the next replay overwrites the results of this one
                hidden, features = hidden.clone(), None if features is None else features.clone()
            rows.append(hidden)
            tapped.append(features)
            if keeps and ask is not None and begin + 1 < num_tokens and not ask(hidden[:, 0], begin):
                break
        found = torch.cat([item for item in tapped if item is not None], dim=1) if taps else None
        return torch.cat(rows, dim=1), found, later if keeps else later[-1:]

    def _forward(
        self, token_ids: Tensor, lens: Sequence[int], taps: Sequence[int], *, cache: Any = None, use_cache: bool = True
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Run one forward of the decoder on tokens [B, T] -> hidden states, features and the new cache."""
        longest, missing = max(lens), None
        if min(lens) < longest:
            missing = torch.tensor([longest - length for length in lens]).to(self.entry)[:, None]
        masks = self.makes_masks and cache is not None
        return self._forward_after(token_ids, longest, missing, taps, cache, makes_masks=masks, use_cache=use_cache)

    def forward_in_room(
        self, token_ids: Tensor, lens: Tensor, taps: Sequence[int], cache: Any, room: int
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Run one forward on tokens [B, T] after a cache that is padded on the left to `room` tokens.

        The lengths of texts [B] are on the device, so that a CUDA graph may contain the forward.
        """
        missing = (room - lens)[:, None]
        return self._forward_after(token_ids, room, missing, taps, cache, makes_masks=self.masks_padding)

    def _forward_after(
        self, token_ids: Tensor, longest: int, missing: Tensor | None, taps: Sequence[int], cache: Any, *,
        makes_masks: bool, use_cache: bool = True,
    ) -> tuple[Tensor, Tensor | None, Any]:  # fmt: skip
        """Run one forward on tokens [B, T] after `longest` tokens of a cache; `missing` [B, 1] of them are padding."""
        given: dict[str, Any] = {self._cache_name: cache} if cache is not None else {}
        shape = token_ids.shape
        columns = torch.arange(longest, longest + shape[1], device=self.entry)[None]
        if self._has_positions:
            positions = columns.expand(shape) if missing is None else columns - missing
            given["position_ids"] = positions.clamp(max=self.config.max_position_embeddings - 1)
        if makes_masks:
            given["attention_mask"] = self._mask(columns, longest + shape[1], missing)
        elif missing is not None and self.layout.grown:
            given["attention_mask"] = (torch.arange(longest + shape[1], device=self.entry) >= missing).long()
        with small_chunks(self.chunks if cache is not None and shape[1] <= LEAST_ROWS else ()):
            hidden, features, output = self._run_decoder(token_ids, taps, use_cache=use_cache, **given)
        return hidden, features, getattr(output, self._cache_name, None)

    def _mask(self, columns: Tensor, num_keys: int, missing: Tensor | None) -> Tensor:
        """Return the summands of scores [B, 1, T, num_keys] of tokens in columns [1, T].

        `missing` [B, 1] is the number of columns with padding.
        """
        keys = torch.arange(num_keys, device=self.entry)
        is_seen = keys <= columns[..., None]
        if missing is not None:
            is_seen = is_seen & (keys >= missing[..., None])
        dtype = self.embedding.dtype
        return torch.where(is_seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


class Batching(NamedTuple):
    """The texts that may share a cache: texts of the same length, or of any length with padding.

    `problem` says why texts do not.
    """

    same_length: bool = False
    any_length: bool = False
    problem: str | None = None


class _Source(NamedTuple):
    """A row of a cache, and its accepted tokens that are not in the cache: `num_pending` tokens from column `begin`."""

    kept: CacheRow
    tokens: Tensor
    begin: int
    num_pending: int

    @classmethod
    def of(cls, text: TextCache, row: int) -> "_Source":
        return cls(CacheRow(text.cache, row, len(text.lens), text.lens[row]), text.tokens, 0, text.pending[row])


def _joined(sources: Sequence[_Source], layout: CacheLayout) -> TextCache:
    """Return a cache with the sources as rows."""
    pending = [source.num_pending for source in sources]
    first, most, rows = sources[0], max(pending), [source.kept.row for source in sources]
    if all(source.tokens is first.tokens and source.begin == first.begin for source in sources):
        tokens = first.tokens if rows == list(range(len(first.tokens))) else first.tokens[rows]
        tokens = tokens[:, first.begin : first.begin + most]
    else:
        parts = [item.tokens[item.kept.row, item.begin : item.begin + item.num_pending] for item in sources]
        tokens = torch.stack([pad(part, (0, most - len(part))) for part in parts])
    kept = [source.kept for source in sources]
    return TextCache(gather_rows(kept, layout), [row.length for row in kept], tokens, pending)


def score_bytes(config: TargetConfig, num_rows: int) -> int:
    """Return the most bytes of one layer's attention scores with prompt chunks of `num_rows` rows."""
    return max(SCORE_BYTES, _score_bytes(config, num_rows) * num_rows)


def _score_bytes(config: TargetConfig, num_tokens: int) -> int:
    """Return the bytes of one row's attention scores in a text of `num_tokens`, in float32 and in a second copy."""
    return 2 * torch.float32.itemsize * config.num_heads * num_tokens


def rows_at_once(config: TargetConfig, num_tokens: int) -> int:
    """Return the rows of one forward in texts of `num_tokens`."""
    return max(LEAST_ROWS, SCORE_BYTES // _score_bytes(config, num_tokens))


def most_padding(num_tokens: int) -> int:
    """Return the most padding of a text of `num_tokens` in a cache of longer texts."""
    return max(LEAST_PADDING, int(PADDED_SHARE * num_tokens))


def _find_decoder(model: "PreTrainedModel") -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    return decoder if decoder is not model else model.model
