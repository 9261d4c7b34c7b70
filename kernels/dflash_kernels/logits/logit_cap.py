"""The cap of a head's logits: `cap * tanh(logits / cap)`, rounded after each of its three steps as published models do.

A cap keeps the order of logits. In 16 bits, the highest logit of a tile is therefore found before the cap, which then
costs nothing: passes over all logits would take longer than the choice itself.
Source: huggingface/transformers models/gemma2/modeling_gemma2.py.
"""

import math

import torch
from torch import Tensor

from dflash_kernels.launch import constexpr, jit, tl

_TL_LOG2E = constexpr(math.log2(math.e))


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return capped logits, or the same ones without a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


@jit
def capped(scores, CAP: tl.constexpr, dtype: tl.constexpr):
    """Return float32 scores after the cap of logits in a dtype. Without a cap they stay as they are."""
    if CAP is None:
        result = scores
    else:
        bounded = tl.minimum(tl.maximum(scores, -100.0 * CAP), 100.0 * CAP)  # the tangent of 100 is 1
        ratio = tl.div_rn(bounded, tl.where(scores > 0, CAP, CAP)).to(dtype).to(tl.float32)
        square = ratio * ratio
        series = ratio * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
        power = tl.exp2(tl.abs(ratio) * (-2.0 * _TL_LOG2E))
        quotient = (1.0 - power) / (1.0 + power)
        tangent = tl.where(square < 1 / 16, series, tl.where(ratio < 0, -quotient, quotient))
        result = (tangent.to(dtype).to(tl.float32) * CAP).to(dtype).to(tl.float32)
    return result
