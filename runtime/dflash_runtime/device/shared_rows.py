"""A verify step with blocks of different numbers of rows: the step runs only the rows that requests were given.

The target's products run the n given rows of all blocks, one after another. Attention and recurrent layers get whole
blocks again: a row that is not run is a copy of the last row of its block that is. Both are causal, so no given row
reads a copy, and a copy is never stored. All shapes follow from the number of requests and n, so that a step can be
captured; which request has which rows is known on the device only.

Axis letters: R requests, W rows of whole blocks, n given rows, K drafted tokens.
"""

from dataclasses import dataclass
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
    """The rows that each request was given."""

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


def give_rows(survivals: Tensor, num_rows: int) -> GivenRows:
    """Give `num_rows` rows, an anchor to each request and the others to the best survivals [R, K].

    Survivals never grow along a block, and among equal ones earlier positions come first. So every request gets the
    first rows of its block. `scheduling.row_budget.give_rows` does the same on the host.
    """
    num_requests, num_drafts = survivals.shape
    best = survivals.T.flatten().argsort(descending=True, stable=True)[: num_rows - num_requests]
    widths = torch.ones(num_requests, dtype=torch.int64, device=survivals.device)
    widths.scatter_add_(0, best % num_requests, torch.ones_like(best))
    is_given = (torch.arange(num_drafts + 1, device=survivals.device) < widths[:, None]).flatten()
    places = is_given.to(torch.int8).argsort(descending=True, stable=True)[:num_rows]
    return GivenRows(widths, places, is_given.cumsum(0) - 1)


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
        whole = self.rows.sources
        return self._given(self.blocks.read(layer, query[whole], keys[whole], values[whole], softmax), out)

    def _given(self, found: Tensor, out: Tensor | None) -> Tensor:
        given = found[self.rows.places]
        return given if out is None else out.copy_(given)
