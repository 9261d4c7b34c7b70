"""Draft blocks along given texts: many blocks of many texts in one forward of the draft.

The context KV of the texts is written once. A block attends only to the rows before its anchor, so that it equals the
block that a run would draft there.

Axis letters: R anchors, N block rows, K drafted tokens, P pages, T rows of all texts, F features.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_kernels.drafts.draft_tree import ranks_of_text
from dflash_kernels.kv.kv_format import KVScales
from dflash_kernels.launch_config import MAX_GRID
from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.device.storage.recurrent import recall_alone
from dflash_runtime.device.trees import TreeShape
from dflash_runtime.drafts.draft import Draft, WalkingDraft, draft_places, to_target
from dflash_runtime.models.placement import Placement, as_current
from dflash_runtime.models.target import Target

MAX_LOGITS = 1 << 26
"""The most logits computed at a time."""

MAX_GATHERED = 1 << 22
"""The most numbers of keys that reference kernels copy out of pages at a time."""

MOST_LOSS = 12.0
"""Nats. A loss is cut here, so that a few surely wrong tokens do not decide a mean."""

Anchor = tuple[int, int]
"""The number of a text, and the position of a block's first row in it."""

BlockInputs = tuple[Tensor, Tensor, PagedAttention]
"""Ids [R, N] and positions [R, N] of blocks, and their attention."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """Drafted blocks along texts: proposed ids, their probabilities, and the losses of the text's tokens, [R, K]."""

    ids: Tensor
    chances: Tensor
    losses: Tensor


class TextPages:
    """Texts in pages, one after another. `num_rows` is the number of rows with features per text, by default all."""

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        page_size: int,
        placement: Placement,
        num_rows: Sequence[int] | None = None,
    ) -> None:
        self._placement, self._page_size = placement, page_size
        device = placement.device
        num_pages = [-(-len(text) // page_size) for text in texts]
        self._num_pages = sum(num_pages)
        firsts = [page_size * sum(num_pages[:index]) for index in range(len(texts))]
        self._starts = torch.tensor(firsts, device=device)
        filled = torch.cat([first + torch.arange(len(text)) for first, text in zip(firsts, texts, strict=True)])
        self._token_ids = torch.zeros(page_size * self._num_pages, dtype=torch.int64, device=device)
        self._token_ids[filled.to(device)] = torch.tensor([token for text in texts for token in text], device=device)
        counts = [len(text) for text in texts] if num_rows is None else num_rows
        self._positions = torch.cat([torch.arange(count) for count in counts]).to(device)
        self._slots = self._positions + self._starts.repeat_interleave(torch.tensor(counts, device=device))

    @torch.inference_mode()
    def write_context(self, draft: Draft, features: Tensor) -> KVCache:
        """The draft's context KV of all texts, from features [T, F] of their rows."""
        cache = KVCache(draft.config, self._num_pages, self._page_size, self._placement)
        with as_current(self._placement.device):
            draft.write_context(features, self._positions, cache, self._slots)
        return cache

    @torch.inference_mode()
    def propose(
        self, draft: Draft, cache: KVCache, anchors: Sequence[Anchor], num_drafts: int
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens that a greedy draft proposes at each anchor, as ids of the target [R, K], and its confidences."""
        with as_current(self._placement.device):
            found = [
                self._propose(draft, self._inputs(draft, cache, piece, num_drafts), num_drafts)
                for piece in self._pieces(draft, anchors, num_drafts)
            ]
        confidences = [own for _, own in found if own is not None]
        return torch.cat([ids for ids, _ in found]), torch.cat(confidences) if confidences else None

    def _propose(self, draft: Draft, inputs: BlockInputs, num_drafts: int) -> tuple[Tensor, Tensor | None]:
        if not isinstance(draft, WalkingDraft):
            return self._ids(draft, draft.logits(*inputs)), None
        drawn = draft.propose(*inputs, num_drafts, None)
        return to_target(draft, drawn.token_ids), drawn.confidences

    @torch.inference_mode()
    def foretell(self, draft: Draft, cache: KVCache, anchors: Sequence[Anchor], num_drafts: int) -> "Foretold":
        """The draft's blocks at each anchor, and its probabilities. The text must go on for the whole block."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        with as_current(self._placement.device):
            for logits, chances, losses in self._judged(draft, cache, anchors, num_drafts):
                found.append((self._ids(draft, logits), chances.amax(dim=-1).exp(), losses))
        return Foretold(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def losses(self, draft: Draft, features: Tensor, anchors: Sequence[Anchor], num_drafts: int) -> Tensor:
        """The losses of `foretell`, [R, K], with gradients for the draft's weights. The draft has reference kernels."""
        pages = copy(self)
        # FP8 has no gradients.
        pages._placement = replace(self._placement, kernels=REFERENCE, kv_dtype=None)
        with as_current(self._placement.device):
            cache = KVCache(draft.config, self._num_pages, self._page_size, pages._placement)
            cache.keys, cache.values = torch.zeros_like(cache.keys), torch.zeros_like(cache.values)
            draft.write_context(features, self._positions, cache, self._slots)
            both = zip(cache.keys, cache.values, strict=True)
            cache.layers = dict(zip(draft.config.kv_layers, both, strict=True))
            return torch.cat([losses for _, _, losses in pages._judged(draft, cache, anchors, num_drafts)])

    def _judged(
        self, draft: Draft, cache: KVCache, anchors: Sequence[Anchor], num_drafts: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Logits and log-probabilities of blocks, [R, K, V'], and the losses of the text's tokens, [R, K]."""
        rows = draft_places(draft, draft.config.vocab_size)
        texts = self._after(anchors, num_drafts).split(self._piece(draft, max(at for _, at in anchors), num_drafts))
        for text, logits in zip(texts, self._blocks(draft, cache, anchors, num_drafts), strict=True):
            chances = logits.float().log_softmax(dim=-1)
            wanted = text if rows is None else rows[text]
            losses = -chances.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
            losses = losses.nan_to_num(MOST_LOSS, MOST_LOSS, MOST_LOSS).clamp(max=MOST_LOSS)
            yield logits, chances, losses.masked_fill(wanted < 0, MOST_LOSS)

    @torch.inference_mode()
    def rank_in_trees(
        self, draft: Draft, cache: KVCache, anchors: Sequence[Anchor], num_drafts: int, shape: TreeShape
    ) -> Tensor:
        """The node that each token after an anchor has in the draft's tree, [R, K]; see `ranks_of_text`."""
        with as_current(self._placement.device):
            found = []
            for piece in self._pieces(draft, anchors, num_drafts):
                inputs = self._inputs(draft, cache, piece, num_drafts)
                tree = shape.draft(self._placement.kernels, draft, *inputs, num_drafts)
                found.append(ranks_of_text(tree, self._after(piece, num_drafts)))
        return torch.cat(found)

    def count_right(self, anchors: Sequence[Anchor], proposed: Tensor) -> Tensor:
        """How many proposed tokens [R, K] equal the text after the anchor, up to the first difference: [R]."""
        return (proposed == self._after(anchors, proposed.shape[1])).long().cumprod(dim=1).sum(dim=1)

    def _after(self, anchors: Sequence[Anchor], count: int) -> Tensor:
        """The tokens of the text after each anchor, [R, count]; after the last page, of any text."""
        first, positions = self._locate(anchors)
        after = 1 + torch.arange(count, device=first.device)
        return self._token_ids[((first + positions)[:, None] + after).clamp(max=len(self._token_ids) - 1)]

    def _ids(self, draft: Draft, logits: Tensor) -> Tensor:
        return to_target(draft, self._placement.kernels.argmax(logits.flatten(0, 1)).view(logits.shape[:2]))

    def _blocks(self, draft: Draft, cache: KVCache, anchors: Sequence[Anchor], num_drafts: int) -> Iterator[Tensor]:
        """Logits [R, K, V] of the anchors' blocks, as many at a time as memory allows.

        A draft that walks chooses each token after the tokens of the text.
        """
        for piece in self._pieces(draft, anchors, num_drafts):
            inputs = self._inputs(draft, cache, piece, num_drafts)
            if isinstance(draft, WalkingDraft):
                yield draft.logits_along(*inputs, self._after(piece, num_drafts))
            else:
                yield draft.logits(*inputs)

    def _pieces(self, draft: Draft, anchors: Sequence[Anchor], num_drafts: int) -> Iterator[Sequence[Anchor]]:
        """The anchors, as many at a time as memory allows."""
        piece = self._piece(draft, max((position for _, position in anchors), default=0), num_drafts)
        for begin in range(0, len(anchors), piece):
            yield anchors[begin : begin + piece]

    def _inputs(self, draft: Draft, cache: KVCache, anchors: Sequence[Anchor], num_drafts: int) -> BlockInputs:
        """Ids and positions of the anchors' blocks, and their attention to the texts before."""
        config, kernels = draft.config, self._placement.kernels
        first, positions = self._locate(anchors)
        longest = max(position for _, position in anchors)
        pages = torch.arange(max(1, -(-longest // self._page_size)), device=first.device)
        # Pages after a text's last page are never read. The clamp only keeps their numbers valid.
        table = (first[:, None] // self._page_size + pages).clamp(max=self._num_pages - 1)
        masks = first.new_full((len(first), num_drafts), config.mask_token_id)
        block = torch.cat((self._token_ids[first + positions][:, None], masks), dim=1)
        rows = positions[:, None] + torch.arange(num_drafts + 1, device=first.device)
        return block, rows, PagedAttention(kernels, cache, table, positions, config.causal, config.windows)

    def _locate(self, anchors: Sequence[Anchor]) -> tuple[Tensor, Tensor]:
        """The first slot of each anchor's text, and the anchor's position in the text, [R] each."""
        texts, positions = torch.tensor(anchors, device=self._starts.device).view(-1, 2).unbind(dim=1)
        return self._starts[texts], positions

    def _piece(self, draft: Draft, longest: int, num_drafts: int) -> int:
        """The number of anchors per forward."""
        kernels, shapes = self._placement.kernels, draft.config.kv_shapes
        limits = [MAX_LOGITS // (num_drafts * draft.config.draft_vocab_size), MAX_GRID // max(n for n, _ in shapes)]
        if kernels.name == "reference":
            limits.append(MAX_GATHERED // ((longest + 1) * max(count * size for count, size in shapes)))
        return max(1, min(limits))


@torch.inference_mode()
def read_features(
    target: Target,
    placement: Placement,
    page_size: int,
    text: Sequence[int],
    layers: Sequence[int],
    scales: Mapping[int, KVScales] | None = None,
) -> Tensor:
    """The outputs of these layers over a text, concatenated, [T, F]. Runs one forward of the target without pages.

    `scales` are the scales of the target's KV in FP8.
    """
    device, config = placement.device, target.config
    with as_current(device):
        cache = KVCache(config, 1, page_size, placement, scales)
        memory = recall_alone(config.recurrence, len(text), placement)
        attend = PagedAttention.of_text(placement.kernels, cache, len(text), config.windows, memory)
        _, features = target(torch.tensor(text, device=device), torch.arange(len(text), device=device), attend, layers)
    assert features is not None, "layers to tap"
    return features
