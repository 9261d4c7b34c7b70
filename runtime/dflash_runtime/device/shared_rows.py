"""A verify step with blocks of different numbers of rows: the step runs only the rows that requests were given.

The target's products run the n given rows of all blocks, one after another. Attention and recurrent layers get whole
blocks again: a row that is not run is a copy of the last row of its block that is. Both are causal, so no given row
reads a copy, and a copy is never stored. All shapes follow from the number of requests and n, so that a step can be
captured; which request has which rows is known on the device only.

Axis letters: R requests, W rows of whole blocks, n given rows, K drafted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.block_attention import PLAIN, Softmax
from dflash_kernels.delta_rule import Gates
from dflash_kernels.rope_store import KVPlace
from dflash_kernels.sampling import Distribution
from dflash_runtime.device.kv import PagedAttention

UNVERIFIED = -2
"""Stands for a draft token of a row that was not given, in results."""


class GivenRows(NamedTuple):
    """The rows that each request was given, as `give_rows` of the kernels returns them."""

    widths: Tensor
    """[R] rows of each block, anchors included"""
    places: Tensor
    """[n] place of each given row among the R * W rows of whole blocks"""
    sources: Tensor
    """[R * W] given row of each row of whole blocks, for a row that is not run the last given row of its block"""

    def drafts(self, draft_ids: Tensor) -> Tensor:
        """Draft tokens [R, W - 1], with UNVERIFIED in rows that were not given."""
        place = torch.arange(draft_ids.shape[1], device=draft_ids.device)
        return torch.where(place + 1 < self.widths[:, None], draft_ids, UNVERIFIED)

    def requests(self, values: Tensor) -> Tensor:
        """Values of requests [R] -> of given rows [n]."""
        return values[self.places // (len(self.sources) // len(self.widths))]

    def spread(self, distribution: Distribution | Tensor, temperatures: Tensor) -> Distribution | Tensor:
        """The distributions of n given rows -> of R * W rows. `temperatures` [R] belong to the requests."""
        if isinstance(distribution, Tensor):
            return distribution[self.sources]
        logits, _, *others = distribution
        return Distribution(logits[self.sources], temperatures, *(item[self.sources] for item in others))


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """An `Attend` over the given rows of blocks, by one over whole blocks."""

    blocks: PagedAttention
    rows: GivenRows
    slots: Tensor  # [n]

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """See `models.layers.Recall`."""
        whole = self.rows.sources
        spread = Gates(gates.decay[whole], gates.beta[whole], gates.log_rate, gates.bias)
        return self._given(self.blocks.recall(layer, rows[whole], taps, spread), out)

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """[n, H, D], [n, KV, D] twice -> [n, H, D]."""
        keys, values = self.blocks.kernels.kv_store(keys, values, *self.place(layer))
        return self.read(layer, query, keys, values, softmax)

    def place(self, layer: int) -> KVPlace:
        """See `models.layers.Attend`."""
        return self.blocks.cache.place(layer, self.slots)

    def read(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: Softmax = PLAIN,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `models.layers.Attend`; writes into `out` [n, H, D] if it is given."""
        whole = [item.index_select(0, self.rows.sources) for item in _joined(query, keys, values)]
        if len(whole) == 1:
            whole = list(whole[0].split((query.shape[1], keys.shape[1], values.shape[1]), dim=1))
        return self._given(self.blocks.read(layer, whole[0], whole[1], whole[2], softmax), out)

    def _given(self, found: Tensor, out: Tensor | None) -> Tensor:
        return torch.index_select(found, 0, self.rows.places, out=out)


def _joined(*heads: Tensor) -> Sequence[Tensor]:
    """Heads [n, H, D] as one tensor if they are next to each other in memory, so that one launch copies all of them."""
    first = heads[0]
    ends = accumulate((own.shape[1] * first.stride(1) for own in heads), initial=first.storage_offset())
    are_near = all(
        own.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and (own.stride(), own.shape[2]) == (first.stride(), first.shape[2])
        and own.storage_offset() == begin
        for own, begin in zip(heads, ends, strict=False)
    )
    size = (len(first), sum(own.shape[1] for own in heads), first.shape[2])
    return (first.as_strided(size, first.stride()),) if are_near else heads
