"""Packed experts in one launch: programs of `down` follow the programs of gate and up, and wait for their rows.

Two launches leave the GPU partly idle: the last programs of gate and up finish one after another, and the first ones of
`down` find their rows and wait for their first weights. In one launch, both overlap. A GPU begins programs in the order
of their numbers, so all programs that others wait for have begun before.

For few rows, programs that wait would take places unevenly from programs that work, and for many rows the waiting is
short beside the work. `JOINT_ROWS` has the numbers of rows for which one launch is faster.

Axis letters: T rows, E experts, C chosen experts per row, F inner width, P parts.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, jit, power_of_2, tl
from dflash_kernels.mixtures.expert_rows import down_rows, find_rows, find_scored_rows, gated_rows
from dflash_kernels.mixtures.mxfp4 import Packed
from dflash_kernels.products.activation import Gate, gate_options


@jit
def _tell(count, program_counts, index):
    """Count this program as done, if it has rows, so that others may read what it wrote."""
    if count > 0:
        tl.debug_barrier()  # all threads have written
        tl.atomic_add(program_counts + index, 1, sem="release")


@jit
def _wait(count, program_counts, index, NUM_PROGRAMS: tl.constexpr):
    """Wait until all programs of gate and up are done that write what this program reads."""
    if count > 0:
        while tl.load(program_counts + index, volatile=True) < NUM_PROGRAMS:
            pass
        tl.atomic_add(program_counts + index, 0, sem="acquire")
        tl.debug_barrier()


@jit
def _set_back(program_counts, num_programs, NUM_EXPERTS: tl.constexpr, TILE_N: tl.constexpr):
    """Count this program as done. The last one sets all counts to zero for the next launch."""
    if tl.atomic_add(program_counts + NUM_EXPERTS, 1, sem="acq_rel") == num_programs - 1:
        place = tl.arange(0, TILE_N)
        tl.store(program_counts + place, tl.zeros((TILE_N,), tl.int32), mask=place <= NUM_EXPERTS)


@jit(do_not_specialize=["num_rows"])
def _joint_experts_kernel(
    hidden, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, chosen, scores, inner, out,
    program_counts, num_rows,
    HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, IS_BY_ROUTE: tl.constexpr, IS_FAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, TILE_N: tl.constexpr, TILE_T: tl.constexpr,
    TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    TILE_F: tl.constexpr = TILE_C // 2
    GATE_TILES: tl.constexpr = (DEPTH + TILE_F - 1) // TILE_F
    DOWN_TILES: tl.constexpr = (WIDTH + TILE_C - 1) // TILE_C
    program = tl.program_id(0)
    num_indexes = tl.num_programs(0) // (GATE_TILES + DOWN_TILES)
    num_gated = num_indexes * GATE_TILES
    if program < num_gated:
        index = num_indexes - 1 - program // GATE_TILES
        expert, count, rank, its_route = find_rows(chosen, index, num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P)
        gated_rows(
            hidden, gate_up, gate_up_scales, gate_up_bias, chosen, inner, expert, 0, count, rank, its_route,
            program % GATE_TILES, HIDDEN_ROW, NUM_CHOSEN, DEPTH, WIDTH, False, True, IS_FAST, HAS_BIAS,
            KIND, ALPHA, LIMIT, TILE_R, TILE_F, TILE_K,
        )  # fmt: skip
        _tell(count, program_counts, index)
    else:
        index = num_indexes - 1 - (program - num_gated) // DOWN_TILES
        expert, count, rank, its_route, its_score = find_scored_rows(
            chosen, scores, index, num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
        )
        _wait(count, program_counts, index, GATE_TILES)
        down_rows(
            inner, down, down_scales, down_bias, scores, chosen, out, num_rows,
            expert, 0, count, rank, its_route, its_score, (program - num_gated) % DOWN_TILES,
            NUM_CHOSEN, WIDTH, DEPTH, False, True, IS_FAST, HAS_BIAS, TILE_R, TILE_C, TILE_K,
        )  # fmt: skip
        _set_back(program_counts, num_indexes * DOWN_TILES, NUM_EXPERTS, TILE_N)


def joint_experts(
    hidden: Tensor,
    gate_up: Packed,
    down: Packed,
    chosen: Tensor,
    scores: Tensor,
    gate: Gate,
    biases: tuple[Tensor, Tensor],
    columns: int,
    num_indexes: int,
    options: dict[str, object],
) -> Tensor:
    """Compute `experts` of checked arguments in one launch, [P, T, hidden].

    columns      of a tile
    num_indexes  programs per tile of columns: one per route or expert
    options      launch options of both products
    """
    num_experts, width, depth = down.shape
    num_rows, num_chosen = chosen.shape
    inner = torch.empty((num_rows * num_chosen, depth), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_chosen, num_rows, width), dtype=hidden.dtype, device=hidden.device)
    num_programs = num_indexes * (ceil_div(depth, columns // 2) + ceil_div(width, columns))
    _joint_experts_kernel[(num_programs,)](
        hidden, gate_up.numbers, gate_up.scales, biases[0], down.numbers, down.scales, biases[1],
        chosen, scores, inner, out, down.program_counts, num_rows,
        HIDDEN_ROW=hidden.stride(0), WIDTH=width, DEPTH=depth,
        TILE_N=power_of_2(num_experts + 1), TILE_C=columns, **gate_options(gate), **options,
    )  # fmt: skip
    return out
