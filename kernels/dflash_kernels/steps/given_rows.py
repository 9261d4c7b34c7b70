"""The rows of a step that each request gets, by the survivals of its draft tokens, without waiting for the device.

Axis letters: R requests, W rows of whole blocks, K draft tokens (W - 1), n given rows.
"""

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, wait_for_launches_before
from dflash_kernels.launch import check_tensors, constexpr, jit, power_of_2, require, tl

COMPARED = 512
"""Survivals that a program compares with its request's survivals at once."""

_TL_COMPARED = constexpr(COMPARED)


def give_rows_ref(survivals: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give `num_rows` rows: an anchor to each request, the others to the best survivals [R, K], float64.

    Survivals never grow along a block, and among equal ones earlier positions come first, then earlier requests. So
    every request gets the first rows of its block.

    num_rows  n, from R to R * W
    Returns int64:
    widths   [R]      rows of each request
    places   [n]      place of each given row among the R * W rows of whole blocks, in order
    sources  [R * W]  given row of each row of whole blocks, for a row that is not given the last given one of its block
    """
    num_requests, num_drafts = survivals.shape
    best = survivals.T.flatten().argsort(descending=True, stable=True)[: num_rows - num_requests]
    widths = torch.ones(num_requests, dtype=torch.int64, device=survivals.device)
    widths.scatter_add_(0, best % num_requests, torch.ones_like(best))
    is_given = (torch.arange(num_drafts + 1, device=survivals.device) < widths[:, None]).flatten()
    places = is_given.to(torch.int8).argsort(descending=True, stable=True)[:num_rows]
    return widths, places, is_given.cumsum(0) - 1


@jit
def _widths_kernel(
    survivals, widths, num_requests, num_drafts, num_given, TILE_K: tl.constexpr, IS_EARLY: tl.constexpr
):
    """Each request counts the survivals that come before each of its own."""
    wait_for_launches_before(IS_EARLY)
    request = tl.program_id(0)
    place = tl.arange(0, TILE_K)
    is_own = place < num_drafts
    own = tl.load(survivals + request * num_drafts + place, mask=is_own, other=-1.0)
    order = place * num_requests + request
    rank = tl.zeros((TILE_K,), tl.int32)
    for begin in range(0, num_requests * num_drafts, _TL_COMPARED):
        other = begin + tl.arange(0, _TL_COMPARED)
        value = tl.load(survivals + other, mask=other < num_requests * num_drafts, other=-1.0)
        other_order = other % num_drafts * num_requests + other // num_drafts
        is_first = other_order[None, :] < order[:, None]
        is_before = (value[None, :] > own[:, None]) | ((value[None, :] == own[:, None]) & is_first)
        rank += tl.sum(is_before.to(tl.int32), 1)
    width = 1 + tl.sum((is_own & (rank < num_given)).to(tl.int32), 0)
    tl.store(widths + request, width.to(tl.int64))


@jit(do_not_specialize=["num_requests"])
def _places_kernel(
    widths, places, sources, num_requests, num_block, TILE_R: tl.constexpr, TILE_W: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Each request adds up the rows of the requests before it."""
    wait_for_launches_before(IS_EARLY)
    request = tl.program_id(0)
    others = tl.arange(0, TILE_R)
    start = tl.sum(tl.load(widths + others, mask=(others < num_requests) & (others < request), other=0), 0)
    width = tl.load(widths + request)
    row = tl.arange(0, TILE_W)
    at = request * num_block + row
    tl.store(places + start + row, at.to(tl.int64), mask=row < width)
    tl.store(sources + at, start + tl.minimum(row, width - 1), mask=row < num_block)


def give_rows(survivals: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `give_rows_ref` in two launches, one program per request."""
    check_tensors(survivals)
    num_requests, num_drafts = survivals.shape
    num_block = num_drafts + 1
    require(survivals.is_contiguous(), "survivals", "contiguous")
    require(num_requests <= num_rows <= num_requests * num_block, "num_rows", "from R to R * W")
    sizes = num_requests, num_rows, num_requests * num_block
    widths, places, sources = (torch.empty(size, dtype=torch.int64, device=survivals.device) for size in sizes)
    if num_requests:
        _widths_kernel[(num_requests,)](
            survivals, widths, num_requests, num_drafts, num_rows - num_requests, TILE_K=power_of_2(num_drafts),
            num_warps=4, **early(survivals.device),
        )  # fmt: skip
        _places_kernel[(num_requests,)](
            widths, places, sources, num_requests, num_block, TILE_R=power_of_2(num_requests),
            TILE_W=power_of_2(num_block), num_warps=1, **early(survivals.device),
        )  # fmt: skip
    return widths, places, sources
