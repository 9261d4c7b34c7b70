"""Positions to KV slots through a page table.

A slot is one token's place in KV, `page * page_size + offset`. Page 0 is never allocated, so a table entry of 0 means
"no page" and becomes PAD; so does every position at or past what a request has reserved. PAD rows write nothing.

Axis letters: R requests, N rows a request, P pages.
"""

import torch
from torch import Tensor

from dflash_kernels.launch_config import jit, tl

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
@jit
def slots_at(table, position, reserved_len, num_pages, PAGE_SIZE: tl.constexpr):
    """`slot_mapping_ref` for positions of one request, whose row of the page table this is."""
    column = position // PAGE_SIZE
    is_inside = (position >= 0) & (position < reserved_len) & (column < num_pages)
    page = tl.load(table + column, mask=is_inside, other=0)
    return tl.where(page > 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)
