"""Experts of one row, as in plain decoding of one request: one program per chosen expert and tile of columns.

The launch of `down` begins with the launch of gate and up, and loads its first weights meanwhile: the choice is known.

Axis letters: E experts, C chosen experts of the row, F inner width.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, jit, tl
from dflash_kernels.mixtures.mixture_config import ROW_EXPERTS
from dflash_kernels.products.activation import Gate, gate_options
from dflash_kernels.products.product_config import ROW_DEPTH
from dflash_kernels.products.row_product import gated_sums, row_sums


@jit
def _gated_row_experts_kernel(
    hidden, weight, chosen, out, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    TILE_C: tl.constexpr, TILE_K: tl.constexpr, TILES_AHEAD: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    TILE_F: tl.constexpr = TILE_C // 2
    side, route = tl.arange(0, TILE_C), tl.program_id(1)
    column = tl.program_id(0) * TILE_F + side % TILE_F
    expert = tl.load(chosen + route)
    weight_rows = weight + (expert * 2 * WIDTH + side // TILE_F * WIDTH + column) * DEPTH
    sums = row_sums(
        hidden, weight_rows, column < WIDTH, 0, DEPTH, 1, WIDTH % TILE_F == 0, TILE_C, TILE_K, TILES_AHEAD,
        False, False, IS_EARLY,
    )  # fmt: skip
    gated = gated_sums(sums, out.dtype.element_ty, KIND, ALPHA, LIMIT, TILE_F)
    place = tl.program_id(0) * TILE_F + tl.arange(0, TILE_F)
    tl.store(out + route * WIDTH + place, gated, mask=place < WIDTH)


@jit
def _down_row_experts_kernel(
    inner, weight, chosen, scores, out, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TILE_C: tl.constexpr, TILE_K: tl.constexpr, TILES_AHEAD: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    route = tl.program_id(1)
    column = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    # The launch of gate and up began after the choice. L1 may hold the choice of another layer: skip it.
    expert = tl.load(chosen + route, cache_modifier=".cg")
    score = tl.load(scores + route, cache_modifier=".cg").to(tl.float32)
    weight_rows = weight + (expert * WIDTH + column) * DEPTH
    sums = row_sums(
        inner + route * DEPTH, weight_rows, column < WIDTH, 0, DEPTH, 1, WIDTH % TILE_C == 0, TILE_C, TILE_K,
        TILES_AHEAD, True, True, IS_EARLY,
    )  # fmt: skip
    dtype = out.dtype.element_ty
    scored = (sums.to(dtype).to(tl.float32) * score).to(dtype)
    tl.store(out + route * WIDTH + column, scored, mask=column < WIDTH)


def row_experts(hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, scores: Tensor, gate: Gate) -> Tensor:
    """Compute `experts` of one row and checked arguments in two launches: [1, hidden] -> parts [C, 1, hidden]."""
    width, depth = down.shape[1:]
    num_chosen = chosen.shape[1]
    inner = torch.empty((num_chosen, depth), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_chosen, 1, width), dtype=hidden.dtype, device=hidden.device)
    options = {
        "TILE_C": ROW_EXPERTS.weight_rows, "TILE_K": ROW_DEPTH, "TILES_AHEAD": ROW_EXPERTS.tiles_ahead,
        "num_warps": ROW_EXPERTS.num_warps, "maxnreg": ROW_EXPERTS.max_registers, "enable_fp_fusion": False,
        **early(hidden.device),
    }  # fmt: skip
    _gated_row_experts_kernel[(ceil_div(depth, ROW_EXPERTS.weight_rows // 2), num_chosen)](
        hidden, gate_up, chosen, inner, WIDTH=depth, DEPTH=width, **gate_options(gate), **options
    )
    _down_row_experts_kernel[(ceil_div(width, ROW_EXPERTS.weight_rows), num_chosen)](
        inner, down, chosen, scores, out, WIDTH=width, DEPTH=depth, **options
    )
    return out
