"""A verify step with blocks of different numbers of rows: the step runs only the rows that requests were given.

The target's products and attention run the n given rows of all blocks, one after another. Recurrent layers get whole
blocks again: a row that is not run is a copy of the last row of its block that is. They are causal, so no given row
reads a copy, and a copy is never stored. All shapes follow from the number of requests and n, so that a step can be
captured; which request has which rows is known on the device only.

Axis letters: R requests, W rows of whole blocks, n given rows, K drafted tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.logits.sampling import Distribution
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_runtime.device.storage.kv import PagedAttention
from dflash_runtime.models.layers import Attend

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
class SharedAttention(Attend):
    """An `Attend` over the given rows of blocks."""

    blocks: PagedAttention
    rows: GivenRows
    slots: Tensor  # [n]

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """See `models.layers.Recall`."""
        whole = self.rows.sources
        spread = Gates(gates.decay[whole], gates.beta[whole], gates.log_rate, gates.bias)
        return torch.index_select(self.blocks.recall(layer, rows[whole], taps, spread), 0, self.rows.places, out=out)

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
        blocks, cache = self.blocks, self.blocks.cache
        return blocks.kernels.shared_attention(
            query, keys, values, *cache.layers[layer], blocks.page_table, blocks.context_lens, self.rows.widths,
            self.rows.sources, window=blocks.windows[layer], softmax=softmax, scales=cache.scales_of(layer), out=out,
        )  # fmt: skip
