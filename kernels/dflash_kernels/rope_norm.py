"""RMS normalisation and rotary embedding, with the rounding of the published models.

Both are computed in float32 (float64 stays float64) and rounded once, as transformers' Qwen3 does, so that bf16 runs
agree with the models drafts were trained against. Source: huggingface/transformers models/qwen3/modeling_qwen3.py.

Axis letters: T rows, H heads, D head dim.
"""

import torch
from torch import Tensor


def rms_norm_ref(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis and scale by `weight`.

    hidden  [..., D]
    weight  [D]
    Returns [..., D] in the dtype of `hidden`.
    """
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(hidden.dtype)


def rope_ref(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position, halves paired (the "neox" layout).

    heads     [..., H, D]
    cos, sin  [..., D]   rows of the rope table for these positions, both halves filled
    Returns [..., H, D].
    """
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return heads * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)
