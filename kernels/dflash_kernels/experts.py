"""Experts of few rows, as decode steps have them: the weights of those that are chosen are read once, and little else.

A row's router chooses a few of many experts, so what a step reads is a part of the weights that nobody knows before.
Here a program looks for its own rows: it is told an expert, finds the rows that chose it, and ends at once if there are
none. So nothing is sorted, and nothing but the routes is handed on. There is a program for each expert and tile of its
columns or, while rows take fewer routes than there are experts, for each route: the first to an expert does the work.

What an expert makes of a row is left in parts, one for each place of the row's routes. The norm after it adds them up,
the likeliest first, whatever ran first.

Axis letters: T rows, E experts, C chosen of them by each row, F inner width, P parts.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.activation import gate_tiles, silu_mul_ref
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch_config import (
    IS_INTERPRETED,
    MAX_EXPERT_ROWS,
    ROUTED_ROWS,
    ExpertsShape,
    ceil_div,
    check_dtypes,
    check_tensors,
    experts_shape,
    jit,
    power_of_2,
    require,
    tl,
)
from dflash_kernels.product import product_parts
from dflash_kernels.rope_norm import sum_parts


def choose_experts_ref(
    hidden: Tensor, router: Tensor, num_chosen: int, has_normalised_scores: bool
) -> tuple[Tensor, Tensor]:
    """The experts of each row that its router finds likeliest, and their scores.

    hidden  [T, hidden]
    router  [E, hidden]
    Returns ids [T, C] int64, the likeliest first, and scores [T, C] in the dtype of `hidden`: softmax in float32 of
    logits that are rounded to that dtype, among all experts or, normalised, among the chosen. Of equals the kernel
    takes the one with the lowest id first; which one torch.topk takes is not stated.
    """
    logits = functional.linear(hidden, router)
    scores, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(num_chosen, dim=-1)
    if has_normalised_scores:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return chosen, scores.to(logits.dtype)


def experts_ref(hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)) of each row's experts by their scores, as parts that are still to be added up.

    hidden   [T, hidden]
    gate_up  [E, 2 F, hidden]   the gate's rows first
    down     [E, hidden, F]
    chosen   [T, C] int64       ids that differ within a row
    scores   [T, C]
    Returns [P, T, hidden]. What an expert makes of a row is rounded to the model's dtype, and again by its score.

    All experts are two products of rows sorted by expert; nothing here looks at a value on the host.
    """
    num_chosen = chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(len(down), device=experts.device), right=True, out_int32=True)
    inner = silu_mul_ref(functional.grouped_mm(hidden[order // num_chosen], gate_up.transpose(1, 2), offs=ends))
    outputs = functional.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    placed = torch.empty_like(outputs).index_copy_(0, order, outputs * scores.flatten()[order, None])
    return placed.view(*chosen.shape, -1).sum(dim=1)[None]


@jit(do_not_specialize=["num_rows", "part_stride"])
def _choose_kernel(
    logits, chosen, scores, num_rows, part_stride,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, IS_NORMALISED: tl.constexpr, NUM_PARTS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_E: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    dtype = scores.dtype.element_ty
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    expert, place = tl.arange(0, TILE_E), tl.arange(0, TILE_C)
    is_row, is_expert = row[:, None] < num_rows, expert[None, :] < NUM_EXPERTS
    offsets = row[:, None] * NUM_EXPERTS + expert[None, :]
    logit = sum_parts(logits, offsets, is_row & is_expert, part_stride.to(tl.int64), NUM_PARTS, dtype).to(tl.float32)
    logit = tl.where(is_expert, logit, float("-inf"))
    weight = tl.exp(logit - tl.max(logit, 1)[:, None])
    probs = tl.div_rn(weight, tl.broadcast_to(tl.sum(weight, 1)[:, None], (TILE_R, TILE_E)))
    # The order of floats that are not negative is that of their bits, which NaN is above. What is taken is -1, and what
    # fills up a tile comes last, since of equals the lowest id is taken.
    left = probs.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    ids, best = tl.zeros((TILE_R, TILE_C), tl.int32), tl.zeros((TILE_R, TILE_C), tl.int32)
    for index in tl.static_range(NUM_CHOSEN):
        highest = tl.max(left, 1)[:, None]
        taken = tl.min(tl.where(left == highest, expert[None, :], TILE_E), 1)[:, None]
        ids, best = tl.where(place[None, :] == index, taken, ids), tl.where(place[None, :] == index, highest, best)
        left = tl.where(expert[None, :] == taken, -1, left)
    score = best.to(tl.float32, bitcast=True)
    if IS_NORMALISED:
        score = tl.div_rn(score, tl.broadcast_to(tl.sum(score, 1)[:, None], (TILE_R, TILE_C)))
    is_place = is_row & (place[None, :] < NUM_CHOSEN)
    places = row[:, None] * NUM_CHOSEN + place[None, :]
    tl.store(chosen + places, ids.to(tl.int64), mask=is_place)
    tl.store(scores + places, score.to(dtype), mask=is_place)


@jit
def _all_routes(num_rows, NUM_CHOSEN: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr):
    """Rows by places in their routes, [TILE_T, TILE_P], and which of them there are."""
    row, place = tl.arange(0, TILE_T)[:, None], tl.arange(0, TILE_P)[None, :]
    return row * NUM_CHOSEN + place, (row < num_rows) & (place < NUM_CHOSEN)


@jit
def _find_rows(chosen, index, num_rows, NUM_CHOSEN: tl.constexpr, IS_BY_ROUTE: tl.constexpr, TILE_T: tl.constexpr,
                TILE_P: tl.constexpr):  # fmt: skip
    """The expert of a program, and the rows that chose it: how many, and for each its rank among them and its route.

    The rank of other rows is -1. By route, there are none for a program whose expert has a route before its own.
    """
    route, is_route = _all_routes(num_rows, NUM_CHOSEN, TILE_T, TILE_P)
    ids = tl.load(chosen + route, mask=is_route, other=-1).to(tl.int32)
    expert = index
    if IS_BY_ROUTE:
        expert = tl.load(chosen + index).to(tl.int32)
    its_route = tl.max(tl.where(ids == expert, route, -1), 1)  # a row has an expert in one place at most
    is_its = (its_route >= 0).to(tl.int32)
    count = tl.sum(is_its, 0)
    if IS_BY_ROUTE:
        first = tl.min(tl.where(its_route >= 0, its_route, TILE_T * NUM_CHOSEN), 0)
        count = tl.where(first == index, count, 0)
    rank = tl.where(its_route >= 0, tl.cumsum(is_its, 0) - 1, -1)
    return expert, count, rank, its_route


@jit
def _at_ranks(values, rank, first, TILE_R: tl.constexpr):
    """The values [TILE_T] of rows with the ranks `first` and following, [TILE_R]; 0 where there are none."""
    is_at = rank[None, :] == (first + tl.arange(0, TILE_R))[:, None]
    return tl.sum(tl.where(is_at, values[None, :], 0), 1)


@jit
def _product_tile(
    weight_rows, hidden_rows, is_column, is_row,
    DEPTH: tl.constexpr, TILE_C: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Rows of the weight by rows, given as pointers to their first elements -> [TILE_C, TILE_R] in float32."""
    inner = tl.arange(0, TILE_K)
    acc = tl.zeros((TILE_C, TILE_R), tl.float32)
    for tile in range((DEPTH + TILE_K - 1) // TILE_K):
        begin = tile * TILE_K
        is_element, is_weight = is_row[:, None], is_column[:, None]
        if DEPTH % TILE_K:
            is_element = is_element & (begin + inner < DEPTH)[None, :]
            is_weight = is_weight & (begin + inner < DEPTH)[None, :]
        rows = tl.trans(tl.load(hidden_rows[:, None] + inner[None, :] + begin, mask=is_element, other=0.0))
        # Each weight is read once a step: keeping it would only push out what is read again.
        loaded = tl.load(
            weight_rows[:, None] + inner[None, :] + begin, mask=is_weight, other=0.0, eviction_policy="evict_first"
        )
        acc = tl.dot(loaded, rows, acc, input_precision="ieee")
    return acc


@jit(do_not_specialize=["num_rows"])
def _gated_experts_kernel(
    hidden, weight, chosen, out, num_rows,
    HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_BY_ROUTE: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_F: tl.constexpr,
    TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    expert, count, rank, its_route = _find_rows(
        chosen, tl.program_id(1), num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
    )
    dtype = out.dtype.element_ty
    # Rows of the gate, then the same of `up`: one product of as many as tensor cores like best.
    side = tl.arange(0, 2 * TILE_F)
    column = tl.program_id(0) * TILE_F + side % TILE_F
    is_column = column < WIDTH
    weight_rows = weight + (expert.to(tl.int64) * 2 * WIDTH + side // TILE_F * WIDTH + column) * DEPTH
    out_column = tl.program_id(0) * TILE_F + tl.arange(0, TILE_F)
    for first in range(0, count, TILE_R):
        route = _at_ranks(its_route, rank, first, TILE_R)
        is_row = first + tl.arange(0, TILE_R) < count
        hidden_rows = hidden + (route // NUM_CHOSEN).to(tl.int64) * HIDDEN_ROW
        acc = _product_tile(weight_rows, hidden_rows, is_column, is_row, DEPTH, 2 * TILE_F, TILE_R, TILE_K)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, TILE_F, TILE_R)), (1, 2, 0)))
        gated = gate_tiles(gate.to(dtype), up.to(dtype))
        place = route[None, :].to(tl.int64) * WIDTH + out_column[:, None]
        tl.store(out + place, gated, mask=is_row[None, :] & (out_column < WIDTH)[:, None])


@jit(do_not_specialize=["num_rows"])
def _down_experts_kernel(
    hidden, weight, chosen, scores, out, num_rows,
    NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, IS_BY_ROUTE: tl.constexpr,
    TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILE_K: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)  # which adds the parts up
    # Asked for with the routes: what waits for memory waits at the same time.
    routes, is_route = _all_routes(num_rows, NUM_CHOSEN, TILE_T, TILE_P)
    score_tile = tl.load(scores + routes, mask=is_route, other=0.0).to(tl.float32)
    expert, count, rank, its_route = _find_rows(
        chosen, tl.program_id(1), num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
    )
    its_score = tl.sum(tl.where(routes == its_route[:, None], score_tile, 0.0), 1)
    dtype = out.dtype.element_ty
    column = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    is_column = column < WIDTH
    weight_rows = weight + (expert.to(tl.int64) * WIDTH + column) * DEPTH
    for first in range(0, count, TILE_R):
        route = _at_ranks(its_route, rank, first, TILE_R)
        is_row = first + tl.arange(0, TILE_R) < count
        score = _at_ranks(its_score, rank, first, TILE_R)
        hidden_rows = hidden + route.to(tl.int64) * DEPTH
        acc = _product_tile(weight_rows, hidden_rows, is_column, is_row, DEPTH, TILE_C, TILE_R, TILE_K)
        scored = (acc.to(dtype).to(tl.float32) * score[None, :]).to(dtype)
        part_row = (route % NUM_CHOSEN).to(tl.int64) * num_rows + route // NUM_CHOSEN
        place = part_row[None, :] * WIDTH + column[:, None]
        tl.store(out + place, scored, mask=is_row[None, :] & is_column[:, None])


def choose_experts(
    hidden: Tensor, router: Tensor, num_chosen: int, has_normalised_scores: bool
) -> tuple[Tensor, Tensor]:
    """`choose_experts_ref`: the router's product in parts, and a launch that adds them up and chooses."""
    check_tensors(hidden, router)
    check_dtypes(hidden, router)
    num_rows, num_experts = len(hidden), len(router)
    require(0 < num_chosen <= num_experts, f"1 to {num_experts} chosen experts")
    chosen = torch.empty((num_rows, num_chosen), dtype=torch.int64, device=hidden.device)
    scores = torch.empty((num_rows, num_chosen), dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        logits = product_parts(hidden, router)
        _choose_kernel[(ceil_div(num_rows, ROUTED_ROWS),)](
            logits, chosen, scores, num_rows, logits.stride(0),
            NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen, IS_NORMALISED=has_normalised_scores, NUM_PARTS=len(logits),
            TILE_R=ROUTED_ROWS, TILE_E=power_of_2(num_experts), TILE_C=power_of_2(num_chosen),
            num_warps=4, enable_fp_fusion=False, **early(hidden.device),
        )  # fmt: skip
    return chosen, scores


def experts(hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """`experts_ref` in two launches and a part for each chosen expert; with many rows, as it is."""
    if not _is_few(hidden):
        return experts_ref(hidden, gate_up, down, chosen, scores)
    check_tensors(hidden, gate_up, down, chosen, scores)
    check_dtypes(hidden, gate_up, down, scores)
    num_experts, width, depth = down.shape
    num_rows, num_chosen = chosen.shape
    require(hidden.shape == (num_rows, width) and scores.shape == chosen.shape, "rows, routes and scores of as many")
    require(gate_up.shape == (num_experts, 2 * depth, width), f"{num_experts} weights of {2 * depth} rows")
    require(hidden.stride(1) == 1, "contiguous rows")
    require(all(tensor.is_contiguous() for tensor in (gate_up, down, chosen, scores)), "contiguous weights and routes")
    shape = experts_shape(num_rows, num_chosen, num_experts, hidden.element_size(), hidden.device)
    inner = torch.empty((num_rows * num_chosen, depth), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_chosen, num_rows, width), dtype=hidden.dtype, device=hidden.device)
    options = _options(shape, num_chosen, hidden.device)
    num_programs = num_rows * num_chosen if shape.is_by_route else num_experts
    _gated_experts_kernel[(ceil_div(depth, shape.columns // 2), num_programs)](
        hidden, gate_up, chosen, inner, num_rows,
        HIDDEN_ROW=hidden.stride(0), WIDTH=depth, DEPTH=width, TILE_F=shape.columns // 2, **options,
    )  # fmt: skip
    _down_experts_kernel[(ceil_div(width, shape.columns), num_programs)](
        inner, down, chosen, scores, out, num_rows,
        WIDTH=width, DEPTH=depth, TILE_C=shape.columns, **options,
    )  # fmt: skip
    return out


def _is_few(hidden: Tensor) -> bool:
    """Whether so few rows are at hand that reading the weights is all that counts; see `product_shape`."""
    return 0 < len(hidden) <= MAX_EXPERT_ROWS and (hidden.element_size() == 2 or IS_INTERPRETED)


def _options(shape: ExpertsShape, num_chosen: int, device: torch.device) -> dict[str, object]:
    """What both launches are told."""
    return {
        "NUM_CHOSEN": num_chosen, "IS_BY_ROUTE": shape.is_by_route, "TILE_T": shape.sought_rows,
        "TILE_P": power_of_2(num_chosen), "TILE_R": shape.rows, "TILE_K": shape.depth,
        "num_warps": 4, "num_stages": shape.num_stages, "enable_fp_fusion": False, **early(device),
    }  # fmt: skip
