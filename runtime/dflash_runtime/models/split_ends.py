"""Embedding and head of a split target: each rank has the rows of its own token ids.

Axis letters: T rows, V vocabulary, W token ids of one rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.fp8.fp8_weight import Rows
from dflash_runtime.models.layers import Linear
from dflash_runtime.models.target_shares import id_range
from dflash_runtime.ranks.rank_group import ALONE, Ranks


class SplitEmbedding:
    """Rows of an embedding by token id. Each rank looks up its own ids, and the ranks add up their rows."""

    def __init__(self, rows: Tensor, vocab_size: int, ranks: Ranks) -> None:
        begin, end = id_range(vocab_size, ranks)
        num_rows = -(-vocab_size // ranks.size)
        # Missing rows of the last rank are zeros, and so is one row more, which all ids of other ranks look up.
        self._rows = functional.pad(rows, (0, 0, 0, num_rows + 1 - len(rows)))
        self._places = torch.full((vocab_size,), num_rows, dtype=torch.int64, device=rows.device)
        self._places[begin:end] = torch.arange(end - begin, device=rows.device)
        self._ranks = ranks
        self.dtype, self.device = rows.dtype, rows.device

    def element_size(self) -> int:
        """Bytes of one number."""
        return self._rows.element_size()

    @property
    def own_rows(self) -> Tensor:
        """The rows of this rank, [W, hidden]; a tied head multiplies them."""
        return self._rows[:-1]

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] -> rows [T, hidden], on all ranks."""
        return self._ranks.total(self._rows[self._places[token_ids]][None])[0]


@dataclass(frozen=True, slots=True)
class SplitHead(Linear):
    """A split head: each rank computes the logits of its own token ids, and all ranks get all logits."""

    own: Linear | None = None
    ranks: Ranks = ALONE
    vocab_size: int = 0

    @classmethod
    def around(cls, own: Linear, vocab_size: int, ranks: Ranks) -> "SplitHead":
        """Return the head of all ranks. The head of this rank has rows for its ids, at most V / ranks."""
        assert isinstance(own.weight, Tensor)
        return cls(own.weight, own.bias, own.kernels, own, ranks, vocab_size)

    def __call__(self, hidden: Rows) -> Tensor:
        """[T, hidden] -> [T, V]."""
        assert self.own is not None
        return self.ranks.gather(self.own(hidden))[:, : self.vocab_size].contiguous()


def padded_rows(rows: Tensor, vocab_size: int, ranks: Ranks) -> Tensor:
    """Return the rows of a rank's head with zeros for the ids that the last rank lacks, [W, hidden]."""
    missing = -(-vocab_size // ranks.size) - len(rows)
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
