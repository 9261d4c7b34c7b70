"""A head whose logits are scaled and capped.

Axis letters: T rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.fp8.fp8_weight import Rows
from dflash_runtime.models.layers import Linear

NO_ID = -1e4
"""The logit of a padding row of the head: small enough that it is never chosen, and finite in every dtype."""


@dataclass(frozen=True, slots=True)
class ScaledHead(Linear):
    """A head that multiplies its logits, then caps them: `cap * tanh(logits / cap)`.

    Rows from `num_ids` on are padding.
    """

    multiplier: float = 1.0
    cap: float | None = None
    num_ids: int | None = None

    def __call__(self, hidden: Rows) -> Tensor:
        """[T, hidden] -> [T, V]."""
        logits = Linear.__call__(self, hidden)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        if self.num_ids is not None:
            logits[:, self.num_ids :] = NO_ID
        return logits
