"""Sample a token from a distribution by inverting its cumulative sum in vocabulary order.

The kernels cut the vocabulary into tiles. They find the tile in which the running sum passes the level, then the token
in this tile. The level is the random number times the total. Sums are in float64 and in a fixed order, so a sample can
be repeated exactly.

Axis letters: T rows, V vocabulary.
"""

import torch
from torch import Tensor

from dflash_kernels.launch import jit, tl


def categorical_ref(probs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: [T, V] probabilities and [T] numbers in [0, 1) -> [T] int64 tokens.

    A row of only NaN or only zeros gives some token of the vocabulary.
    """
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    level = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


@jit
def first_above(weights, before, level, TILE: tl.constexpr):
    """Return the index of the weight at which the running sum, started at `before`, passes `level`.

    A parallel sum is not monotone in its last bit. Therefore weights of zero are never chosen, and if the sum never
    passes `level`, the last weight above zero is chosen.
    """
    index = tl.arange(0, TILE)
    is_passed = (tl.cumsum(weights, 0) + before > level) & (weights > 0)
    passed = tl.min(tl.where(is_passed, index, TILE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.where(passed < TILE, passed, last)
