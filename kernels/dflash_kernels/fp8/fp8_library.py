"""Products of many rows in FP8 by a library, through `torch.nn.functional.scaled_mm`.

cuBLAS is faster for many rows, and the kernel of `fp8_product.py` for few. At 128 rows, the products of a layer of
Qwen3-8B (qkv, gate and up, down) take cuBLAS 16, 44 and 39 us on an H100, and the kernel 23, 67 and 35 us.

Axis letters: T rows, K inner width, N columns.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rounded

LEAST_ROWS = 33
"""Fewer rows take the kernel, whose tiles have at most 32 rows there."""

GROUP = 128
"""Rows and columns of a block with one scale, and columns of a group of activations, that cuBLAS supports."""

ALIGNED = 16
"""Numbers in FP8 that begin at a multiple of 16 bytes."""


@lru_cache
def has_grouped_products(device: torch.device) -> bool:
    """Return whether the library multiplies with a scale per group: CUDA 12.9 or newer, on a GPU of the Hopper kind."""
    release = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and release >= (12, 9)


def library_multiplies(hidden: Tensor, weight: Fp8Weight) -> bool:
    """Return whether the library multiplies rows [T, K] with a weight [N, K] whose product runs in FP8."""
    (num_rows, depth), num_columns = hidden.shape, len(weight)
    if hidden.dtype != torch.bfloat16 or num_rows < LEAST_ROWS or num_columns % ALIGNED or depth % ALIGNED:
        return False
    if not weight.has_groups:
        return weight.rounding == "dynamic" and weight.block[0] == 1
    # The scales of a row of blocks, and those of a group of activations, begin at multiples of 16 bytes.
    is_aligned = not (num_rows % 4 or num_columns % GROUP or depth % (4 * GROUP))
    return weight.block == (GROUP, GROUP) and is_aligned and has_grouped_products(hidden.device)


def library_product(rounded: Rounded, weight: Fp8Weight) -> Tensor:
    """Return the product of rounded rows [T, K] with a weight [N, K], in bfloat16: [T, N]."""
    kinds = functional.ScalingType
    by_row = (kinds.RowWise, kinds.RowWise)
    of_rows, of_weight = (kinds.BlockWise1x128, kinds.BlockWise128x128) if weight.has_groups else by_row
    # Newer releases of torch also check the stride of an axis of size 1.
    row_scales = rounded.scales.t() if weight.has_groups else rounded.scales.view(-1, 1)
    found: Tensor = functional.scaled_mm(
        rounded.rows, weight.values.t(), row_scales, of_rows, weight.scales.t(), of_weight, output_dtype=torch.bfloat16
    )
    return found
