"""Packed experts of a few rows, as in plain decoding: the products of `warp_products.py` and what surrounds them.

A product takes all rows, up to 8. Rows that did not choose the expert count as zeros, so no rows are gathered. All
values of a thread have one layout, [T], and stay in its registers.

The launch of `down` begins with the launch of gate and up. The choice is known by then, so it loads its first weights
before it waits.

Axis letters: R rows, C chosen experts per row, E experts, F inner width, G groups of 32 rows of a weight, T threads, W
warps.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import IS_INTERPRETED, ceil_div, jit, tl
from dflash_kernels.mixtures.mixture_config import MAX_FEW_PACKED, few_packed_shape
from dflash_kernels.mixtures.mxfp4 import GROUP, Packed
from dflash_kernels.mixtures.warp_products import constraints, sum_types, warp_products
from dflash_kernels.products.activation import Gate, gate_options, joined_tiles


@jit
def _choice(chosen, index, row, num_rows, NUM_CHOSEN: tl.constexpr, IS_BY_ROUTE: tl.constexpr):
    """Return a program's expert, and the place of the expert among the choices of each thread's row [T], or -1.

    With one program per route, only the program of an expert's first route computes it. For others, all places are -1.
    The cache of a multiprocessor may hold the choice of another layer, so loads skip it.
    """
    expert = index.to(tl.int64)
    if IS_BY_ROUTE:
        expert = tl.load(chosen + index, cache_modifier=".cg")
    place = tl.full(row.shape, -1, tl.int32)
    for other in tl.static_range(NUM_CHOSEN):
        id = tl.load(chosen + row * NUM_CHOSEN + other, mask=row < num_rows, other=-1, cache_modifier=".cg")
        place = tl.where(id == expert, other, place)
    if IS_BY_ROUTE:
        route = tl.where(place >= 0, row * NUM_CHOSEN + place, 8 * NUM_CHOSEN)
        first = tl.inline_asm_elementwise(
            "redux.sync.min.s32 $0, $1, 0xFFFFFFFF;", "=r,r", [route], dtype=tl.int32, is_pure=False, pack=1
        )
        place = tl.where(first == index, place, -1)
    return expert, place


@jit
def _place_of(place, row):
    """Return the place that belongs to another row [T]: the lanes 4 g to 4 g + 3 have row g."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1F, 0xFFFFFFFF;", "=r,r,r", [place, row * 4], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _column(thread, first, pair: tl.constexpr, WARPS: tl.constexpr):
    """Return the column of the sums 2 `pair` and 2 `pair` + 1 of each thread, [T]; see `warp_products`."""
    q = thread // 32 * (8 // WARPS) + 2 * pair
    return first + q // 4 * 16 + q % 4 // 2 * 8 + thread % 32 // 4


@jit
def _sums(
    numbers, scales, first, second, place, states,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Multiply the groups `first` and `second` of a stack, or only `first`, with hidden states: 8 G / W sums, each [T].

    `states` [T] are pointers to the hidden states of each thread's row. Rows with the place -1 count as zeros. If all
    rows do, nothing is read.
    """
    NUM_TILES: tl.constexpr = (DEPTH + 127) // 128
    none = tl.zeros(place.shape, tl.int64)
    is_needed = tl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xFFFFFFFF;", "=r,r", [place], dtype=tl.int32, is_pure=False, pack=1
    )
    given = [tl.where(is_needed >= 0, (numbers + first * NUM_TILES * 512).to(tl.int64), 0)]
    if GROUPS == 2:
        given += [none + (numbers + second * NUM_TILES * 512).to(tl.int64)]
    given += [none + (scales + first * NUM_TILES * 32).to(tl.int64)]
    if GROUPS == 2:
        given += [none + (scales + second * NUM_TILES * 32).to(tl.int64)]
    given += [tl.where(place >= 0, states.to(tl.int64), 0)]
    return tl.inline_asm_elementwise(
        warp_products(GROUPS, DEPTH, WARPS, WAITS), constraints(GROUPS, WARPS), given,
        dtype=sum_types(GROUPS, WARPS), is_pure=False, pack=1,
    )  # fmt: skip


@jit(do_not_specialize=["num_rows"])
def _gated_few_kernel(
    hidden, numbers, scales, bias, chosen, out, num_rows, HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    IS_BY_ROUTE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, WARPS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch is `down`
    COUNT: tl.constexpr = 8 // WARPS
    dtype: tl.constexpr = out.dtype.element_ty
    thread, tile = tl.arange(0, 32 * WARPS), tl.program_id(0)
    row, side = thread % 32 // 4, thread % 4 * 2
    expert, place = _choice(chosen, tl.program_id(1), row, num_rows, NUM_CHOSEN, IS_BY_ROUTE)
    columns, biases = (), ()
    for pair in tl.static_range((COUNT + 1) // 2):
        column = _column(thread, tile * 32, pair, WARPS)
        columns += (column,)  # type: ignore[assignment]
        if HAS_BIAS:
            of_gate = bias + expert * 2 * WIDTH + column
            biases += (tl.load(of_gate).to(tl.float32), tl.load(of_gate + WIDTH).to(tl.float32))  # type: ignore[assignment]
    first = expert * (2 * WIDTH // 32) + tile
    sums = _sums(numbers, scales, first, first + WIDTH // 32, place, hidden + row * HIDDEN_ROW, 2, DEPTH, WARPS, False)
    for c in tl.static_range(COUNT):
        gate, up = sums[c], sums[COUNT + c]
        if HAS_BIAS:
            gate, up = gate + biases[c // 2 * 2], up + biases[c // 2 * 2 + 1]
        gated = joined_tiles(gate.to(dtype), up.to(dtype), KIND, ALPHA, LIMIT)
        its_row = side + c % 2
        its_place = _place_of(place, its_row)
        tl.store(out + (its_row * NUM_CHOSEN + its_place) * WIDTH + columns[c // 2], gated, mask=its_place >= 0)


@jit(do_not_specialize=["num_rows"])
def _down_few_kernel(
    inner, numbers, scales, bias, chosen, scores, out, num_rows, NUM_CHOSEN: tl.constexpr,
    IS_BY_ROUTE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr, WARPS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = 8 // WARPS
    PAIRS: tl.constexpr = (COUNT + 1) // 2
    dtype: tl.constexpr = out.dtype.element_ty
    thread, first_group = tl.arange(0, 32 * WARPS), tl.program_id(0) * GROUPS
    row, side = thread % 32 // 4, thread % 4 * 2
    # The launch of gate and up began after the choice, so the choice may be read before the wait.
    expert, place = _choice(chosen, tl.program_id(1), row, num_rows, NUM_CHOSEN, IS_BY_ROUTE)
    columns, biases, places, factors = (), (), (), ()
    for group in tl.static_range(GROUPS):
        for pair in tl.static_range(PAIRS):
            column = _column(thread, (first_group + group) * 32, pair, WARPS)
            columns += (column,)  # type: ignore[assignment]
            if HAS_BIAS:
                biases += (tl.load(bias + expert * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    for c in tl.static_range(2):
        its_place = _place_of(place, side + c)
        score = tl.load(
            scores + (side + c) * NUM_CHOSEN + its_place, mask=its_place >= 0, other=0.0, cache_modifier=".cg"
        )
        places += (its_place,)  # type: ignore[assignment]
        factors += (score.to(tl.float32),)  # type: ignore[assignment]
    first = expert * (WIDTH // 32) + first_group
    second = expert * (WIDTH // 32) + tl.minimum(first_group + 1, WIDTH // 32 - 1)
    states = inner + (row * NUM_CHOSEN + place) * DEPTH
    sums = _sums(numbers, scales, first, second, place, states, GROUPS, DEPTH, WARPS, IS_EARLY)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    for c in tl.static_range(COUNT * GROUPS):
        total, column = sums[c], columns[c // COUNT * PAIRS + c % COUNT // 2]
        if HAS_BIAS:
            total += biases[c // COUNT * PAIRS + c % COUNT // 2]
        scored = (total.to(dtype).to(tl.float32) * factors[c % 2]).to(dtype)
        part_row = places[c % 2] * num_rows + side + c % 2
        tl.store(out + part_row * WIDTH + column, scored, mask=(places[c % 2] >= 0) & (column < WIDTH))


def has_few_rows(hidden: Tensor, gate_up: Packed, down: Packed) -> bool:
    """Return whether `few_packed_rows` computes these experts: few rows in bfloat16 on a GPU, and small scales.

    Loads have 8 bytes, so rows must begin at multiples of them.
    """
    if len(hidden) > MAX_FEW_PACKED or hidden.dtype != torch.bfloat16 or IS_INTERPRETED:
        return False
    is_aligned = hidden.data_ptr() % 8 == 0 and hidden.stride(0) % 4 == 0
    return is_aligned and gate_up.has_small_scales and down.has_small_scales


def few_packed_rows(
    hidden: Tensor,
    gate_up: Packed,
    down: Packed,
    chosen: Tensor,
    scores: Tensor,
    gate: Gate,
    biases: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute `experts` of checked arguments in two launches, [C, R, hidden]."""
    num_experts, width, depth = down.shape
    num_rows, num_chosen = chosen.shape
    num_routes, shape = num_rows * num_chosen, few_packed_shape(num_rows)
    inner = torch.empty((num_routes, depth), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_chosen, num_rows, width), dtype=hidden.dtype, device=hidden.device)
    added = (hidden, hidden) if biases is None else biases
    is_by_route = num_routes <= num_experts
    num_indexes = num_routes if is_by_route else num_experts
    options = {
        "NUM_CHOSEN": num_chosen, "IS_BY_ROUTE": is_by_route, "HAS_BIAS": biases is not None, "enable_fp_fusion": False,
        **early(hidden.device),
    }  # fmt: skip
    _gated_few_kernel[(depth // GROUP, num_indexes)](
        hidden, gate_up.numbers, gate_up.scales, added[0], chosen, inner, num_rows, HIDDEN_ROW=hidden.stride(0),
        WIDTH=depth, DEPTH=width, WARPS=shape.gate_warps, num_warps=shape.gate_warps, **gate_options(gate), **options,
    )  # fmt: skip
    _down_few_kernel[(ceil_div(width, GROUP * shape.down_groups), num_indexes)](
        inner, down.numbers, down.scales, added[1], chosen, scores, out, num_rows, WIDTH=width, DEPTH=depth,
        GROUPS=shape.down_groups, WARPS=shape.down_warps, num_warps=shape.down_warps, **options,
    )  # fmt: skip
    return out
