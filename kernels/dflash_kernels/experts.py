"""Experts of a mixture-of-experts layer for few rows, as in decode steps: each chosen weight is read once.

The router chooses a few of many experts for each row. A route is a row together with one of its chosen experts. There
is one program per expert and tile of columns. It finds the rows that chose its expert, and returns if no row did.
Therefore nothing is sorted. If there are fewer routes than experts, there is one program per route instead. Then the
program of an expert's first route computes all rows of the expert.

The output of each route stays a separate part. The next norm adds up the parts of a row, likeliest expert first. The
sum therefore does not depend on the order in which programs run.

Shared experts are experts that every row chooses. They have the last ids and one common score, the sigmoid of one more
row of the router. So they cost no launch of their own. Their programs have the most rows, and begin first.

Axis letters: T rows, E experts, C chosen experts per row, S shared experts, F inner width, P parts.
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
    hidden: Tensor, router: Tensor, num_chosen: int, has_normalised_scores: bool, num_shared: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the likeliest experts of each row, then the shared experts, and their scores.

    hidden  [T, hidden]
    router  [E, hidden], or [E + 1, hidden] with shared experts, whose score is the sigmoid of the last row's logit
    Returns ids [T, C + S] int64, likeliest first and then E, E + 1, ..., and scores [T, C + S] in the dtype of
    `hidden`. Logits are rounded to this dtype. Scores are their float32 softmax over all experts, or over the chosen
    experts if normalised. Among equal logits, the kernel prefers the lowest id. torch.topk does not promise an order.
    """
    logits = functional.linear(hidden, router)
    num_experts = _num_routed(router, num_shared)
    scores, chosen = logits[:, :num_experts].softmax(dim=-1, dtype=torch.float32).topk(num_chosen, dim=-1)
    if has_normalised_scores:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    scores = scores.to(logits.dtype)
    if not num_shared:
        return chosen, scores
    shared = torch.arange(num_experts, num_experts + num_shared, device=hidden.device).expand(len(hidden), -1)
    gate = logits[:, num_experts:].sigmoid().expand(-1, num_shared)
    return torch.cat((chosen, shared), dim=1), torch.cat((scores, gate), dim=1)


def _num_routed(router: Tensor, num_shared: int) -> int:
    """Return the number of experts among which the router chooses."""
    return len(router) - (1 if num_shared else 0)


def experts_ref(hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Return down(silu(gate(x)) * up(x)) * score of each row's experts, as parts that the caller must add up.

    hidden   [T, hidden]
    gate_up  [E, 2 F, hidden]   gate rows, then up rows
    down     [E, hidden, F]
    chosen   [T, C] int64       different ids within a row
    scores   [T, C]             in the dtype of `hidden`, or float32
    Returns [P, T, hidden]. The output of an expert is rounded to the model's dtype before and after the score.

    The reference sorts rows by expert and computes two grouped products. It reads no value on the host.
    """
    num_chosen = chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(len(down), device=experts.device), right=True, out_int32=True)
    inner = silu_mul_ref(functional.grouped_mm(hidden[order // num_chosen], gate_up.transpose(1, 2), offs=ends))
    outputs = functional.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    scored = (outputs * scores.flatten()[order, None]).to(outputs.dtype)
    placed = torch.empty_like(outputs).index_copy_(0, order, scored)
    return placed.view(*chosen.shape, -1).sum(dim=1)[None]


@jit(do_not_specialize=["num_rows", "part_stride"])
def _choose_kernel(
    logits, chosen, scores, num_rows, part_stride,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_SHARED: tl.constexpr, IS_NORMALISED: tl.constexpr,
    NUM_PARTS: tl.constexpr, TILE_R: tl.constexpr, TILE_E: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    dtype = scores.dtype.element_ty
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    expert, place = tl.arange(0, TILE_E), tl.arange(0, TILE_C)
    is_row, is_expert = row[:, None] < num_rows, expert[None, :] < NUM_EXPERTS
    NUM_LOGITS: tl.constexpr = NUM_EXPERTS + (1 if NUM_SHARED else 0)
    offsets = row[:, None] * NUM_LOGITS + expert[None, :]
    logit = sum_parts(logits, offsets, is_row & is_expert, part_stride.to(tl.int64), NUM_PARTS, dtype).to(tl.float32)
    logit = tl.where(is_expert, logit, float("-inf"))
    weight = tl.exp(logit - tl.max(logit, 1)[:, None])
    probs = tl.div_rn(weight, tl.broadcast_to(tl.sum(weight, 1)[:, None], (TILE_R, TILE_E)))
    # The bits of non-negative floats order like the floats, with NaN above all numbers. Chosen experts become -1.
    # Padding experts are chosen last: of equal values, the lowest id is chosen.
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
    if NUM_SHARED:
        offset = row[:, None] * NUM_LOGITS + NUM_EXPERTS
        gate = sum_parts(logits, offset, is_row, part_stride.to(tl.int64), NUM_PARTS, dtype).to(tl.float32)
        is_shared = place[None, :] >= NUM_CHOSEN
        ids = tl.where(is_shared, NUM_EXPERTS + place[None, :] - NUM_CHOSEN, ids)
        score = tl.where(is_shared, tl.sigmoid(gate), score)
    is_place = is_row & (place[None, :] < NUM_CHOSEN + NUM_SHARED)
    places = row[:, None] * (NUM_CHOSEN + NUM_SHARED) + place[None, :]
    tl.store(chosen + places, ids.to(tl.int64), mask=is_place)
    tl.store(scores + places, score.to(dtype), mask=is_place)


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
def at_ranks(values, rank, first, TILE_R: tl.constexpr):
    """Return the values [TILE_R] of the rows with the ranks from `first` on. Ranks without a row give 0."""
    is_at = rank[None, :] == (first + tl.arange(0, TILE_R))[:, None]
    return tl.sum(tl.where(is_at, values[None, :], 0), 1)


@jit
def _product_tile(
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


@jit(do_not_specialize=["num_rows"])
def _gated_experts_kernel(
    hidden, weight, chosen, out, num_rows,
    HIDDEN_ROW: tl.constexpr, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_BY_ROUTE: tl.constexpr, TILE_T: tl.constexpr, TILE_P: tl.constexpr, TILE_R: tl.constexpr, TILE_F: tl.constexpr,
    TILE_K: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    expert, count, rank, its_route = find_rows(
        chosen, tl.num_programs(1) - 1 - tl.program_id(1), num_rows, NUM_CHOSEN, IS_BY_ROUTE, TILE_T, TILE_P
    )
    dtype = out.dtype.element_ty
    # Rows of the gate, then rows of `up`: one product with a tile size that suits tensor cores.
    side = tl.arange(0, 2 * TILE_F)
    column = tl.program_id(0) * TILE_F + side % TILE_F
    is_column = column < WIDTH
    weight_rows = weight + (expert.to(tl.int64) * 2 * WIDTH + side // TILE_F * WIDTH + column) * DEPTH
    out_column = tl.program_id(0) * TILE_F + tl.arange(0, TILE_F)
    for first in range(0, count, TILE_R):
        route = at_ranks(its_route, rank, first, TILE_R)
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
    let_next_launch_begin(IS_EARLY)  # the next launch adds up the parts
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
    weight_rows = weight + (expert.to(tl.int64) * WIDTH + column) * DEPTH
    for first in range(0, count, TILE_R):
        route = at_ranks(its_route, rank, first, TILE_R)
        is_row = first + tl.arange(0, TILE_R) < count
        score = at_ranks(its_score, rank, first, TILE_R)
        hidden_rows = hidden + route.to(tl.int64) * DEPTH
        acc = _product_tile(weight_rows, hidden_rows, is_column, is_row, DEPTH, TILE_C, TILE_R, TILE_K)
        scored = (acc.to(dtype).to(tl.float32) * score[None, :]).to(dtype)
        part_row = (route % NUM_CHOSEN).to(tl.int64) * num_rows + route // NUM_CHOSEN
        place = part_row[None, :] * WIDTH + column[:, None]
        tl.store(out + place, scored, mask=is_row[None, :] & is_column[:, None])


def choose_experts(
    hidden: Tensor, router: Tensor, num_chosen: int, has_normalised_scores: bool, num_shared: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute `choose_experts_ref`: the router's product in parts, then one launch that adds them up and chooses."""
    check_tensors(hidden, router)
    check_dtypes(hidden, router)
    num_rows, num_experts = len(hidden), _num_routed(router, num_shared)
    num_routes = num_chosen + num_shared
    require(0 < num_chosen <= num_experts, "num_chosen", "from 1 to the number of experts")
    chosen = torch.empty((num_rows, num_routes), dtype=torch.int64, device=hidden.device)
    scores = torch.empty((num_rows, num_routes), dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        logits = product_parts(hidden, router)
        _choose_kernel[(ceil_div(num_rows, ROUTED_ROWS),)](
            logits, chosen, scores, num_rows, logits.stride(0),
            NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen, NUM_SHARED=num_shared, IS_NORMALISED=has_normalised_scores,
            NUM_PARTS=len(logits), TILE_R=ROUTED_ROWS, TILE_E=power_of_2(num_experts), TILE_C=power_of_2(num_routes),
            num_warps=4, enable_fp_fusion=False, **early(hidden.device),
        )  # fmt: skip
    return chosen, scores


def experts(hidden: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Compute `experts_ref` in two launches, with one part per chosen expert. Many rows use the reference."""
    if not _is_few(hidden):
        return experts_ref(hidden, gate_up, down, chosen, scores)
    check_tensors(hidden, gate_up, down, chosen, scores)
    check_dtypes(hidden, gate_up, down)
    require(scores.dtype in (hidden.dtype, torch.float32), "scores", "the dtype of `hidden`, or float32")
    num_experts, width, depth = down.shape
    num_rows, num_chosen = chosen.shape
    require(hidden.shape == (num_rows, width), "hidden", "one row per row of `chosen`, as wide as `down`")
    require(scores.shape == chosen.shape, "scores", "the shape of `chosen`")
    require(gate_up.shape == (num_experts, 2 * depth, width), "gate_up", "the experts and widths of `down`")
    require(hidden.stride(1) == 1, "hidden", "contiguous rows")
    are_contiguous = all(tensor.is_contiguous() for tensor in (gate_up, down, chosen, scores))
    require(are_contiguous, "gate_up, down, chosen, scores", "contiguous memory")
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
    """Return whether our kernels compute the experts of these rows, because reading the weights dominates the time."""
    return 0 < len(hidden) <= MAX_EXPERT_ROWS and (hidden.element_size() == 2 or IS_INTERPRETED)


def _options(shape: ExpertsShape, num_chosen: int, device: torch.device) -> dict[str, object]:
    """Return the options of both launches."""
    return {
        "NUM_CHOSEN": num_chosen, "IS_BY_ROUTE": shape.is_by_route, "TILE_T": shape.sought_rows,
        "TILE_P": power_of_2(num_chosen), "TILE_R": shape.rows, "TILE_K": shape.depth,
        "num_warps": 4, "num_stages": shape.num_stages, "enable_fp_fusion": False, **early(device),
    }  # fmt: skip
