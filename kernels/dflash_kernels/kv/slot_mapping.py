"""Mapping of positions to KV slots by a page table.

A slot is the index of a token's KV row, `page * page_size + offset`. Page 0 is never allocated: a table entry of 0
means "no page" and gives PAD. Positions that the request has not reserved also give PAD. A row with the slot PAD is
not stored.

Axis letters: R requests, N rows per request, P pages, B rows of the page table, T flat rows, G chunks.
"""

import torch
from torch import Tensor

from dflash_kernels.launch import ceil_div, check_tensors, jit, require, tl
from dflash_kernels.launch_config import ELEMENT_TILE

PAD = -1


def slot_mapping_ref(page_table: Tensor, positions: Tensor, reserved_lens: Tensor, page_size: int) -> Tensor:
    """Return the slot of each position, or PAD.

    page_table     [R, P] int64   0 for no page
    positions      [R, N] int64   negative for padding
    reserved_lens  [R] int64      first position without a reserved page
    Returns [R, N] int64.
    """
    columns = positions // page_size
    is_inside = (positions >= 0) & (positions < reserved_lens[:, None]) & (columns < page_table.shape[1])
    pages = page_table.gather(1, torch.where(is_inside, columns, 0))
    slots = pages * page_size + positions % page_size
    return torch.where(is_inside & (pages > 0), slots, PAD)


@jit
def slots_at(table, position, reserved_len, num_pages, PAGE_SIZE: tl.constexpr):
    """Compute `slot_mapping_ref` for one request. `table` is its row of the page table."""
    column = position // PAGE_SIZE
    is_inside = (position >= 0) & (position < reserved_len) & (column < num_pages)
    page = tl.load(table + column, mask=is_inside, other=0)
    return tl.where(page > 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)


def slots_of(page_table: Tensor, table_rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return the slots of positions [T] by rows of the page table [T]. Positions without a page give PAD."""
    pages = page_table[table_rows, positions // page_size]
    return torch.where(pages > 0, pages * page_size + positions % page_size, PAD)


def locate_rows_ref(
    page_table: Tensor, ends: Tensor, shifts: Tensor, table_rows: Tensor, num_rows: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Return position and slot of each flat row, [T] int64 each. Flat rows are the concatenated chunks.

    page_table  [B, P] int64  0 for no page; wide enough for all positions
    ends        [G] int64     first flat row after each chunk
    shifts      [G] int64     position minus flat row
    table_rows  [G] int64     row of the page table
    """
    flat = torch.arange(num_rows, device=ends.device)
    chunk = torch.bucketize(flat, ends, right=True)
    positions = flat + shifts[chunk]
    return positions, slots_of(page_table, table_rows[chunk], positions, page_size)


# These numbers change from step to step. Without this option, Triton compiles again for 1 and for multiples of 16.
@jit(do_not_specialize=["num_rows", "num_chunks"])
def _locate_rows_kernel(
    page_table, ends, shifts, table_rows, positions, slots, table_stride, num_pages, num_rows, num_chunks,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = row < num_rows
    chunk = row * 0
    for index in range(num_chunks - 1):
        chunk += (row >= tl.load(ends + index)).to(tl.int32)
    position = row + tl.load(shifts + chunk)
    table = page_table + tl.load(table_rows + chunk) * table_stride
    tl.store(positions + row, position, mask=is_row)
    slot = slots_at(table, position, num_pages * PAGE_SIZE, num_pages, PAGE_SIZE)
    tl.store(slots + row, slot, mask=is_row)


def locate_rows(
    page_table: Tensor, ends: Tensor, shifts: Tensor, table_rows: Tensor, num_rows: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Compute `locate_rows_ref` in one launch."""
    check_tensors(page_table, ends, shifts, table_rows)
    require(len(ends) == len(shifts) == len(table_rows), "ends, shifts, table_rows", "one per chunk")
    require(page_table.stride(1) == 1, "page_table", "contiguous rows")
    # Two allocations: the alignment of a second half of one tensor would depend on the number of rows.
    positions, slots = (torch.empty(num_rows, dtype=torch.int64, device=page_table.device) for _ in range(2))
    if num_rows:
        _locate_rows_kernel[(ceil_div(num_rows, ELEMENT_TILE),)](
            page_table, ends, shifts, table_rows, positions, slots, page_table.stride(0), page_table.shape[1],
            num_rows, len(ends), PAGE_SIZE=page_size, TILE=ELEMENT_TILE,
        )  # fmt: skip
    return positions, slots
