"""Changes of the state's rows between steps: rows are assigned to requests, gain pages, and are switched on.

All changes of a step are copied to the device as one tensor and written in one launch. Separate operations would take a
dozen launches, and a prompt that arrives at an idle device would wait for all of them.

Axis letters: B rows of the state, S stop ids, P pages per row, E changed rows, C gained pages, F rows with a new first
token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch import check_tensors, constexpr, jit, power_of_2, require, tl
from dflash_kernels.logits.accept import accept_block_ref, decide
from dflash_kernels.steps.step_rows import NUM_FIELDS, RowState, pack_results


class HeldRows(NamedTuple):
    """Fields of a row that are set when it is assigned to a request, [B] int64 unless stated otherwise."""

    done: Tensor
    """bool; an assigned row is done until it is switched on"""
    generations: Tensor
    widths: Tensor
    top_ks: Tensor
    seeds: Tensor
    temperatures: Tensor
    """float64"""
    top_ps: Tensor
    """float64"""
    reserved_lens: Tensor
    """first position without a reserved page"""
    stop_ids: Tensor
    """[B, S], padded with -1"""
    page_table: Tensor
    """[B, P], 0 for no page"""


NUM_CHANGE_FIELDS = 11
"""Columns of a change before its stop ids:

- row, and whether it is assigned to a request
- gained pages: first column of the page table, number of pages, index of the first in `pages`
- fields of an assigned row: generation, width, top-k, seed, bits of the temperature, bits of top-p
"""

_TL_NUM_CHANGE_FIELDS = constexpr(NUM_CHANGE_FIELDS)
_TILE = 128


def change_rows_ref(held: HeldRows, changes: Tensor, pages: Tensor, page_size: int) -> None:
    """Assign rows to requests, and pages to rows. An assigned row starts without pages and is done.

    changes  [E, NUM_CHANGE_FIELDS + S] int64, at most one change per row of the state
    pages    [C] int64, concatenated pages of the changes
    """
    row, is_given, column, count, place = changes[:, :5].unbind(1)
    given = changes[is_given != 0]
    rows = given[:, 0]
    held.generations[rows], held.widths[rows], held.top_ks[rows], held.seeds[rows] = given[:, 5:9].unbind(1)
    floats = given[:, 9:NUM_CHANGE_FIELDS].contiguous().view(torch.float64)
    held.temperatures[rows], held.top_ps[rows] = floats.unbind(1)
    held.stop_ids[rows] = given[:, NUM_CHANGE_FIELDS:]
    held.done.index_fill_(0, rows, True)
    held.page_table.index_fill_(0, rows, 0)
    held.reserved_lens.index_fill_(0, rows, 0)
    gains = count > 0
    held.reserved_lens[row[gains]] = (column + count)[gains] * page_size
    index = torch.arange(len(pages), device=pages.device)
    owner = torch.bucketize(index, (place + count)[gains], right=True)
    held.page_table[row[gains][owner], column[gains][owner] + index - place[gains][owner]] = pages


@jit
def _change_rows_kernel(
    done, generations, widths, top_ks, seeds, temperatures, top_ps, reserved_lens, stop_ids, page_table,
    changes, pages, page_size, num_stops, num_columns,
    TILE: tl.constexpr, TILE_S: tl.constexpr,
):  # fmt: skip
    change = changes + tl.program_id(0).to(tl.int64) * (_TL_NUM_CHANGE_FIELDS + num_stops)
    row, is_given = tl.load(change), tl.load(change + 1) != 0
    column, count, place = tl.load(change + 2), tl.load(change + 3), tl.load(change + 4)
    if is_given:
        tl.store(generations + row, tl.load(change + 5))
        tl.store(widths + row, tl.load(change + 6))
        tl.store(top_ks + row, tl.load(change + 7))
        tl.store(seeds + row, tl.load(change + 8))
        tl.store(temperatures + row, tl.load(change + 9))
        tl.store(top_ps + row, tl.load(change + 10))
        stop = tl.arange(0, TILE_S)
        stops = tl.load(change + _TL_NUM_CHANGE_FIELDS + stop, mask=stop < num_stops)
        tl.store(stop_ids + row * num_stops + stop, stops, mask=stop < num_stops)
        tl.store(done + row, True)
    if is_given | (count > 0):
        tl.store(reserved_lens + row, tl.where(count > 0, (column + count) * page_size, 0))
    # Write each cell once. An assigned row also clears the cells of pages that it does not gain.
    first = tl.where(is_given, 0, column)
    end = tl.where(is_given, num_columns, column + count)
    for begin in range(first, end, TILE):
        cell = begin + tl.arange(0, TILE)
        is_gained = (cell >= column) & (cell < column + count)
        page = tl.load(pages + place + cell - column, mask=is_gained, other=0)
        tl.store(page_table + row * num_columns + cell, page, mask=cell < end)


def change_rows(held: HeldRows, changes: Tensor, pages: Tensor, page_size: int) -> None:
    """Compute `change_rows_ref` in one launch, one program per change."""
    check_tensors(*held, changes, pages)
    num_stops = held.stop_ids.shape[1]
    has_all_fields = changes.dim() == 2 and changes.shape[1] == NUM_CHANGE_FIELDS + num_stops
    require(has_all_fields, "changes", "all fields and stop ids of each change")
    _check_contiguous((*held, changes, pages))
    if len(changes):
        floats = (held.temperatures.view(torch.int64), held.top_ps.view(torch.int64))
        _change_rows_kernel[(len(changes),)](
            held.done, held.generations, held.widths, held.top_ks, held.seeds, *floats, held.reserved_lens,
            held.stop_ids, held.page_table, changes, pages, page_size, num_stops, held.page_table.shape[1],
            TILE=_TILE, TILE_S=power_of_2(num_stops), num_warps=1,
        )  # fmt: skip


class ReadyRows(NamedTuple):
    """E rows to switch on: first F rows with a new first token, then rows that already have tokens."""

    rows: Tensor
    """[E] int64, rows of the state"""
    kv_lens: Tensor
    """[E] int64"""
    remaining: Tensor
    """[E] int64, tokens that the request may still commit, including the first token"""
    anchors: Tensor
    """[E - F] int64, last token of each row that already has tokens"""


def switch_on_rows_ref(state: RowState, ready: ReadyRows, chosen: Tensor, is_finite: Tensor) -> Tensor:
    """Switch rows on, and pack the F first tokens like the results of a step.

    A request ends with its first token if this is a stop id or the last token it may commit. Its row then stays done.
    If a row occurs twice, either entry may be written.

    chosen     [F] int64   first tokens
    is_finite  [F] bool    whether the logits of the first token are finite
    Returns [F, NUM_FIELDS + 1] int64, as `close_step_ref`.
    """
    count, nothing = len(chosen), ready.rows.new_zeros(len(chosen))
    rows, remaining = ready.rows[:count], ready.remaining[:count]
    none = chosen.new_empty((count, 0))
    accepted = accept_block_ref(none, chosen[:, None], nothing, state.stop_ids[rows], remaining)
    is_done = accepted.is_stopped | (remaining <= 1)
    fields = (accepted.num_committed, nothing, nothing, is_done, is_finite, state.generations[rows])
    state.kv_lens[ready.rows] = ready.kv_lens
    state.anchors[ready.rows] = torch.cat((chosen, ready.anchors))
    state.remaining[ready.rows] = torch.cat((remaining - 1, ready.remaining[count:]))
    state.done[ready.rows] = torch.cat((is_done, torch.zeros_like(ready.anchors, dtype=torch.bool)))
    return pack_results(fields, chosen[:, None], none)


@jit(do_not_specialize=["num_fresh"])
def _switch_on_rows_kernel(
    done, kv_lens, anchors, remaining, generations, stop_ids, rows, new_kv_lens, new_remaining, last_ids,
    chosen_ids, is_finite, packed, num_fresh, num_stops,
    FIELDS: tl.constexpr, TILE_S: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row, left = tl.load(rows + index), tl.load(new_remaining + index)
    tl.store(kv_lens + row, tl.load(new_kv_lens + index))
    if index < num_fresh:
        chosen = tl.load(chosen_ids + index + tl.arange(0, 1))
        stop = tl.arange(0, TILE_S)
        stops = tl.load(stop_ids + row * num_stops + stop, mask=stop < num_stops, other=-1)
        _, committed, _, is_stopped = decide(chosen * 0 - 1, chosen, stops, 0, left, 1)
        is_done, token = is_stopped | (left <= 1), tl.load(chosen_ids + index)
        out = packed + index * (FIELDS + 1)
        tl.store(out, committed)
        tl.store(out + 1, 0)
        tl.store(out + 2, 0)
        tl.store(out + 3, is_done.to(tl.int64))
        tl.store(out + 4, (tl.load(is_finite + index) != 0).to(tl.int64))
        tl.store(out + 5, tl.load(generations + row))
        tl.store(out + FIELDS, token)
        tl.store(anchors + row, token)
        tl.store(remaining + row, left - 1)
        tl.store(done + row, is_done)
    else:
        tl.store(anchors + row, tl.load(last_ids + index - num_fresh))
        tl.store(remaining + row, left)
        tl.store(done + row, False)


def switch_on_rows(state: RowState, ready: ReadyRows, chosen: Tensor, is_finite: Tensor) -> Tensor:
    """Compute `switch_on_rows_ref` in one launch, one program per row."""
    check_tensors(*state, *ready, chosen, is_finite)
    _check_contiguous((*state, *ready, chosen, is_finite))
    num_rows, num_fresh, num_stops = len(ready.rows), len(chosen), state.stop_ids.shape[1]
    require(len(ready.kv_lens) == len(ready.remaining) == num_rows, "ready", "one length and one limit per row")
    require(num_fresh == num_rows - len(ready.anchors), "chosen", "one first token per row without an anchor")
    require(len(is_finite) == num_fresh, "is_finite", "one flag per first token")
    packed = torch.empty((num_fresh, NUM_FIELDS + 1), dtype=torch.int64, device=chosen.device)
    if num_rows:
        _switch_on_rows_kernel[(num_rows,)](
            state.done, state.kv_lens, state.anchors, state.remaining, state.generations, state.stop_ids, *ready,
            chosen, is_finite, packed, num_fresh, num_stops,
            FIELDS=NUM_FIELDS, TILE_S=power_of_2(num_stops), num_warps=1,
        )  # fmt: skip
    return packed


def _check_contiguous(tensors: Sequence[Tensor]) -> None:
    require(all(tensor.is_contiguous() for tensor in tensors), "tensors", "contiguous memory")
