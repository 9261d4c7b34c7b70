"""Packed experts of some dozens of rows: the products of `warpgroup_products.py` and what surrounds them.

There are three launches: the rows of each expert are arranged, then gate and up are multiplied, then `down`. A program
multiplies 128 rows of a weight with a tile of an expert's rows. It loads its first weights before it waits for rows. If
an expert has more than a tile of rows, other programs read its weights again, from the cache.

Programs of `down` begin while gate and up still run, and wait only for the gate and up of their tile. Programs of gate
and up count themselves in the table of tiles.

Axis letters: T rows, C chosen experts per row, R rows of a tile, H threads.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, wait_for_launches_before
from dflash_kernels.launch import IS_INTERPRETED, ceil_div, jit, tl
from dflash_kernels.mixtures.arranged_rows import arrange_rows, arranged_width, place_in_tile
from dflash_kernels.mixtures.mixture_config import WARPGROUP_ROWS, WARPGROUP_STAGES, WARPGROUP_TILE
from dflash_kernels.mixtures.mxfp4 import Packed
from dflash_kernels.mixtures.warpgroup_products import WARPS, constraints, sum_types, warpgroup_products
from dflash_kernels.products.activation import Gate, gate_options, joined_tiles

GATED_COLUMNS, DOWN_COLUMNS = 64, 128
"""Columns of the output of a program."""


@jit
def _addresses(numbers, scales, first, second, DEPTH: tl.constexpr):
    """Return the addresses of each thread's numbers in both halves, and of its scale, each [H].

    `first` and `second` [H] are the groups of 32 weight rows of a thread in both halves.
    """
    NUM_TILES: tl.constexpr = (DEPTH + 127) // 128
    thread = tl.arange(0, 128)
    warp, lane = thread // 32, thread % 32
    within, slot = warp % 2 * 256 + lane * 4, lane % 4
    group = tl.where(slot >= 2, second, first)
    of_first = numbers + first.to(tl.int64) * (NUM_TILES * 512) + within
    of_second = numbers + second.to(tl.int64) * (NUM_TILES * 512) + within
    of_scale = scales + group.to(tl.int64) * (NUM_TILES * 32) + warp % 2 * 16 + slot % 2 * 8 + lane // 4
    return of_first.to(tl.int64), of_second.to(tl.int64), of_scale.to(tl.int64)


@jit
def _sums(
    addresses, arranged, entry,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, NUM_WRITERS: tl.constexpr,
):  # fmt: skip
    """Multiply two halves of 64 weight rows with a tile of rows: R sums, first place and number of rows, each [H].

    `entry` points to the program's tile in the table.
    """
    none = tl.zeros((128,), tl.int64)
    given = [addresses[0], addresses[1], addresses[2], none + arranged.to(tl.int64), none + entry.to(tl.int64)]
    return tl.inline_asm_elementwise(
        warpgroup_products(ROWS, DEPTH, STAGES, NUM_WRITERS), constraints(ROWS), given, dtype=sum_types(ROWS),
        is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _of_lane(value, lane):
    """Return the value that another lane has, [H]."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1F, 0xFFFFFFFF;", "=r,r,r", [value, lane], dtype=value.dtype, is_pure=False,
        pack=1,
    )  # fmt: skip


@jit
def _tell(entry, count):
    """Count this program as done, so that programs of `down` may copy what it wrote."""
    if count > 0:
        tl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()  # all threads have written
        tl.atomic_add(entry + 3, 1, sem="release")


@jit
def _gated_warpgroup_kernel(
    numbers, scales, bias, tiles, arranged, inner, NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = inner.dtype.element_ty
    INNER_WIDTH: tl.constexpr = (WIDTH + 63) // 64 * 64
    GROUPS: tl.constexpr = WIDTH // 32
    thread, index = tl.arange(0, 128), tl.program_id(1)
    warp, lane_row, pair = thread // 32, thread % 32 // 4, thread % 4 * 2
    expert = index
    if index >= NUM_EXPERTS:
        wait_for_launches_before(IS_EARLY)
        expert = tl.load(tiles + 4 * index, cache_modifier=".cg")
    group = tl.minimum(tl.program_id(0) * 2 + warp // 2, GROUPS - 1)
    first = expert * (2 * GROUPS) + group
    addresses = _addresses(numbers, scales, first, first + GROUPS, DEPTH)
    column = tl.program_id(0) * 64 + warp * 16 + lane_row
    biases = ()
    for side in tl.static_range(2):
        if HAS_BIAS:
            its_column = column + 8 * side
            of_gate, is_column = bias + expert * 2 * WIDTH + its_column, its_column < WIDTH
            biases += (tl.load(of_gate, mask=is_column, other=0.0),)  # type: ignore[assignment]
            biases += (tl.load(of_gate + WIDTH, mask=is_column, other=0.0),)  # type: ignore[assignment]
    sums = _sums(addresses, arranged, tiles + 4 * index, ROWS, DEPTH, STAGES, 0)
    begin, count = sums[ROWS], tl.max(sums[ROWS + 1], 0)
    wait_for_launches_before(IS_EARLY)
    for i in tl.static_range(ROWS // 4):
        row = 8 * (i // 2) + pair + i % 2
        if 8 * (i // 2) < count:
            for side in tl.static_range(2):
                its_column = column + 8 * side
                gate = sums[4 * (i // 2) + 2 * side + i % 2]
                up = sums[ROWS // 2 + 4 * (i // 2) + 2 * side + i % 2]
                if HAS_BIAS:
                    gate, up = gate + biases[2 * side].to(tl.float32), up + biases[2 * side + 1].to(tl.float32)
                gated = joined_tiles(gate.to(dtype), up.to(dtype), KIND, ALPHA, LIMIT)
                if WIDTH % 64:
                    gated = tl.where(its_column < WIDTH, gated, 0.0).to(dtype)
                place = inner + begin * INNER_WIDTH + place_in_tile(row, its_column, count)
                tl.store(place, gated, mask=(row < count) & (its_column < INNER_WIDTH))
    _tell(tiles + 4 * index, count)


@jit(do_not_specialize=["num_rows"])
def _down_warpgroup_kernel(
    numbers, scales, bias, tiles, routes, scores, arranged, out, num_rows, NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    GROUPS: tl.constexpr = WIDTH // 32
    thread, expert = tl.arange(0, 128), tl.program_id(1)
    warp, lane_row, pair = thread // 32, thread % 32 // 4, thread % 4 * 2
    entry = tiles + 4 * expert
    # Gate and up began after the rows were arranged, so the table and the scores may be read before the wait.
    if expert >= NUM_EXPERTS:
        expert = tl.load(entry, cache_modifier=".cg")
    begin, count = tl.load(entry + 1, cache_modifier=".cg"), tl.load(entry + 2, cache_modifier=".cg")
    is_row = thread % 32 < count
    route = tl.load(routes + begin + thread % 32, mask=is_row, other=0, cache_modifier=".cg")
    score = tl.load(scores + route, mask=is_row, other=0.0).to(tl.float32)
    part_row = (route % NUM_CHOSEN) * num_rows + route // NUM_CHOSEN
    group = tl.program_id(0) * 4 + warp // 2
    first = expert * GROUPS + tl.minimum(group, GROUPS - 1)
    second = expert * GROUPS + tl.minimum(group + 2, GROUPS - 1)
    addresses = _addresses(numbers, scales, first, second, DEPTH)
    column = tl.program_id(0) * 128 + warp * 16 + lane_row
    biases = ()
    for k in tl.static_range(4):
        if HAS_BIAS:
            its_column = column + k // 2 * 64 + 8 * (k % 2)
            biases += (tl.load(bias + expert * WIDTH + its_column, mask=its_column < WIDTH, other=0.0),)  # type: ignore[assignment]
    NUM_WRITERS: tl.constexpr = (DEPTH + 63) // 64
    sums = _sums(addresses, arranged, entry, ROWS, DEPTH, STAGES, NUM_WRITERS)
    wait_for_launches_before(IS_EARLY)
    for i in tl.static_range(ROWS // 4):
        row = 8 * (i // 2) + pair + i % 2
        if 8 * (i // 2) < count:
            factor = _of_lane(score, row)
            its_out = out + _of_lane(part_row, row).to(tl.int64) * WIDTH
            for k in tl.static_range(4):
                its_column = column + k // 2 * 64 + 8 * (k % 2)
                total = sums[k // 2 * (ROWS // 2) + 4 * (i // 2) + 2 * (k % 2) + i % 2]
                if HAS_BIAS:
                    total += biases[k].to(tl.float32)
                scored = (total.to(dtype).to(tl.float32) * factor).to(dtype)
                tl.store(its_out + its_column, scored, mask=(row < count) & (its_column < WIDTH))


def has_warpgroup_rows(hidden: Tensor, gate_up: Packed, down: Packed) -> bool:
    """Return whether `warpgroup_experts` computes these experts: `WARPGROUP_ROWS` rows on a Hopper GPU, small scales.

    Pairs of columns are loaded as words.
    """
    if len(hidden) not in WARPGROUP_ROWS or hidden.dtype != torch.bfloat16 or IS_INTERPRETED:
        return False
    is_hopper = hidden.device.type != "cuda" or torch.cuda.get_device_capability(hidden.device) == (9, 0)
    is_aligned = hidden.data_ptr() % 4 == 0 and hidden.stride(0) % 2 == 0
    return is_hopper and is_aligned and gate_up.has_small_scales and down.has_small_scales


def warpgroup_experts(
    hidden: Tensor,
    gate_up: Packed,
    down: Packed,
    chosen: Tensor,
    scores: Tensor,
    gate: Gate,
    biases: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute `experts` of checked arguments in three launches, [C, T, hidden]."""
    num_experts, width, depth = down.shape
    num_rows, num_chosen = chosen.shape
    arranged = arrange_rows(hidden, chosen, num_experts, WARPGROUP_TILE)
    inner = torch.empty((num_rows * num_chosen, arranged_width(depth)), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_chosen, num_rows, width), dtype=hidden.dtype, device=hidden.device)
    added = (hidden, hidden) if biases is None else biases
    options = {
        "NUM_EXPERTS": num_experts, "HAS_BIAS": biases is not None, "ROWS": WARPGROUP_TILE, "STAGES": WARPGROUP_STAGES,
        "num_warps": WARPS, "maxnreg": 128, "enable_fp_fusion": False, **early(hidden.device),
    }  # fmt: skip
    num_tiles = len(arranged.tiles)
    _gated_warpgroup_kernel[(ceil_div(depth, GATED_COLUMNS), num_tiles)](
        gate_up.numbers, gate_up.scales, added[0], arranged.tiles, arranged.rows, inner, WIDTH=depth, DEPTH=width,
        **gate_options(gate), **options,
    )  # fmt: skip
    _down_warpgroup_kernel[(ceil_div(width, DOWN_COLUMNS), num_tiles)](
        down.numbers, down.scales, added[1], arranged.tiles, arranged.routes, scores, inner, out, num_rows,
        NUM_CHOSEN=num_chosen, WIDTH=width, DEPTH=depth, **options,
    )  # fmt: skip
    return out
