"""Attention's output times the sigmoid of a gate. The gate's product may still be in parts.

Rounded as in the published models: after the sigmoid, and after the product.
Source: huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.

Axis letters: T rows, P parts, N columns.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, require, tl
from dflash_kernels.launch_config import ELEMENT_TILE
from dflash_kernels.norms.rope_norm import check_parts, sum_parts, sum_parts_ref


def output_gate_ref(rows: Tensor, parts: Tensor) -> Tensor:
    """Return `rows` times the sigmoid of the sum of `parts`.

    rows   [T, N]
    parts  [P, T, N]   the gate, as returned by `product_parts_ref`
    Returns [T, N].
    """
    return rows * sum_parts_ref(parts, rows.dtype).sigmoid()


@jit
def _output_gate_kernel(
    rows, parts, out, rows_row, parts_row, part_stride, WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr,
    TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    wait_for_launches_before(IS_EARLY)
    gate = sum_parts(parts, row * parts_row + column, is_column, part_stride, NUM_PARTS, dtype)
    value = tl.load(rows + row * rows_row + column, mask=is_column, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate.to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (value * opened).to(dtype), mask=is_column)


def output_gate(rows: Tensor, parts: Tensor) -> Tensor:
    """Compute `output_gate_ref` in one launch."""
    check_tensors(rows, parts)
    check_dtypes(rows)
    check_parts(parts, rows.dtype)
    require(parts.shape[1:] == rows.shape, "parts", "the shape of the rows")
    require(rows.stride(1) == parts.stride(2) == 1, "rows, parts", "contiguous rows")
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    count, width = rows.shape
    if count:
        _output_gate_kernel[(count, ceil_div(width, ELEMENT_TILE))](
            rows, parts, out, rows.stride(0), parts.stride(1), parts.stride(0),
            WIDTH=width, NUM_PARTS=len(parts), TILE=ELEMENT_TILE, **early(rows.device),
        )  # fmt: skip
    return out
