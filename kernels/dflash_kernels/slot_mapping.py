"""Positions to KV slots through a page table.

A slot is one token's place in KV, `page * page_size + offset`. Page 0 is never allocated, so a table entry of 0 means
"no page" and becomes PAD; so does every position at or past a request's limit. PAD rows write nothing.

Axis letters: R requests, N rows a request, P pages.
"""

import torch
from torch import Tensor

PAD = -1


def slot_mapping_ref(page_table: Tensor, positions: Tensor, limits: Tensor, page_size: int) -> Tensor:
    """The slot of each position, or PAD.

    page_table  [R, P] int64   0 where no page is owned
    positions   [R, N] int64   negative for padded rows
    limits      [R] int64      first position the request has not reserved
    Returns [R, N] int64.
    """
    columns = positions // page_size
    is_inside = (positions >= 0) & (positions < limits[:, None]) & (columns < page_table.shape[1])
    pages = page_table.gather(1, torch.where(is_inside, columns, 0))
    slots = pages * page_size + positions % page_size
    return torch.where(is_inside & (pages > 0), slots, PAD)
