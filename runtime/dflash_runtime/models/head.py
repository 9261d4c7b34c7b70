"""A head whose logits are scaled and capped.

Axis letters: T rows, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from dflash_kernels.fp8.fp8_weight import Rows
from dflash_kernels.logits.logit_cap import cap_logits
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
        logits, cap = self.uncapped(hidden)
        return cap_logits(logits, cap)

    def uncapped(self, hidden: Rows) -> tuple[Tensor, float | None]:
        """Return logits [T, V] and the cap that they still need. Padding has none of it."""
        logits = Linear.__call__(self, hidden)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.num_ids is None:
            return logits, self.cap
        logits = cap_logits(logits, self.cap)
        logits[:, self.num_ids :] = NO_ID
        return logits, None


def uncapped_logits(head: Linear, hidden: Rows) -> tuple[Tensor, float | None]:
    """Return the logits [T, V] of hidden states, and the cap that they still need, or None."""
    return head.uncapped(hidden) if isinstance(head, ScaledHead) else (head(hidden), None)
