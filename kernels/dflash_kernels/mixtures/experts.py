"""Experts of a mixture-of-experts layer for few rows, as in decode steps: each chosen weight is read once.

The router chooses a few of many experts for each row. A route is a row together with one of its chosen experts. There
is one program per expert and tile of columns. It finds the rows that chose its expert, and returns if no row did.
Therefore nothing is sorted. If there are fewer routes than experts, there is one program per route instead. Then the
program of an expert's first route computes all rows of the expert.

For many rows, routes are sorted by expert, and a program computes a tile of an expert's routes. Only packed weights are
multiplied in this way: for plain weights, torch's grouped products are as fast.

The output of each route stays a separate part. The next norm adds up the parts of a row, likeliest expert first. The
sum therefore does not depend on the order in which programs run.

Shared experts are experts that every row chooses (`expert_choice.py`), so they cost no launch of their own. They have
the last ids: their programs have the most rows, and begin first.

Axis letters: T rows, E experts, C chosen experts per row, F inner width, P parts.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import IS_INTERPRETED, ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.mixtures.expert_rows import down_rows, find_rows, find_scored_rows, find_tile, gated_rows
from dflash_kernels.mixtures.few_packed_rows import few_packed_rows, has_few_rows
from dflash_kernels.mixtures.joint_experts import joint_experts
from dflash_kernels.mixtures.mixture_config import (
    JOINT_ROWS,
    MAX_EXPERT_ROWS,
    ExpertsShape,
    experts_shape,
    packed_experts_shape,
    takes_row,
)
from dflash_kernels.mixtures.mxfp4 import Packed, unpack
from dflash_kernels.mixtures.row_experts import row_experts
from dflash_kernels.mixtures.warpgroup_experts import has_warpgroup_rows, warpgroup_experts
from dflash_kernels.products.activation import SILU, Gate, gate_options, gate_ref

Weight = Tensor | Packed


def experts_ref(
    hidden: Tensor,
    gate_up: Weight,
    down: Weight,
    chosen: Tensor,
    scores: Tensor,
    gate: Gate = SILU,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return down(gate(x) * up(x)) * score of each row's experts, as parts that the caller must add up.

    hidden   [T, hidden]
    gate_up  [E, 2 F, hidden]   gate rows, then up rows; may be packed
    down     [E, hidden, F]     may be packed
    chosen   [T, C] int64       different ids within a row
    scores   [T, C]             in the dtype of `hidden`, or float32
    gate     joins gate and up
    biases   of `gate_up` [E, 2 F] and of `down` [E, hidden], or None
    Returns [P, T, hidden]. The output of an expert is rounded to the model's dtype before and after the score.

    The reference sorts rows by expert and computes two grouped products. It reads no value on the host.
    """
    num_chosen = chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    first, second = (
        unpack(weight, hidden.dtype) if isinstance(weight, Packed) else weight for weight in (gate_up, down)
    )
    ends = _ends(experts, len(second))
    added = (None, None) if biases is None else tuple(bias[experts] for bias in biases)
    inner = gate_ref(_grouped(hidden[order // num_chosen], first, ends, added[0]), gate)
    outputs = _grouped(inner, second, ends, added[1])
    scored = (outputs * scores.flatten()[order, None]).to(outputs.dtype)
    placed = torch.empty_like(outputs).index_copy_(0, order, scored)
    return placed.view(*chosen.shape, -1).sum(dim=1)[None]


def _ends(experts: Tensor, num_experts: int) -> Tensor:
    """Return the end of each expert's routes among sorted ids, [E] int32."""
    return torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True, out_int32=True)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows, sorted by expert, with the weights of their experts."""
    product = functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return product if bias is None else product + bias


@jit(do_not_specialize=["num_rows"])
def _gated_experts_kernel(
    hidden, weight, scales, bias, chosen, order, ends, out, num_rows,
    HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_BY_ROUTE: tl.constexpr, IS_SORTED: tl.constexpr, IS_PACKED: tl.constexpr, IS_FAST: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    TILE_E: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_F: tl.constexpr,
    TILE_K: tl.constexpr, NUM_PROGRAMS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    if IS_SORTED:
        expert, begin, count = find_tile(ends, tl.program_id(1), NUM_EXPERTS, TILE_E, TILE_R)
        rank, its_route = expert, expert
    else:
        begin, index = tl.program_id(2) * TILE_R, tl.num_programs(1) - 1 - tl.program_id(1)
        expert, count, rank, its_route = find_rows(chosen, index, num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P)
    gated_rows(
        hidden, weight, scales, bias, order, out, expert, begin, count, rank, its_route, tl.program_id(0),
        HIDDEN_ROW, NUM_CHOSEN, WIDTH, DEPTH, IS_SORTED, IS_PACKED, IS_FAST, HAS_BIAS, KIND, ALPHA, LIMIT,
        TILE_R, TILE_F, TILE_K, NUM_PROGRAMS,
    )  # fmt: skip


@jit(do_not_specialize=["num_rows"])
def _down_experts_kernel(
    hidden, weight, scales, bias, chosen, scores, order, ends, out, num_rows,
    NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, IS_BY_ROUTE: tl.constexpr,
    IS_SORTED: tl.constexpr, IS_PACKED: tl.constexpr, IS_FAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TILE_E: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, TILE_K: tl.constexpr, NUM_PROGRAMS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    if IS_SORTED:
        expert, begin, count = find_tile(ends, tl.program_id(1), NUM_EXPERTS, TILE_E, TILE_R)
        rank, its_route, its_score = expert, expert, expert
    else:
        begin, index = tl.program_id(2) * TILE_R, tl.num_programs(1) - 1 - tl.program_id(1)
        expert, count, rank, its_route, its_score = find_scored_rows(
            chosen, scores, index, num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
        )
    down_rows(
        hidden, weight, scales, bias, scores, order, out, num_rows,
        expert, begin, count, rank, its_route, its_score, tl.program_id(0),
        NUM_CHOSEN, WIDTH, DEPTH, IS_SORTED, IS_PACKED, IS_FAST, HAS_BIAS, TILE_R, TILE_C, TILE_K, NUM_PROGRAMS,
    )  # fmt: skip


def experts(
    hidden: Tensor,
    gate_up: Weight,
    down: Weight,
    chosen: Tensor,
    scores: Tensor,
    gate: Gate = SILU,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `experts_ref` with one part per chosen expert, in two launches, or one for packed weights and few rows.

    Dozens of rows of packed weights take one launch more, which arranges rows, and many rows two, which sort routes.
    Many rows of plain weights use the reference.
    """
    is_packed = isinstance(down, Packed)
    if not _is_ours(hidden, gate_up, down):
        return experts_ref(hidden, gate_up, down, chosen, scores, gate, biases)
    weights = (*_with_scales(gate_up), *_with_scales(down))
    check_tensors(hidden, *weights, chosen, scores, *(biases or ()))
    check_dtypes(hidden, *(biases or ()), *(() if is_packed else weights))
    require(scores.dtype in (hidden.dtype, torch.float32), "scores", "the dtype of `hidden`, or float32")
    num_experts, width, depth = down.shape
    num_rows, num_chosen = chosen.shape
    require(hidden.shape == (num_rows, width), "hidden", "one row per row of `chosen`, as wide as `down`")
    require(scores.shape == chosen.shape, "scores", "the shape of `chosen`")
    require(tuple(gate_up.shape) == (num_experts, 2 * depth, width), "gate_up", "the experts and widths of `down`")
    require(hidden.stride(1) == 1, "hidden", "contiguous rows")
    are_contiguous = all(tensor.is_contiguous() for tensor in (*weights, chosen, scores))
    require(are_contiguous, "gate_up, down, chosen, scores", "contiguous memory")
    shapes = (num_experts, 2 * depth), (num_experts, width)
    require(biases is None or (biases[0].shape, biases[1].shape) == shapes, "biases", "one number per row of weights")
    biases = None if biases is None else (biases[0].contiguous(), biases[1].contiguous())
    is_row = biases is None and takes_row(num_rows, (width, depth), hidden.device)
    if is_row and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        return row_experts(hidden, gate_up, down, chosen, scores, gate)
    if isinstance(gate_up, Packed) and isinstance(down, Packed) and has_few_rows(hidden, gate_up, down):
        return few_packed_rows(hidden, gate_up, down, chosen, scores, gate, biases)
    if isinstance(gate_up, Packed) and isinstance(down, Packed) and has_warpgroup_rows(hidden, gate_up, down):
        return warpgroup_experts(hidden, gate_up, down, chosen, scores, gate, biases)
    shape_of = packed_experts_shape if is_packed else experts_shape
    shape = shape_of(num_rows, num_chosen, num_experts, hidden.element_size(), hidden.device)
    options = {
        "IS_FAST": all(weight.has_small_scales for weight in (gate_up, down) if isinstance(weight, Packed)),
        "HAS_BIAS": biases is not None, "NUM_EXPERTS": num_experts, **_options(shape, num_chosen, hidden.device),
    }  # fmt: skip
    added = (hidden, hidden) if biases is None else biases
    num_indexes = num_rows * num_chosen if shape.is_by_route else num_experts
    rest = (chosen, scores, gate, added)
    if isinstance(gate_up, Packed) and isinstance(down, Packed) and num_rows in JOINT_ROWS:
        return joint_experts(hidden, gate_up, down, *rest, shape.columns, num_indexes, options)
    return _two_launches(hidden, gate_up, down, *rest, shape, num_indexes, options)


def _two_launches(
    hidden: Tensor,
    gate_up: Weight,
    down: Weight,
    chosen: Tensor,
    scores: Tensor,
    gate: Gate,
    biases: tuple[Tensor, Tensor],
    shape: ExpertsShape,
    num_indexes: int,
    options: dict[str, object],
) -> Tensor:
    """Compute `experts` with one launch for gate and up and one for `down`, after two that sort many routes."""
    num_experts, width, depth = down.shape
    num_rows, num_chosen = chosen.shape
    inner = torch.empty((num_rows * num_chosen, depth), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_chosen, num_rows, width), dtype=hidden.dtype, device=hidden.device)
    is_sorted = num_rows > MAX_EXPERT_ROWS
    order = ends = chosen
    if is_sorted:
        sorted_ids, order = chosen.flatten().sort(stable=True)
        ends = _ends(sorted_ids, num_experts)
        num_indexes = num_rows * num_chosen // shape.rows + num_experts
    num_programs = 1 if is_sorted else min(shape.num_programs, ceil_div(num_rows, shape.rows))
    options = {
        "IS_SORTED": is_sorted, "IS_PACKED": isinstance(down, Packed), "TILE_E": power_of_2(num_experts),
        "NUM_PROGRAMS": num_programs, **options,
    }  # fmt: skip
    _gated_experts_kernel[(ceil_div(depth, shape.columns // 2), num_indexes, num_programs)](
        hidden, *_with_scales(gate_up), biases[0], chosen, order, ends, inner, num_rows,
        HIDDEN_ROW=hidden.stride(0), WIDTH=depth, DEPTH=width, TILE_F=shape.columns // 2,
        **gate_options(gate), **options,
    )  # fmt: skip
    _down_experts_kernel[(ceil_div(width, shape.columns), num_indexes, num_programs)](
        inner, *_with_scales(down), biases[1], chosen, scores, order, ends, out, num_rows,
        WIDTH=width, DEPTH=depth, TILE_C=shape.columns, **options,
    )  # fmt: skip
    return out


def _with_scales(weight: Weight) -> tuple[Tensor, Tensor]:
    """Return the two weight arguments of a launch."""
    return (weight.numbers, weight.scales) if isinstance(weight, Packed) else (weight, weight)


def _is_ours(hidden: Tensor, gate_up: Weight, down: Weight) -> bool:
    """Return whether our kernels compute these experts: few rows, or packed weights that they can unpack."""
    if not len(hidden) or not (hidden.element_size() == 2 or IS_INTERPRETED):
        return False
    return isinstance(down, Packed) or len(hidden) <= MAX_EXPERT_ROWS


def _options(shape: ExpertsShape, num_chosen: int, device: torch.device) -> dict[str, object]:
    """Return the options of both launches."""
    return {
        "NUM_CHOSEN": num_chosen, "IS_BY_ROUTE": shape.is_by_route, "TILE_T": shape.sought_rows,
        "TILE_P": power_of_2(num_chosen), "TILE_R": shape.rows, "TILE_K": shape.depth,
        "num_warps": shape.num_warps, "num_stages": shape.num_stages, "maxnreg": shape.max_registers,
        "enable_fp_fusion": False, **early(device),
    }  # fmt: skip
