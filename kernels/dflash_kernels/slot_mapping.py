"""Positions to KV slots through a page table.

A slot is one token's place in KV, `page * page_size + offset`. Page 0 is never allocated, so a table entry of 0 means
"no page" and becomes PAD; so does every position at or past what a request has reserved. PAD rows write nothing.

Axis letters: R requests, N rows a request, P pages.
"""

import torch
from torch import Tensor

from dflash_kernels.launch_config import ELEMENT_TILE, ceil_div, check_tensors, jit, require, tl

PAD = -1


def slot_mapping_ref(page_table: Tensor, positions: Tensor, reserved_lens: Tensor, page_size: int) -> Tensor:
    """The slot of each position, or PAD.

    page_table     [R, P] int64   0 where no page is owned
    positions      [R, N] int64   negative for padded rows
    reserved_lens  [R] int64      first position the request has not reserved
    Returns [R, N] int64.
    """
    columns = positions // page_size
    is_inside = (positions >= 0) & (positions < reserved_lens[:, None]) & (columns < page_table.shape[1])
    pages = page_table.gather(1, torch.where(is_inside, columns, 0))
    slots = pages * page_size + positions % page_size
    return torch.where(is_inside & (pages > 0), slots, PAD)


# Sizes that differ from step to step: a kernel for those that are 1, or multiples of 16, would be compiled in mid-run.
@jit(do_not_specialize=["table_stride", "positions_stride", "num_pages", "num_rows", "num_elements"])
def _slot_mapping_kernel(
    page_table, positions, reserved_lens, slots,
    table_stride, positions_stride, num_pages, num_rows, num_elements,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_element = element < num_elements
    request = element // num_rows
    position = tl.load(
        positions + request * positions_stride + element % num_rows, mask=is_element, other=-1
    ).to(tl.int64)  # fmt: skip
    reserved_len = tl.load(reserved_lens + request, mask=is_element, other=0)
    column = position // PAGE_SIZE
    is_inside = (position >= 0) & (position < reserved_len) & (column < num_pages)
    page = tl.load(page_table + request * table_stride + column, mask=is_inside, other=0).to(tl.int64)
    slot = page * PAGE_SIZE + position % PAGE_SIZE
    tl.store(slots + element, tl.where(page > 0, slot, -1), mask=is_element)


def slot_mapping(page_table: Tensor, positions: Tensor, reserved_lens: Tensor, page_size: int) -> Tensor:
    """`slot_mapping_ref` in one launch."""
    check_tensors(page_table, positions, reserved_lens)
    num_requests, num_rows = positions.shape
    require(page_table.shape[0] == num_requests == reserved_lens.numel(), "a table row and a length for each request")
    require(page_table.stride(1) == 1 and positions.stride(1) == 1, "rows of the table and of positions contiguous")
    slots = torch.empty((num_requests, num_rows), dtype=torch.int64, device=positions.device)
    if slots.numel():
        _slot_mapping_kernel[(ceil_div(slots.numel(), ELEMENT_TILE),)](
            page_table, positions, reserved_lens.contiguous(), slots,
            page_table.stride(0), positions.stride(0), page_table.shape[1], num_rows, slots.numel(),
            PAGE_SIZE=page_size, TILE=ELEMENT_TILE,
        )  # fmt: skip
    return slots
