"""Experts with weights in FP8: the launches of `experts.py`, with activations rounded as the format says.

A layer of more rows than `MAX_EXPERT_ROWS` is computed in several calls, so weights are never dequantised in memory.

Axis letters: T rows, E experts, C chosen experts per row, F inner width, P parts.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.fp8.fp8_product import (
    block_scales,
    fixed_scale,
    fp8_product_ref,
    load_once,
    pick,
    product_step,
    round_rows,
    round_tile,
    scaled_step,
    scaled_sum,
    scales_of_rows,
    uses_fp8,
)
from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rounded
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.mixtures.expert_rows import all_routes, at_ranks, find_rows
from dflash_kernels.mixtures.mixture_config import MAX_EXPERT_ROWS, ExpertsShape, fp8_experts_shape
from dflash_kernels.products.activation import gate_tiles, silu_mul_ref


def fp8_experts_ref(hidden: Tensor, gate_up: Fp8Weight, down: Fp8Weight, chosen: Tensor, scores: Tensor) -> Tensor:
    """Return `experts_ref` of stacks [E, 2 F, hidden] and [E, hidden, F] in FP8: [P, T, hidden].

    The host reads which experts are chosen.
    """
    total = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        rows, columns = (chosen == expert).nonzero(as_tuple=True)
        inner = silu_mul_ref(fp8_product_ref(hidden[rows], gate_up[expert]))
        total.index_add_(0, rows, fp8_product_ref(inner, down[expert]) * scores[rows, columns, None])
    return total[None]


@jit
def _fp8_product_tile(
    weight_rows, scales, scale_row, is_second, hidden_rows, row_scales, scale_column, num_scaled, is_column, is_row,
    DEPTH: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SCALES: tl.constexpr, SECOND_ROW: tl.constexpr,
    IS_EVEN: tl.constexpr, ROUNDING: tl.constexpr, IS_FP8: tl.constexpr,
    PADDED_TILES: tl.constexpr, TILE_C: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Multiply weight rows with hidden rows, given as pointers to their first elements: float32 [TILE_C, TILE_R].

    scale_row     [TILE_C] row of the scales of each weight row
    is_second     [TILE_C] whether a weight row has the scales of the row SECOND_ROW further on; only if IS_EVEN
    scale_column  [TILE_R] place of a row in `row_scales`, which have `num_scaled` rows
    """
    inner = tl.arange(0, TILE_K)
    acc = tl.zeros((TILE_C, TILE_R), tl.float32)
    dtype: tl.constexpr = weight_rows.dtype.element_ty if IS_FP8 else hidden_rows.dtype.element_ty
    first_row = tl.min(scale_row, 0)
    low, tiles = block_scales(scales, 0, first_row, PADDED_TILES, TILE_K, BLOCK_K, NUM_SCALES)
    high = low
    if SECOND_ROW and IS_EVEN:
        high, _ = block_scales(scales, 0, first_row + SECOND_ROW, PADDED_TILES, TILE_K, BLOCK_K, NUM_SCALES)
    fixed = fixed_scale(row_scales, ROUNDING)
    for tile in range((DEPTH + TILE_K - 1) // TILE_K):
        begin = tile * TILE_K
        group = begin // BLOCK_K
        is_element, is_weight = is_row[:, None], is_column[:, None]
        if DEPTH % TILE_K:
            is_element = is_element & (begin + inner < DEPTH)[None, :]
            is_weight = is_weight & (begin + inner < DEPTH)[None, :]
        rows = tl.load(hidden_rows[:, None] + inner[None, :] + begin, mask=is_element, other=0.0)
        row_scale = scales_of_rows(
            row_scales, begin, scale_column, num_scaled, is_row, fixed, DEPTH, BLOCK_K, NUM_SCALES, ROUNDING
        )
        rows, row_scale = round_tile(rows, row_scale, fixed, ROUNDING, dtype)
        loaded = load_once(weight_rows[:, None] + inner[None, :] + begin, is_weight)
        found = product_step(loaded, tl.trans(rows), IS_FP8, dtype)
        if SECOND_ROW and IS_EVEN and NUM_SCALES > 1:
            found = tl.where(is_second[:, None], found * pick(high, tiles, tile), found * pick(low, tiles, tile))
            if ROUNDING == "group" or ROUNDING == "before":
                found *= row_scale[None, :]
        else:
            found = scaled_step(
                found, scales, row_scale, low, tiles, tile, scale_row, group, is_column, NUM_SCALES, IS_EVEN, ROUNDING
            )
        acc += found
    return scaled_sum(
        acc, scales, scale_row, is_column, row_scales, scale_column, is_row, fixed, NUM_SCALES, ROUNDING
    )  # fmt: skip


@jit(do_not_specialize=["num_rows"])
def _fp8_gated_experts_kernel(
    hidden, row_scales, weight, scales, chosen, out, num_rows,
    HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SCALE_ROWS: tl.constexpr, NUM_SCALES: tl.constexpr,
    ROUNDING: tl.constexpr, IS_FP8: tl.constexpr, PADDED_TILES: tl.constexpr,
    IS_BY_ROUTE: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_F: tl.constexpr,
    TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    expert, count, rank, its_route = find_rows(
        chosen, tl.num_programs(1) - 1 - tl.program_id(1), num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
    )
    dtype = out.dtype.element_ty
    side = tl.arange(0, 2 * TILE_F)
    column, is_up = tl.program_id(0) * TILE_F + side % TILE_F, side >= TILE_F
    is_column = column < WIDTH
    weight_row = tl.where(is_up, WIDTH, 0) + column
    weight_rows = weight + (expert.to(tl.int64) * 2 * WIDTH + weight_row) * DEPTH
    its_scales = scales + expert.to(tl.int64) * NUM_SCALE_ROWS * NUM_SCALES
    out_column = tl.program_id(0) * TILE_F + tl.arange(0, TILE_F)
    IS_EVEN: tl.constexpr = BLOCK_N % TILE_F == 0 and WIDTH % BLOCK_N == 0
    for first in range(0, count, TILE_R):
        route = at_ranks(its_route, rank, first, TILE_R)
        is_row = first + tl.arange(0, TILE_R) < count
        hidden_rows = hidden + (route // NUM_CHOSEN).to(tl.int64) * HIDDEN_ROW
        acc = _fp8_product_tile(
            weight_rows, its_scales, weight_row // BLOCK_N, is_up, hidden_rows, row_scales, route // NUM_CHOSEN,
            num_rows, is_column, is_row, DEPTH, BLOCK_K, NUM_SCALES, WIDTH // BLOCK_N, IS_EVEN, ROUNDING, IS_FP8,
            PADDED_TILES, 2 * TILE_F, TILE_R, TILE_K,
        )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, TILE_F, TILE_R)), (1, 2, 0)))
        gated = gate_tiles(gate.to(dtype), up.to(dtype))
        place = route[None, :].to(tl.int64) * WIDTH + out_column[:, None]
        tl.store(out + place, gated, mask=is_row[None, :] & (out_column < WIDTH)[:, None])


@jit(do_not_specialize=["num_rows"])
def _fp8_down_experts_kernel(
    hidden, row_scales, weight, scales, chosen, scores, out, num_rows,
    NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SCALE_ROWS: tl.constexpr, NUM_SCALES: tl.constexpr,
    ROUNDING: tl.constexpr, IS_FP8: tl.constexpr, PADDED_TILES: tl.constexpr, IS_BY_ROUTE: tl.constexpr,
    TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    routes, is_route = all_routes(num_rows, NUM_CHOSEN, TILE_T, TILE_P)
    score_tile = tl.load(scores + routes, mask=is_route, other=0.0).to(tl.float32)
    expert, count, rank, its_route = find_rows(
        chosen, tl.num_programs(1) - 1 - tl.program_id(1), num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
    )
    its_score = tl.sum(tl.where(routes == its_route[:, None], score_tile, 0.0), 1)
    dtype = out.dtype.element_ty
    column = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    is_column = column < WIDTH
    weight_rows = weight + (expert.to(tl.int64) * WIDTH + column) * DEPTH
    its_scales = scales + expert.to(tl.int64) * NUM_SCALE_ROWS * NUM_SCALES
    IS_EVEN: tl.constexpr = BLOCK_N % TILE_C == 0
    for first in range(0, count, TILE_R):
        route = at_ranks(its_route, rank, first, TILE_R)
        is_row = first + tl.arange(0, TILE_R) < count
        score = at_ranks(its_score, rank, first, TILE_R)
        acc = _fp8_product_tile(
            weight_rows, its_scales, column // BLOCK_N, column < 0, hidden + route.to(tl.int64) * DEPTH, row_scales,
            route, num_rows * NUM_CHOSEN, is_column, is_row, DEPTH, BLOCK_K, NUM_SCALES, 0, IS_EVEN, ROUNDING, IS_FP8,
            PADDED_TILES, TILE_C, TILE_R, TILE_K,
        )  # fmt: skip
        scored = (acc.to(dtype).to(tl.float32) * score[None, :]).to(dtype)
        part_row = (route % NUM_CHOSEN).to(tl.int64) * num_rows + route // NUM_CHOSEN
        place = part_row[None, :] * WIDTH + column[:, None]
        tl.store(out + place, scored, mask=is_row[None, :] & is_column[:, None])


def fp8_experts(hidden: Tensor, gate_up: Fp8Weight, down: Fp8Weight, chosen: Tensor, scores: Tensor) -> Tensor:
    """Compute `fp8_experts_ref` with one part per chosen expert, without reading a value on the host."""
    check_tensors(hidden, gate_up.values, down.values, chosen, scores)
    check_dtypes(hidden, scores)
    num_experts, width, depth = down.shape
    require(hidden.shape == (len(chosen), width), "hidden", "one row per row of `chosen`, as wide as `down`")
    require(scores.shape == chosen.shape, "scores", "the shape of `chosen`")
    require(gate_up.shape == (num_experts, 2 * depth, width), "gate_up", "the experts and widths of `down`")
    require(hidden.stride(1) == 1, "hidden", "contiguous rows")
    stored = (gate_up.values, gate_up.scales, down.values, down.scales, chosen, scores)
    require(all(tensor.is_contiguous() for tensor in stored), "gate_up, down, chosen, scores", "contiguous memory")
    pieces = [slice(first, first + MAX_EXPERT_ROWS) for first in range(0, len(hidden), MAX_EXPERT_ROWS)]
    found = [_some_rows(hidden[rows], gate_up, down, chosen[rows], scores[rows]) for rows in pieces]
    if not found:
        return hidden.new_zeros((1, *hidden.shape))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _some_rows(hidden: Tensor, gate_up: Fp8Weight, down: Fp8Weight, chosen: Tensor, scores: Tensor) -> Tensor:
    """Compute at most MAX_EXPERT_ROWS rows in two launches, and one before each that rounds whole rows."""
    num_experts, width, depth = down.shape
    num_rows, num_chosen = chosen.shape
    shapes = [
        fp8_experts_shape(num_rows, num_chosen, num_experts, weight.block, hidden.element_size(), hidden.device)
        for weight in (gate_up, down)
    ]
    num_programs = num_rows * num_chosen if shapes[0].is_by_route else num_experts
    inner = torch.empty((num_rows * num_chosen, depth), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_chosen, num_rows, width), dtype=hidden.dtype, device=hidden.device)
    (rows, row_scales, _), options = _prepared(hidden, gate_up, shapes[0], num_chosen)
    _fp8_gated_experts_kernel[(ceil_div(depth, shapes[0].columns // 2), num_programs)](
        rows, row_scales, _stored(gate_up), gate_up.scales, chosen, inner, num_rows,
        HIDDEN_ROW=rows.stride(0), WIDTH=depth, DEPTH=width, TILE_F=shapes[0].columns // 2, **options,
    )  # fmt: skip
    (rows, row_scales, _), options = _prepared(inner, down, shapes[1], num_chosen)
    _fp8_down_experts_kernel[(ceil_div(width, shapes[1].columns), num_programs)](
        rows, row_scales, _stored(down), down.scales, chosen, scores, out, num_rows,
        WIDTH=width, DEPTH=depth, TILE_C=shapes[1].columns, **options,
    )  # fmt: skip
    return out


def _stored(weight: Fp8Weight) -> Tensor:
    return weight.values if uses_fp8(weight) else weight.values.view(torch.uint8)


def _prepared(
    hidden: Tensor, weight: Fp8Weight, shape: ExpertsShape, num_chosen: int
) -> tuple[Rounded, dict[str, object]]:
    """Return the rows that a launch reads, and its options."""
    height, width = weight.block
    if weight.rounding == "none":
        rounding, rounded = "none", Rounded(hidden, weight.scales, hidden)
    elif weight.input_scale is not None:
        rounding, rounded = "static", Rounded(hidden, weight.input_scale, hidden)
    elif weight.has_groups and width == shape.depth:
        rounding, rounded = "group", Rounded(hidden, weight.scales, hidden)
    else:
        rounding, rounded = "before", round_rows(hidden, weight)
    return rounded, {
        "NUM_CHOSEN": num_chosen, "IS_BY_ROUTE": shape.is_by_route, "TILE_T": shape.sought_rows,
        "TILE_P": power_of_2(num_chosen), "TILE_R": shape.rows, "TILE_K": shape.depth,
        "BLOCK_N": height, "BLOCK_K": width, "NUM_SCALE_ROWS": weight.scales.shape[1],
        "NUM_SCALES": weight.scales.shape[2], "ROUNDING": rounding, "IS_FP8": uses_fp8(weight),
        "PADDED_TILES": power_of_2(ceil_div(weight.shape[2], shape.depth)),
        "num_warps": 4, "num_stages": shape.num_stages, "enable_fp_fusion": False, **early(hidden.device),
    }  # fmt: skip
