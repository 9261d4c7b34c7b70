"""Whether our kernels and a module of transformers' code give the same result up to rounding."""

import torch
from torch import Tensor

ROUNDINGS = 4
"""Results may differ by this many roundings of their dtype, relative to the largest number of their row."""

LEAST = 2.0**-16
"""Results may always differ by this share of their row: sums of thousands of float32 numbers depend on the order."""


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two results [..., D], relative to the largest number of its row in `theirs`.

    Returns infinity if shapes or dtypes differ, or if a number is not finite.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    largest = theirs.abs().amax(-1, keepdim=True).double().clamp(min=torch.finfo(torch.float32).tiny)
    found = float(((ours.double() - theirs.double()).abs() / largest).max())
    return found if found == found else float("inf")


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest error with which results of this dtype agree."""
    return max(ROUNDINGS * torch.finfo(dtype).eps, LEAST)


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results [..., D] are equal up to rounding."""
    return error_of(ours, theirs) <= tolerance_of(theirs.dtype)


def random_like(other: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the same random numbers for every call of a shape, in the dtype and on the device of a tensor."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))
    return drawn.to(other.device, other.dtype)
