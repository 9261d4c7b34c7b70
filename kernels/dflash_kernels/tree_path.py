"""The accepted path of a verified tree, and the KV rows that move when the path becomes text.

The target chooses a token after every row of the tree. A child is accepted if it has the token that the target chose
after its parent. Siblings have different tokens, so the accepted nodes are one path from the anchor. `close_step` then
commits this path as it commits a block without branches.

The choice is the target's own token, greedy or sampled, so a tree changes no text. For sampled tokens this equals
rejection sampling with several candidates: a node's children are accepted with their probability under the target.

Recurrent layers keep records of rows in rings, by position. The records of the path's rows move likewise.

Axis letters: R requests, N nodes, M rows (N + 1), W rows of the path, P pages, L layers, E elements of a KV row or a
record, B texts, Q records of a ring.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.draft_tree import Tree
from dflash_kernels.launch_config import check_tensors, jit, power_of_2, require, tl
from dflash_kernels.slot_mapping import PAD


class Path(NamedTuple):
    """One path of each tree, int64: the accepted nodes, then the most likely node after each node."""

    rows: Tensor
    """[R, W] rows of the tree; the anchor's row 0 after the end of the path"""
    token_ids: Tensor
    """[R, W - 1] draft tokens, negative after the end of the path"""


def follow_tree_ref(tree: Tree, chosen: Tensor, num_rows: int) -> Path:
    """Return the path of W = `num_rows` rows that the target's choices select.

    chosen  [R, M] int64, the target's token after each row
    After the last accepted node the path goes on with first children, which the target did not choose.
    """
    num_requests, num_nodes = tree.token_ids.shape
    end = num_nodes + 1  # stands for no row
    node_row = torch.arange(1, end, device=chosen.device).expand_as(tree.parents)
    is_node = tree.token_ids >= 0
    is_match = is_node & (tree.token_ids == chosen.gather(1, tree.parents))
    # A matching child comes before all others, and after it the first child, which is the most likely one.
    keys = torch.where(is_match, node_row, node_row + end)
    keys = torch.where(is_node, keys, 2 * end)
    best = keys.new_full((num_requests, end + 1), 2 * end).scatter_reduce(1, tree.parents, keys, "amin")
    following = torch.where(best < 2 * end, best % end, end)
    rows = [torch.zeros_like(chosen[:, 0])]
    for _ in range(num_rows - 1):
        rows.append(following.gather(1, rows[-1][:, None])[:, 0])
    path = torch.stack(rows, dim=1)
    is_row = path < end
    path = torch.where(is_row, path, 0)
    tokens = tree.token_ids.gather(1, (path[:, 1:] - 1).clamp(min=0))
    return Path(path, torch.where(is_row[:, 1:], tokens, -1))


def move_rows_ref(pages: Tensor, sources: Tensor, slots: Tensor) -> None:
    """Copy the KV rows of a path from the slots of the tree's rows to the slots of the path's positions.

    pages    [P, L, 2, page_size, E], written
    sources  [R, W] int64, slots of the path's rows in the tree
    slots    [R, W] int64, slots of the path's positions; PAD for rows that are not committed
    """
    is_moved = (slots != PAD) & (sources != slots)
    # Other rows copy slot 0 to itself. Page 0 is never allocated.
    sources, slots = (torch.where(is_moved, item, 0).flatten() for item in (sources, slots))
    page_size, raw = pages.shape[3], pages.view(torch.uint8)
    raw[slots // page_size, :, :, slots % page_size] = raw[sources // page_size, :, :, sources % page_size]


class PathRecords(NamedTuple):
    """Whose records move, and from which rows of a tree to which rows of the text."""

    texts: Tensor
    """[R] int64"""
    lens: Tensor
    """[R] int64, rows of the text before the anchor"""
    rows: Tensor
    """[R, W] int64, rows of the path in the tree"""
    slots: Tensor
    """[R, W] int64, PAD for rows that are not committed"""


def move_records_ref(records: Tensor, path: PathRecords) -> None:
    """Copy the records of a path from the places of the tree's rows to the places of the path's positions.

    records  [L, B, Q, ...], written. Row i of a tree is at `(lens + i) % Q`, like the i-th row of a text.
    """
    size, lens = records.shape[2], path.lens[:, None]
    is_moved = path.slots != PAD
    place = torch.arange(path.rows.shape[1], device=records.device).expand_as(path.rows)
    texts = path.texts[:, None].expand_as(place)[is_moved]
    sources, targets = (((lens + rows) % size)[is_moved] for rows in (path.rows, place))
    records[:, texts, targets] = records[:, texts, sources]


@jit(do_not_specialize=["num_nodes"])
def _follow_tree_kernel(
    token_ids, parents, chosen, rows, path_ids, num_nodes, NUM_PATH: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, TILE_N)
    is_inside = node < num_nodes
    ids = tl.load(token_ids + request * num_nodes + node, mask=is_inside, other=-1)
    parent = tl.load(parents + request * num_nodes + node, mask=is_inside, other=-1)
    tl.store(rows + request * NUM_PATH, tl.zeros((), tl.int64))
    current = tl.zeros((), tl.int32)
    for place in range(1, NUM_PATH):
        wanted = tl.load(chosen + request * (num_nodes + 1) + tl.maximum(current, 0))
        is_child = (parent == current) & (ids >= 0)
        key = tl.where(ids == wanted, node, node + TILE_N)
        best = tl.min(tl.where(is_child, key, 2 * TILE_N), 0)
        index = best % TILE_N
        is_row = best < 2 * TILE_N
        current = tl.where(is_row, index + 1, -2)  # no node has this parent
        token = tl.max(tl.where((node == index) & is_row, ids, -1), 0)
        tl.store(rows + request * NUM_PATH + place, tl.maximum(current, 0).to(tl.int64))
        tl.store(path_ids + request * (NUM_PATH - 1) + place - 1, token)


def follow_tree(tree: Tree, chosen: Tensor, num_rows: int) -> Path:
    """Compute `follow_tree_ref` in one launch, one program per request."""
    check_tensors(*tree, chosen)
    num_requests, num_nodes = tree.token_ids.shape
    require(chosen.shape == (num_requests, num_nodes + 1), "chosen", "one per row of the tree")
    require(num_nodes > 0 and num_rows > 1, "tree, num_rows", "at least one node and two rows")
    ids, parents, chosen = (item.contiguous() for item in (tree.token_ids, tree.parents, chosen))
    path = Path(chosen.new_empty((num_requests, num_rows)), chosen.new_empty((num_requests, num_rows - 1)))
    if num_requests:
        _follow_tree_kernel[(num_requests,)](
            ids, parents, chosen, *path, num_nodes, NUM_PATH=num_rows, TILE_N=power_of_2(num_nodes), num_warps=1
        )  # fmt: skip
    return path


@jit
def _move_rows_kernel(
    pages, sources, slots, page_stride, part_stride, row_stride, num_bytes,
    NUM_PATH: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    base = pages + part * part_stride + column
    # In the order of the path: no row is written before it was read, because a path's rows only move forward.
    for place in range(NUM_PATH):
        source = tl.load(sources + request * NUM_PATH + place)
        slot = tl.load(slots + request * NUM_PATH + place)
        is_moved = (slot != -1) & (slot != source)
        mask = (column < num_bytes) & is_moved
        row = tl.load(base + source // PAGE_SIZE * page_stride + source % PAGE_SIZE * row_stride, mask=mask)
        tl.store(base + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * row_stride, row, mask=mask)


MOVE_TILE = 1024
"""Bytes of a KV row that one program moves."""


def move_rows(pages: Tensor, sources: Tensor, slots: Tensor) -> None:
    """Compute `move_rows_ref` in one launch. Each program moves one part of every row of a path, in order.

    A source must not be the slot of an earlier row of the same path. Paths of a tree meet this condition: row i of a
    path is row i of the tree or a later row.
    """
    check_tensors(pages, sources, slots)
    require(pages.dim() == 5 and pages.is_contiguous(), "pages", "five axes, contiguous")
    require(sources.shape == slots.shape and sources.dim() == 2, "sources, slots", "one per row of a path")
    raw = pages.view(torch.uint8)
    _, num_layers, _, page_size, num_bytes = raw.shape
    if sources.numel() and raw.numel():
        _move_rows_kernel[(len(sources), 2 * num_layers, -(-num_bytes // MOVE_TILE))](
            raw, sources.contiguous(), slots.contiguous(), raw.stride(0), raw.stride(2), raw.stride(3), num_bytes,
            NUM_PATH=sources.shape[1], PAGE_SIZE=page_size, TILE=min(MOVE_TILE, power_of_2(num_bytes)), num_warps=4,
        )  # fmt: skip


@jit
def _move_records_kernel(
    records, texts, lens, rows, slots, num_texts, ring_size, num_bytes, NUM_PATH: tl.constexpr, TILE: tl.constexpr
):
    request, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    begin = tl.load(lens + request)
    base = records + (layer * num_texts + tl.load(texts + request)) * ring_size * num_bytes + column
    # In the order of the path, as in `_move_rows_kernel`. The anchor stays where it is.
    for place in range(1, NUM_PATH):
        row = tl.load(rows + request * NUM_PATH + place)
        is_moved = (tl.load(slots + request * NUM_PATH + place) != -1) & (row != place)
        mask = (column < num_bytes) & is_moved
        record = tl.load(base + (begin + row) % ring_size * num_bytes, mask=mask)
        tl.store(base + (begin + place) % ring_size * num_bytes, record, mask=mask)


def move_records(records: Tensor, path: PathRecords) -> None:
    """Compute `move_records_ref` in one launch. Each program moves one part of every record of a path, in order."""
    check_tensors(records, *path)
    require(records.dim() > 3 and records.is_contiguous(), "records", "four axes or more, contiguous")
    require(path.rows.shape == path.slots.shape and path.rows.dim() == 2, "rows, slots", "one per row of a path")
    raw = records.flatten(3).view(torch.uint8)
    num_layers, num_texts, size, num_bytes = raw.shape
    if path.rows.numel() and raw.numel():
        texts, lens, rows, slots = (item.contiguous() for item in path)
        _move_records_kernel[(len(rows), num_layers, -(-num_bytes // MOVE_TILE))](
            raw, texts, lens, rows, slots, num_texts, size, num_bytes, NUM_PATH=rows.shape[1],
            TILE=min(MOVE_TILE, power_of_2(num_bytes)), num_warps=4,
        )  # fmt: skip
