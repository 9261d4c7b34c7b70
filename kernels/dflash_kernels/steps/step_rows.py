"""Beginning and end of a decode step: read its rows from the state, and write its results to the state.

Both consist of many small decisions about a few integers per request. Separate operations would take a hundred
launches. These kernels take one launch for the beginning and one for the end.

Axis letters: B rows of the state, R requests, N block rows, W verified rows, S stop ids, P pages. A tree has M rows,
and the path that it gives has W.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_kernels.drafts.tree_path import Path
from dflash_kernels.early_launch import early, wait_for_launches_before
from dflash_kernels.kv.slot_mapping import PAD, slot_mapping_ref, slots_at
from dflash_kernels.launch import check_tensors, jit, power_of_2, require, tl
from dflash_kernels.logits.accept import accept_block_ref, decide

NUM_FIELDS = 6
"""Columns of a packed row before its token ids: committed, accepted, drafting, done, finite rows, generation."""


class RowState(NamedTuple):
    """Fields of the state's rows, [B] int64 unless stated otherwise."""

    done: Tensor
    """bool; a row without a running request is done"""
    kv_lens: Tensor
    anchors: Tensor
    remaining: Tensor
    """tokens that the request may still commit"""
    reserved_lens: Tensor
    """first position without a reserved page"""
    widths: Tensor
    """most block rows that the request verifies"""
    generations: Tensor
    stop_ids: Tensor
    """[B, S], padded with -1"""
    page_table: Tensor
    """[B, P], 0 for no page"""


class StepRows(NamedTuple):
    """Rows of one step, int64 unless stated otherwise.

    For a done request, context length and remaining tokens are 0 and all slots are PAD. It reads and writes no KV and
    commits no token.
    """

    kv_lens: Tensor
    """[R]"""
    context_lens: Tensor
    """[R] context length to read: `kv_lens`, or 0 for a done request"""
    remaining: Tensor
    """[R]"""
    max_accepted: Tensor
    """[R] limit of accepted draft tokens"""
    can_draft: Tensor
    """[R] bool; near the model's limit a request decodes without drafts, in a block of the same length"""
    positions: Tensor
    """[R, N]"""
    block_ids: Tensor
    """[R, N] the anchor, then mask tokens"""
    slots: Tensor
    """[R, W], or [R, M] of the rows of a tree, PAD for positions without a reserved page"""


class Bounds(NamedTuple):
    """Limits and constants of all rows and steps."""

    max_model_len: int
    last_draft_len: int
    """longest KV after which a whole block still fits within the model's length"""
    page_size: int
    mask_id: int


def open_step_ref(state: RowState, rows: Tensor, num_block: int, num_verified: int, bounds: Bounds) -> StepRows:
    """Return the rows of a step with blocks of N = `num_block` rows that stores W = `num_verified` rows of KV.

    It verifies the first W rows of each block, or a tree of M = W rows.

    rows  [R] int64, rows of the state; a done row may occur several times
    """
    is_alive = ~state.done[rows]
    kv_lens, anchors = state.kv_lens[rows], state.anchors[rows]
    places = torch.arange(max(num_block, num_verified), device=rows.device)
    positions = kv_lens[:, None] + places
    reserved_lens = torch.where(is_alive, state.reserved_lens[rows], 0).clamp(max=bounds.max_model_len)
    can_draft = is_alive & (kv_lens <= bounds.last_draft_len) & (num_verified > 1)
    masks = anchors.new_full((len(rows), num_block - 1), bounds.mask_id)
    return StepRows(
        kv_lens=kv_lens,
        context_lens=torch.where(is_alive, kv_lens, 0),
        remaining=torch.where(is_alive, state.remaining[rows], 0),
        max_accepted=torch.where(can_draft, state.widths[rows] - 1, 0),
        can_draft=can_draft,
        positions=positions[:, :num_block],
        block_ids=torch.cat((anchors[:, None], masks), dim=1),
        slots=slot_mapping_ref(state.page_table[rows], positions[:, :num_verified], reserved_lens, bounds.page_size),
    )


def pack_results(fields: Sequence[Tensor], chosen: Tensor, draft_ids: Tensor) -> Tensor:
    """Return one row per request: `NUM_FIELDS` fields [R], chosen ids [R, W], draft ids [R, W - 1] -> int64."""
    return torch.cat((torch.stack([field.to(torch.int64) for field in fields], dim=1), chosen, draft_ids), dim=1)


def close_step_ref(
    state: RowState,
    rows: Tensor,
    step: StepRows,
    draft_ids: Tensor,
    chosen: Tensor,
    max_accepted: Tensor,
    is_finite: Tensor,
) -> tuple[Tensor, Tensor]:
    """Decide which tokens to commit (`accept_block_ref`), and write lengths, anchors, remaining and done to the state.

    draft_ids     [R, W - 1] int64   negative ids are padding
    chosen        [R, W] int64       the target's token after each row
    max_accepted  [R] int64          limit of accepted draft tokens
    is_finite     [R, W] bool        whether the logits of a row are finite
    Returns the packed results, [R, NUM_FIELDS + 2 W - 1] int64: `NUM_FIELDS` columns, `chosen`, `draft_ids`. Also
    returns the slots of committed rows, [R, W], with PAD for other rows.
    """
    accepted = accept_block_ref(draft_ids, chosen, max_accepted, state.stop_ids[rows], step.remaining)
    num_committed = accepted.num_committed
    left = state.remaining[rows] - num_committed
    is_done = state.done[rows] | accepted.is_stopped | (left <= 0)
    num_finite = is_finite.to(torch.int64).cumprod(1).sum(1)
    fields = (num_committed, accepted.num_accepted, step.can_draft, is_done, num_finite, state.generations[rows])
    packed = pack_results(fields, chosen, draft_ids)
    state.kv_lens[rows] = step.kv_lens + num_committed
    state.anchors[rows] = torch.where(num_committed > 0, accepted.last_ids, state.anchors[rows])
    state.remaining[rows] = left
    state.done[rows] = is_done
    is_committed = torch.arange(chosen.shape[1], device=rows.device) < num_committed[:, None]
    return packed, torch.where(is_committed, step.slots, PAD)


def close_tree_ref(
    state: RowState,
    rows: Tensor,
    step: StepRows,
    path: Path,
    chosen: Tensor,
    max_accepted: Tensor,
    is_finite: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Commit the paths of trees as `close_step_ref` commits blocks.

    path               of W rows
    chosen, is_finite  [R, M], of every row of the tree
    The other arguments are as in `close_step_ref`, with the slots [R, M] of the tree's rows in `step`.
    Returns the packed results of the path, and the slots of committed rows twice: [R, W] by rows of the path, and
    [R, M] by rows of the tree. Other rows have PAD.
    """
    num_path, num_rows = path.rows.shape[1], chosen.shape[1]
    own = F.pad(step.slots, (0, max(num_path - num_rows, 0)), value=PAD)[:, :num_path]
    on_path = (item.gather(1, path.rows) for item in (chosen, is_finite))
    ids, is_finite = on_path
    packed, slots = close_step_ref(
        state, rows, step._replace(slots=own), path.token_ids, ids, max_accepted, is_finite
    )  # fmt: skip
    # Rows after the end of a path are the anchor's row without a slot, so the greatest slot is the row's own.
    return packed, slots, torch.full_like(step.slots, PAD).scatter_reduce(1, path.rows, slots, "amax")


@jit
def _open_step_kernel(
    done, kv_lens, anchors, remaining, reserved_lens, widths, page_table, rows,
    out_kv_lens, out_context_lens, out_remaining, out_max_accepted, out_can_draft, positions, block_ids, slots,
    table_stride, num_pages, max_model_len, last_draft_len, mask_id,
    NUM_BLOCK: tl.constexpr, NUM_VERIFIED: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_N: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    is_alive = tl.load(done + row) == 0
    kv_len = tl.load(kv_lens + row)
    can_draft = is_alive & (kv_len <= last_draft_len) & (NUM_VERIFIED > 1)
    tl.store(out_kv_lens + request, kv_len)
    tl.store(out_context_lens + request, tl.where(is_alive, kv_len, 0))
    tl.store(out_remaining + request, tl.where(is_alive, tl.load(remaining + row), 0))
    tl.store(out_max_accepted + request, tl.where(can_draft, tl.load(widths + row) - 1, 0))
    tl.store(out_can_draft + request, can_draft)
    place = tl.arange(0, TILE_N)
    position = kv_len + place
    tl.store(positions + request * NUM_BLOCK + place, position, mask=place < NUM_BLOCK)
    ids = tl.where(place == 0, tl.load(anchors + row), mask_id)
    tl.store(block_ids + request * NUM_BLOCK + place, ids, mask=place < NUM_BLOCK)
    reserved_len = tl.where(is_alive, tl.minimum(tl.load(reserved_lens + row), max_model_len), 0)
    slot = slots_at(page_table + row * table_stride, position, reserved_len, num_pages, PAGE_SIZE)
    tl.store(slots + request * NUM_VERIFIED + place, slot, mask=place < NUM_VERIFIED)


def open_step(state: RowState, rows: Tensor, num_block: int, num_verified: int, bounds: Bounds) -> StepRows:
    """Compute `open_step_ref` in one launch, one program per request."""
    check_tensors(rows, *state)
    _check_state(state, rows)
    require(num_block > 0 and num_verified > 0, "num_block, num_verified", "at least 1")
    num_requests = len(rows)
    ints = torch.empty((4, num_requests), dtype=torch.int64, device=rows.device)
    blocks = torch.empty((2, num_requests, num_block), dtype=torch.int64, device=rows.device)
    slots = torch.empty((num_requests, num_verified), dtype=torch.int64, device=rows.device)
    can_draft = torch.empty(num_requests, dtype=torch.bool, device=rows.device)
    step = StepRows(ints[0], ints[1], ints[2], ints[3], can_draft, blocks[0], blocks[1], slots)
    if num_requests:
        _open_step_kernel[(num_requests,)](
            state.done, state.kv_lens, state.anchors, state.remaining, state.reserved_lens, state.widths,
            state.page_table, rows, *step, state.page_table.stride(0), state.page_table.shape[1],
            bounds.max_model_len, bounds.last_draft_len, bounds.mask_id,
            NUM_BLOCK=num_block, NUM_VERIFIED=num_verified, PAGE_SIZE=bounds.page_size,
            TILE_N=power_of_2(max(num_block, num_verified)), num_warps=1, **early(rows.device),
        )  # fmt: skip
    return step


@jit
def _store_slots(
    step_slots, slots, row_slots, request, own, committed, num_rows,
    HAS_TREE: tl.constexpr, NUM_VERIFIED: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Store the slots of committed rows by places of the path, and of a tree also by rows of the tree."""
    place, row = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    is_committed = place < tl.minimum(committed, num_rows)
    slot = tl.load(step_slots + request * num_rows + place, mask=is_committed, other=-1)
    tl.store(slots + request * NUM_VERIFIED + place, slot, mask=place < NUM_VERIFIED)
    if HAS_TREE:
        tl.store(row_slots + request * num_rows + row, tl.full((TILE_M,), -1, tl.int64), mask=row < num_rows)
        tl.debug_barrier()  # other threads write the slots of committed rows over these
        tl.store(row_slots + own, slot, mask=is_committed)


@jit
def _close_step_kernel(
    done, kv_lens, anchors, remaining, generations, stop_ids, rows,
    step_kv_lens, step_remaining, step_can_draft, step_slots, draft_ids, path_rows, chosen_ids, max_accepted, is_finite,
    packed, context_slots, row_slots, draft_stride, num_rows, num_stops,
    NUM_VERIFIED: tl.constexpr, FIELDS: tl.constexpr, TILE_N: tl.constexpr, TILE_S: tl.constexpr,
    TILE_M: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    place = tl.arange(0, TILE_N)
    is_verified, is_drafted = place < NUM_VERIFIED, place < NUM_VERIFIED - 1
    own = request * num_rows + place  # row of each place among all verified rows
    if path_rows is not None:
        own = request * num_rows + tl.load(path_rows + request * NUM_VERIFIED + place, mask=is_verified, other=0)
    drafted = tl.load(draft_ids + request * draft_stride + place, mask=is_drafted, other=-1)
    chosen = tl.load(chosen_ids + own, mask=is_verified, other=-1)
    stop = tl.arange(0, TILE_S)
    stops = tl.load(stop_ids + row * num_stops + stop, mask=stop < num_stops, other=-1)
    accepted, committed, last_id, is_stopped = decide(
        drafted, chosen, stops, tl.load(max_accepted + request), tl.load(step_remaining + request), TILE_N
    )
    finite = tl.load(is_finite + own, mask=is_verified, other=0)
    num_finite = tl.min(tl.where(finite != 0, NUM_VERIFIED, tl.minimum(place, NUM_VERIFIED)), 0)
    left = tl.load(remaining + row) - committed
    is_done = (tl.load(done + row) != 0) | is_stopped | (left <= 0)
    anchor = tl.where(committed > 0, last_id, tl.load(anchors + row))
    generation = tl.load(generations + row)
    can_draft = tl.load(step_can_draft + request).to(tl.int64)
    # Read everything before the first write. A row that occurs twice is done, so its programs write equal values.
    tl.debug_barrier()
    tl.store(kv_lens + row, tl.load(step_kv_lens + request) + committed)
    tl.store(anchors + row, anchor)
    tl.store(remaining + row, left)
    tl.store(done + row, is_done)
    out = packed + request * (FIELDS + 2 * NUM_VERIFIED - 1)
    tl.store(out, committed)
    tl.store(out + 1, accepted)
    tl.store(out + 2, can_draft)
    tl.store(out + 3, is_done.to(tl.int64))
    tl.store(out + 4, num_finite.to(tl.int64))
    tl.store(out + 5, generation)
    tl.store(out + FIELDS + place, chosen, mask=is_verified)
    tl.store(out + FIELDS + NUM_VERIFIED + place, drafted, mask=is_drafted)
    _store_slots(
        step_slots, context_slots, row_slots, request, own, committed, num_rows,
        path_rows is not None, NUM_VERIFIED, TILE_N, TILE_M,
    )  # fmt: skip


def close_step(
    state: RowState,
    rows: Tensor,
    step: StepRows,
    draft_ids: Tensor,
    chosen: Tensor,
    max_accepted: Tensor,
    is_finite: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `close_step_ref` in one launch, one program per request."""
    return _launch_close(state, rows, step, None, draft_ids, chosen, max_accepted, is_finite)[:2]


def close_tree(
    state: RowState,
    rows: Tensor,
    step: StepRows,
    path: Path,
    chosen: Tensor,
    max_accepted: Tensor,
    is_finite: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `close_tree_ref` in one launch, one program per request."""
    return _launch_close(state, rows, step, path.rows, path.token_ids, chosen, max_accepted, is_finite)


def _launch_close(
    state: RowState, rows: Tensor, step: StepRows, path_rows: Tensor | None, draft_ids: Tensor, chosen: Tensor,
    max_accepted: Tensor, is_finite: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`path_rows` [R, W] are the verified rows of [R, M] that may be committed; None for all rows, in order."""
    given = (draft_ids, *(() if path_rows is None else (path_rows,)), chosen, max_accepted, is_finite)
    check_tensors(rows, *state, *step, *given)
    _check_state(state, rows)
    num_requests, num_rows = chosen.shape
    num_verified = num_rows if path_rows is None else path_rows.shape[1]
    require(draft_ids.shape == (num_requests, num_verified - 1), "draft_ids", "one per verified row after the first")
    require(len(rows) == num_requests == max_accepted.numel(), "rows, max_accepted", "one per request")
    require(is_finite.shape == step.slots.shape == chosen.shape, "is_finite, step.slots", "one per verified row")
    width = NUM_FIELDS + 2 * num_verified - 1
    packed = torch.empty((num_requests, width), dtype=torch.int64, device=rows.device)
    slots = torch.empty((num_requests, num_verified), dtype=torch.int64, device=rows.device)
    row_slots = slots if path_rows is None else torch.empty_like(step.slots)
    if num_requests:
        _close_step_kernel[(num_requests,)](
            state.done, state.kv_lens, state.anchors, state.remaining, state.generations, state.stop_ids, rows,
            step.kv_lens, step.remaining, step.can_draft, step.slots,
            draft_ids.contiguous(), None if path_rows is None else path_rows.contiguous(),
            *(tensor.contiguous() for tensor in (chosen, max_accepted, is_finite)),
            packed, slots, row_slots, num_verified - 1, num_rows, state.stop_ids.shape[1],
            NUM_VERIFIED=num_verified, FIELDS=NUM_FIELDS, TILE_N=power_of_2(num_verified),
            TILE_S=power_of_2(state.stop_ids.shape[1]), TILE_M=power_of_2(num_rows), num_warps=1,
            **early(rows.device),
        )  # fmt: skip
    return packed, slots, row_slots


def _check_state(state: RowState, rows: Tensor) -> None:
    require(rows.dim() == 1 and rows.is_contiguous(), "rows", "one axis, contiguous")
    require(all(tensor.is_contiguous() for tensor in state), "state", "contiguous tensors")
