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

from dflash_kernels.activation import SILU, Gate, gate_options, gate_ref, joined_tiles
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch_config import (
    IS_INTERPRETED,
    MAX_EXPERT_ROWS,
    ExpertsShape,
    ceil_div,
    check_dtypes,
    check_tensors,
    experts_shape,
    jit,
    packed_experts_shape,
    power_of_2,
    require,
    tl,
)
from dflash_kernels.mxfp4 import Packed, packed_product_tile, unpack

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


@jit
def all_routes(num_rows, NUM_CHOSEN: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr):
    """Return the index of each route, [TILE_T, TILE_P], and a mask of the existing routes."""
    row, place = tl.arange(0, TILE_T)[:, None], tl.arange(0, TILE_P)[None, :]
    return row * NUM_CHOSEN + place, (row < num_rows) & (place < NUM_CHOSEN)


@jit
def find_rows(chosen, index, num_rows, NUM_CHOSEN: tl.constexpr, IS_BY_ROUTE: tl.constexpr, TILE_T: tl.constexpr,
                TILE_P: tl.constexpr):  # fmt: skip
    """Return a program's expert, the number of rows that chose it, and each row's rank among them and its route.

    Rows that did not choose the expert have the rank -1. With one program per route, only the program of an expert's
    first route has rows.
    """
    route, is_route = all_routes(num_rows, NUM_CHOSEN, TILE_T, TILE_P)
    ids = tl.load(chosen + route, mask=is_route, other=-1).to(tl.int32)
    expert = index
    if IS_BY_ROUTE:
        expert = tl.load(chosen + index).to(tl.int32)
    its_route = tl.max(tl.where(ids == expert, route, -1), 1)  # a row chooses an expert at most once
    is_its = (its_route >= 0).to(tl.int32)
    count = tl.sum(is_its, 0)
    if IS_BY_ROUTE:
        first = tl.min(tl.where(its_route >= 0, its_route, TILE_T * NUM_CHOSEN), 0)
        count = tl.where(first == index, count, 0)
    rank = tl.where(its_route >= 0, tl.cumsum(is_its, 0) - 1, -1)
    return expert, count, rank, its_route


@jit
def _find_tile(ends, index, NUM_EXPERTS: tl.constexpr, TILE_E: tl.constexpr, TILE_R: tl.constexpr):
    """Return the expert of a tile of sorted routes, and the first route and the end of the tile.

    The tiles of an expert begin at its first route. Programs after the last tile get an empty one.
    """
    expert = tl.arange(0, TILE_E)
    end = tl.load(ends + expert, mask=expert < NUM_EXPERTS, other=0)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < NUM_EXPERTS), other=0)
    tiles = (end - begin + TILE_R - 1) // TILE_R
    tiles = tl.where(expert < NUM_EXPERTS, tiles, 0)
    upto = tl.cumsum(tiles, 0)
    is_its = (upto > index) & (upto - tiles <= index)
    first = tl.sum(tl.where(is_its, begin + (index - upto + tiles) * TILE_R, 0), 0)
    last = tl.sum(tl.where(is_its, end, 0), 0)
    return tl.sum(tl.where(is_its, expert, 0), 0), first, tl.minimum(last, first + TILE_R)


@jit
def at_ranks(values, rank, first, TILE_R: tl.constexpr):
    """Return the values [TILE_R] of the rows with the ranks from `first` on. Ranks without a row give 0."""
    is_at = rank[None, :] == (first + tl.arange(0, TILE_R))[:, None]
    return tl.sum(tl.where(is_at, values[None, :], 0), 1)


@jit
def _plain_product_tile(
    weight_rows, hidden_rows, is_column, is_row,
    DEPTH: tl.constexpr, TILE_C: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Multiply weight rows with hidden rows, given as pointers to their first elements: float32 [TILE_C, TILE_R]."""
    inner = tl.arange(0, TILE_K)
    acc = tl.zeros((TILE_C, TILE_R), tl.float32)
    for tile in range((DEPTH + TILE_K - 1) // TILE_K):
        begin = tile * TILE_K
        is_element, is_weight = is_row[:, None], is_column[:, None]
        if DEPTH % TILE_K:
            is_element = is_element & (begin + inner < DEPTH)[None, :]
            is_weight = is_weight & (begin + inner < DEPTH)[None, :]
        rows = tl.trans(tl.load(hidden_rows[:, None] + inner[None, :] + begin, mask=is_element, other=0.0))
        # Each weight is read once per step, so it should not displace other data in the cache.
        loaded = tl.load(
            weight_rows[:, None] + inner[None, :] + begin, mask=is_weight, other=0.0, eviction_policy="evict_first"
        )
        acc = tl.dot(loaded, rows, acc, input_precision="ieee")
    return acc


@jit
def _product_tile(
    weight, scales, expert, column, hidden_rows, is_column, is_row,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_PACKED: tl.constexpr, IS_FAST: tl.constexpr,
    TILE_C: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows `column` of an expert's weight with hidden rows, which are pointers: float32 [TILE_C, TILE_R]."""
    if IS_PACKED:
        acc = packed_product_tile(
            weight, scales, expert, column, hidden_rows, is_column, is_row, NUM_COLUMNS, DEPTH, IS_FAST, TILE_C, TILE_R
        )
    else:
        weight_rows = weight + (expert.to(tl.int64) * NUM_COLUMNS + column) * DEPTH
        acc = _plain_product_tile(weight_rows, hidden_rows, is_column, is_row, DEPTH, TILE_C, TILE_R, TILE_K)
    return acc


@jit(do_not_specialize=["num_rows"])
def _gated_experts_kernel(
    hidden, weight, scales, bias, chosen, order, ends, out, num_rows,
    HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_BY_ROUTE: tl.constexpr, IS_SORTED: tl.constexpr, IS_PACKED: tl.constexpr, IS_FAST: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    TILE_E: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_F: tl.constexpr,
    TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    if IS_SORTED:
        expert, begin, count = _find_tile(ends, tl.program_id(1), NUM_EXPERTS, TILE_E, TILE_R)
    else:
        begin = 0
        expert, count, rank, its_route = find_rows(
            chosen, tl.num_programs(1) - 1 - tl.program_id(1), num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
        )
    dtype = out.dtype.element_ty
    # Rows of the gate, then rows of `up`: one product with a tile size that suits tensor cores.
    side = tl.arange(0, 2 * TILE_F)
    out_column = tl.program_id(0) * TILE_F + tl.arange(0, TILE_F)
    is_column = tl.program_id(0) * TILE_F + side % TILE_F < WIDTH
    column = side // TILE_F * WIDTH + tl.program_id(0) * TILE_F + side % TILE_F
    for first in range(begin, count, TILE_R):
        is_row = first + tl.arange(0, TILE_R) < count
        if IS_SORTED:
            route = tl.load(order + first + tl.arange(0, TILE_R), mask=is_row, other=0).to(tl.int32)
        else:
            route = at_ranks(its_route, rank, first, TILE_R)
        hidden_rows = hidden + (route // NUM_CHOSEN).to(tl.int64) * HIDDEN_ROW
        acc = _product_tile(
            weight, scales, expert, column, hidden_rows, is_column, is_row,
            2 * WIDTH, DEPTH, IS_PACKED, IS_FAST, 2 * TILE_F, TILE_R, TILE_K,
        )  # fmt: skip
        if HAS_BIAS:
            added = tl.load(bias + expert.to(tl.int64) * 2 * WIDTH + column, mask=is_column, other=0.0)
            acc += added.to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, TILE_F, TILE_R)), (1, 2, 0)))
        gated = joined_tiles(gate.to(dtype), up.to(dtype), KIND, ALPHA, LIMIT)
        place = route[None, :].to(tl.int64) * WIDTH + out_column[:, None]
        tl.store(out + place, gated, mask=is_row[None, :] & (out_column < WIDTH)[:, None])


@jit(do_not_specialize=["num_rows"])
def _down_experts_kernel(
    hidden, weight, scales, bias, chosen, scores, order, ends, out, num_rows,
    NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, IS_BY_ROUTE: tl.constexpr,
    IS_SORTED: tl.constexpr, IS_PACKED: tl.constexpr, IS_FAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, TILE_E: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
    if IS_SORTED:
        expert, begin, count = _find_tile(ends, tl.program_id(1), NUM_EXPERTS, TILE_E, TILE_R)
    else:
        begin = 0
        # Load the scores together with the routes, so that both wait for memory at the same time.
        routes, is_route = all_routes(num_rows, NUM_CHOSEN, TILE_T, TILE_P)
        score_tile = tl.load(scores + routes, mask=is_route, other=0.0).to(tl.float32)
        expert, count, rank, its_route = find_rows(
            chosen, tl.num_programs(1) - 1 - tl.program_id(1), num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
        )
        its_score = tl.sum(tl.where(routes == its_route[:, None], score_tile, 0.0), 1)
    dtype = out.dtype.element_ty
    column = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    is_column = column < WIDTH
    for first in range(begin, count, TILE_R):
        is_row = first + tl.arange(0, TILE_R) < count
        if IS_SORTED:
            route = tl.load(order + first + tl.arange(0, TILE_R), mask=is_row, other=0).to(tl.int32)
            score = tl.load(scores + route, mask=is_row, other=0.0).to(tl.float32)
        else:
            route = at_ranks(its_route, rank, first, TILE_R)
            score = at_ranks(its_score, rank, first, TILE_R)
        hidden_rows = hidden + route.to(tl.int64) * DEPTH
        acc = _product_tile(
            weight, scales, expert, column, hidden_rows, is_column, is_row,
            WIDTH, DEPTH, IS_PACKED, IS_FAST, TILE_C, TILE_R, TILE_K,
        )  # fmt: skip
        if HAS_BIAS:
            added = tl.load(bias + expert.to(tl.int64) * WIDTH + column, mask=is_column, other=0.0)
            acc += added.to(tl.float32)[:, None]
        scored = (acc.to(dtype).to(tl.float32) * score[None, :]).to(dtype)
        part_row = (route % NUM_CHOSEN).to(tl.int64) * num_rows + route // NUM_CHOSEN
        place = part_row[None, :] * WIDTH + column[:, None]
        tl.store(out + place, scored, mask=is_row[None, :] & is_column[:, None])


def experts(
    hidden: Tensor,
    gate_up: Weight,
    down: Weight,
    chosen: Tensor,
    scores: Tensor,
    gate: Gate = SILU,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `experts_ref` with one part per chosen expert, in two launches.

    Many rows of packed weights take two launches more, which sort routes, and of plain weights use the reference.
    """
    is_packed = isinstance(down, Packed)
    if not _is_ours(hidden, gate_up, down):
        return experts_ref(hidden, gate_up, down, chosen, scores, gate, biases)
    weights = (*_tensors_of(gate_up), *_tensors_of(down))
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
    is_sorted = num_rows > MAX_EXPERT_ROWS
    is_fast = all(weight.has_small_scales for weight in (gate_up, down) if isinstance(weight, Packed))
    shape_of = packed_experts_shape if is_packed else experts_shape
    shape = shape_of(num_rows, num_chosen, num_experts, hidden.element_size(), hidden.device)
    inner = torch.empty((num_rows * num_chosen, depth), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_chosen, num_rows, width), dtype=hidden.dtype, device=hidden.device)
    options = {
        "IS_SORTED": is_sorted, "IS_PACKED": is_packed, "IS_FAST": is_fast, "HAS_BIAS": biases is not None,
        "NUM_EXPERTS": num_experts, "TILE_E": power_of_2(num_experts), **_options(shape, num_chosen, hidden.device),
    }  # fmt: skip
    order = ends = chosen
    num_programs = num_rows * num_chosen if shape.is_by_route else num_experts
    if is_sorted:
        sorted_ids, order = chosen.flatten().sort(stable=True)
        ends = _ends(sorted_ids, num_experts)
        num_programs = num_rows * num_chosen // shape.rows + num_experts
    added = (inner, inner) if biases is None else tuple(bias.contiguous() for bias in biases)
    _gated_experts_kernel[(ceil_div(depth, shape.columns // 2), num_programs)](
        hidden, *_with_scales(gate_up), added[0], chosen, order, ends, inner, num_rows,
        HIDDEN_ROW=hidden.stride(0), WIDTH=depth, DEPTH=width, TILE_F=shape.columns // 2,
        **gate_options(gate), **options,
    )  # fmt: skip
    _down_experts_kernel[(ceil_div(width, shape.columns), num_programs)](
        inner, *_with_scales(down), added[1], chosen, scores, order, ends, out, num_rows,
        WIDTH=width, DEPTH=depth, TILE_C=shape.columns, **options,
    )  # fmt: skip
    return out


def _tensors_of(weight: Weight) -> tuple[Tensor, ...]:
    return (weight.numbers, weight.scales) if isinstance(weight, Packed) else (weight,)


def _with_scales(weight: Weight) -> tuple[Tensor, Tensor]:
    """Return the two weight arguments of a launch. A word of scales is one integer."""
    if not isinstance(weight, Packed):
        return weight, weight
    return weight.numbers, weight.scales.view(torch.int32)


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
        "num_warps": shape.num_warps, "num_stages": shape.num_stages, "enable_fp_fusion": False, **early(device),
    }  # fmt: skip
