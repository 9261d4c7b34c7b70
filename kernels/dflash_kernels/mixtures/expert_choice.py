"""The experts that a router chooses for each row, and their scores.

The router's product is computed in parts. One launch adds them up and chooses. Scores are a softmax over logits.

Shared experts are experts that every row chooses. They have the last ids and one common score, the sigmoid of one more
row of the router.

Axis letters: T rows, E experts, C chosen experts per row, S shared experts.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.mixtures.mixture_config import ROUTED_ROWS
from dflash_kernels.norms.rope_norm import sum_parts
from dflash_kernels.products.product import product_parts


def choose_experts_ref(
    hidden: Tensor,
    router: Tensor,
    num_chosen: int,
    has_normalised_scores: bool,
    num_shared: int = 0,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the likeliest experts of each row, then the shared experts, and their scores.

    hidden  [T, hidden]
    router  [E, hidden], or [E + 1, hidden] with shared experts; the sigmoid of the last row's logit is their score
    bias    one number per row of `router`, or None
    factors one number per expert, which multiplies the expert's score, or None
    Returns ids [T, C + S] int64, likeliest first and then E, E + 1, ..., and scores [T, C + S] in the dtype of
    `hidden`. Logits are rounded to this dtype. Scores are their float32 softmax over all experts, or over the chosen
    experts if normalised. Among equal logits, the kernel prefers the lowest id. torch.topk does not promise an order.
    """
    logits = functional.linear(hidden, router, bias)
    num_experts = _num_routed(router, num_shared)
    scores, chosen = logits[:, :num_experts].softmax(dim=-1, dtype=torch.float32).topk(num_chosen, dim=-1)
    if has_normalised_scores:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    if factors is not None:
        scores = scores * factors[chosen]
    scores = scores.to(logits.dtype)
    if not num_shared:
        return chosen, scores
    shared = torch.arange(num_experts, num_experts + num_shared, device=hidden.device).expand(len(hidden), -1)
    gate = logits[:, num_experts:].sigmoid().expand(-1, num_shared)
    return torch.cat((chosen, shared), dim=1), torch.cat((scores, gate), dim=1)


def _num_routed(router: Tensor, num_shared: int) -> int:
    """Return the number of experts among which the router chooses."""
    return len(router) - (1 if num_shared else 0)


@jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    logits, bias, factors, chosen, scores, num_rows, part_stride,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_SHARED: tl.constexpr, IS_NORMALISED: tl.constexpr,
    NUM_PARTS: tl.constexpr, TILE_R: tl.constexpr, TILE_E: tl.constexpr, TILE_C: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    expert, place = tl.arange(0, TILE_E), tl.arange(0, TILE_C)
    # Load per-expert numbers before the logits, so that all loads wait for memory at the same time.
    if HAS_BIAS:
        added = tl.load(bias + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        factor = tl.load(factors + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    dtype = scores.dtype.element_ty
    is_row, is_expert = row[:, None] < num_rows, expert[None, :] < NUM_EXPERTS
    NUM_LOGITS: tl.constexpr = NUM_EXPERTS + (1 if NUM_SHARED else 0)
    offsets = row[:, None] * NUM_LOGITS + expert[None, :]
    total = sum_parts(logits, offsets, is_row & is_expert, part_stride, NUM_PARTS, tl.float32)
    if HAS_BIAS:
        total += added[None, :]
    logit = total.to(dtype).to(tl.float32)
    logit = tl.where(is_expert, logit, float("-inf"))
    weight = tl.exp(logit - tl.max(logit, 1)[:, None])
    probs = tl.div_rn(weight, tl.broadcast_to(tl.sum(weight, 1)[:, None], (TILE_R, TILE_E)))
    # The bits of non-negative floats order like the floats, with NaN above all numbers. Chosen experts become -1.
    # Padding experts are chosen last: of equal values, the lowest id is chosen.
    left = probs.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    ids, best = tl.zeros((TILE_R, TILE_C), tl.int32), tl.zeros((TILE_R, TILE_C), tl.int32)
    for index in tl.static_range(NUM_CHOSEN):
        highest, taken = tl.max(left, 1, return_indices=True, return_indices_tie_break_left=True, keep_dims=True)
        ids, best = tl.where(place[None, :] == index, taken, ids), tl.where(place[None, :] == index, highest, best)
        left = tl.where(expert[None, :] == taken, -1, left)
    score = best.to(tl.float32, bitcast=True)
    if IS_NORMALISED:
        score = tl.div_rn(score, tl.broadcast_to(tl.sum(score, 1)[:, None], (TILE_R, TILE_C)))
    if HAS_FACTORS:
        score *= tl.gather(tl.broadcast_to(factor[None, :], (TILE_R, TILE_E)), ids, 1)
    if NUM_SHARED:
        offset = row[:, None] * NUM_LOGITS + NUM_EXPERTS
        gate = sum_parts(logits, offset, is_row, part_stride, NUM_PARTS, dtype).to(tl.float32)
        is_shared = place[None, :] >= NUM_CHOSEN
        ids = tl.where(is_shared, NUM_EXPERTS + place[None, :] - NUM_CHOSEN, ids)
        score = tl.where(is_shared, tl.sigmoid(gate), score)
    is_place = is_row & (place[None, :] < NUM_CHOSEN + NUM_SHARED)
    places = row[:, None] * (NUM_CHOSEN + NUM_SHARED) + place[None, :]
    tl.store(chosen + places, ids.to(tl.int64), mask=is_place)
    tl.store(scores + places, score.to(dtype), mask=is_place)


def choose_experts(
    hidden: Tensor,
    router: Tensor,
    num_chosen: int,
    has_normalised_scores: bool,
    num_shared: int = 0,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `choose_experts_ref`: the router's product in parts, then one launch that adds them up and chooses."""
    check_tensors(hidden, router)
    check_dtypes(hidden, router, *(item for item in (bias, factors) if item is not None))
    logits = product_parts(hidden, router) if len(hidden) else hidden.new_empty((1, 0, len(router)))
    return choose_from(logits, hidden.dtype, num_chosen, has_normalised_scores, num_shared, bias, factors)


def choose_from(
    logits: Tensor,
    dtype: torch.dtype,
    num_chosen: int,
    has_normalised_scores: bool,
    num_shared: int = 0,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `choose_experts` from the parts of the router's product, [P, T, E] or [P, T, E + 1], in one launch."""
    per_expert = [item for item in (bias, factors) if item is not None]
    check_tensors(logits, *per_expert)
    num_parts, num_rows, num_logits = logits.shape
    num_experts, num_routes = num_logits - (1 if num_shared else 0), num_chosen + num_shared
    require(0 < num_chosen <= num_experts, "num_chosen", "from 1 to the number of experts")
    is_fitting = all(item.shape == (num_logits,) and not num_shared for item in per_expert)
    require(is_fitting, "bias, factors", "one number per expert, and no shared experts")
    chosen = torch.empty((num_rows, num_routes), dtype=torch.int64, device=logits.device)
    scores = torch.empty((num_rows, num_routes), dtype=dtype, device=logits.device)
    if num_rows:
        added, scale = (logits if item is None else item for item in (bias, factors))
        _choose_kernel[(ceil_div(num_rows, ROUTED_ROWS),)](
            logits, added, scale, chosen, scores, num_rows, logits.stride(0),
            NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen, NUM_SHARED=num_shared, IS_NORMALISED=has_normalised_scores,
            NUM_PARTS=num_parts, TILE_R=ROUTED_ROWS, TILE_E=power_of_2(num_experts), TILE_C=power_of_2(num_routes),
            HAS_BIAS=bias is not None, HAS_FACTORS=factors is not None, num_warps=4, enable_fp_fusion=False,
            **early(logits.device),
        )  # fmt: skip
    return chosen, scores
