"""Bounds for prompts that a sample lacks: the rule of three, and the length if such prompts were the worst or the best.

If none of n prompts belongs to a kind, the kind may still be 3 / n of all prompts (95%). The text of a prompt is fixed,
so its number of tokens is. At worst all its draft tokens are rejected, and it needs one step per token. At best its
steps cost nothing.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShareOfPrompts:
    """A share of all prompts, known from `count` of `total` sampled prompts."""

    count: int
    total: int

    def upper(self, error_rate: float) -> float:
        """Return the exact upper bound of the share. Source: Clopper and Pearson 1934."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._at_most(middle) > error_rate else (low, middle)
        return high

    def tail_of(self, length: float, change: float) -> float:
        """Return the probability of so few sampled prompts if their share is just enough for this change of a length.

        It is 0 if no share is enough, and 1 if the change is in the other direction.
        """
        needed = share_of_fall(length, -change) if change < 0 else change / (length + change)
        return self._at_most(needed) if needed < 1 else 0.0

    def _at_most(self, share: float) -> float:
        """Return the probability of at most `count` such prompts in the sample, if `share` of all prompts are."""
        total = self.total
        return sum(
            math.comb(total, count) * share**count * (1 - share) ** (total - count) for count in range(self.count + 1)
        )


def share_of_fall(length: float, fall: float) -> float:
    """Return the share of prompts without accepted tokens that lowers a length by `fall`; infinite if none does."""
    return fall / ((length - fall) * (length - 1)) if length - fall > 1 else math.inf


def fallen(length: float, share: float) -> float:
    """Return the acceptance length if this share of the prompts had no accepted tokens."""
    return length / (1 - share + share * length)


def risen(length: float, share: float, most: float = math.inf) -> float:
    """Return the acceptance length if this share of the prompts had `most` tokens per step."""
    return length / (1 - share + share * length / most)
