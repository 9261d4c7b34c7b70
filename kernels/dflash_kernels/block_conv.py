"""A short causal convolution along the rows of each block, with kernels that depend on the row (DFlash 2).

Row p of a block becomes the sum over s of `kernel[s] + dynamic[p, s]` times row p - s. A row before the block counts as
zero: nothing crosses into the context, into another block, or into another request. Sums are in float32 (float64 for
float64 models) and rounded once.
Source: z-lab/dflash 0.1.0 model.py, GroupedDynamicCausalConv.

Axis letters: T rows, N rows of a block, S taps of the kernel, H hidden width, G groups of columns.
"""

import torch
from torch import Tensor

from dflash_kernels.launch_config import ELEMENT_TILE, ceil_div, check_dtypes, check_tensors, jit, require, tl


def block_conv_ref(hidden: Tensor, kernel: Tensor, dynamic: Tensor, num_rows: int) -> Tensor:
    """Convolve each block of `num_rows` rows.

    hidden   [T, H]      T is a multiple of `num_rows`
    kernel   [S, H]      the same for all rows
    dynamic  [T, S, G]   added to the kernel of a row; each value is for H / G adjacent columns
    Returns [T, H].
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    blocks = hidden.to(wide).unflatten(0, (-1, num_rows))  # [T / N, N, H]
    kernels = kernel.to(wide) + dynamic.to(wide).repeat_interleave(hidden.shape[1] // dynamic.shape[2], dim=2)
    kernels = kernels.unflatten(0, (-1, num_rows))  # [T / N, N, S, H]
    total = kernels[:, :, 0] * blocks
    for tap in range(1, min(len(kernel), num_rows)):
        total[:, tap:] += kernels[:, tap:, tap] * blocks[:, :-tap]
    convolved: Tensor = total.view_as(hidden).to(hidden.dtype)
    return convolved


@jit(do_not_specialize=["num_rows"])
def _block_conv_kernel(
    hidden, kernel, dynamic, out, num_rows, hidden_row, dynamic_row, dynamic_tap,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, NUM_TAPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < WIDTH
    position = row % num_rows
    total = tl.zeros((TILE,), tl.float32)
    for tap in tl.static_range(NUM_TAPS):
        is_read = is_column & (position >= tap)
        value = tl.load(hidden + (row - tap) * hidden_row + column, mask=is_read, other=0.0).to(tl.float32)
        weight = tl.load(kernel + tap * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
        own = tl.load(dynamic + row * dynamic_row + tap * dynamic_tap + column // GROUP, mask=is_column, other=0.0)
        total += (weight + own.to(tl.float32)) * value
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=is_column)


def block_conv(hidden: Tensor, kernel: Tensor, dynamic: Tensor, num_rows: int) -> Tensor:
    """Compute `block_conv_ref` in one launch."""
    check_tensors(hidden, kernel, dynamic)
    check_dtypes(hidden, kernel, dynamic)
    count, width = hidden.shape
    num_taps, groups = dynamic.shape[1:]
    require(num_rows > 0 and count % num_rows == 0, "hidden", "whole blocks of rows")
    require(kernel.shape == (num_taps, width) and kernel.is_contiguous(), "kernel", "[taps, width], contiguous")
    require(len(dynamic) == count and groups > 0 and width % groups == 0, "dynamic", "one row per row of hidden")
    require(hidden.stride(1) == 1 and dynamic.stride(2) == 1, "hidden, dynamic", "contiguous rows")
    out = torch.empty((count, width), dtype=hidden.dtype, device=hidden.device)
    if out.numel():
        _block_conv_kernel[(count, ceil_div(width, ELEMENT_TILE))](
            hidden, kernel, dynamic, out, num_rows, hidden.stride(0), dynamic.stride(0), dynamic.stride(1),
            WIDTH=width, GROUP=width // groups, NUM_TAPS=num_taps, TILE=ELEMENT_TILE,
        )  # fmt: skip
    return out
