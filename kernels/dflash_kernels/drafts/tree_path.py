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

from dflash_kernels.drafts.draft_tree import LANES, Tree
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.kv.slot_mapping import PAD
from dflash_kernels.launch import ceil_div, check_tensors, jit, power_of_2, require, tl


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
    num_requests, num_nodes = tree.draft_ids.shape
    end = num_nodes + 1  # stands for no row
    node_row = torch.arange(1, end, device=chosen.device).expand_as(tree.parents)
    is_node = tree.draft_ids >= 0
    is_match = is_node & (tree.draft_ids == chosen.gather(1, tree.parents))
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
    tokens = tree.draft_ids.gather(1, (path[:, 1:] - 1).clamp(min=0))
    return Path(path, torch.where(is_row[:, 1:], tokens, -1))


def move_rows_ref(pages: Tensor, row_slots: Tensor, path_rows: Tensor, slots: Tensor) -> None:
    """Copy the KV rows of a path from the slots of the tree's rows to the slots of the path's positions.

    pages      [P, L, 2, page_size, E], written
    row_slots  [R, M] int64, slots of the tree's rows
    path_rows  [R, W] int64, rows of the path in the tree
    slots      [R, W] int64, slots of the path's positions; PAD for rows that are not committed
    """
    sources = row_slots.gather(1, path_rows)
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
    """Copy the records of a path from the rows of the tree to the positions of the path.

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
    draft_ids, parents, chosen, rows, path_ids, num_nodes,
    NUM_PATH: tl.constexpr, TILE_M: tl.constexpr, TILE_P: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    request = tl.program_id(0).to(tl.int64)
    row, place = tl.arange(0, TILE_M), tl.arange(0, TILE_P)
    is_inside = (row > 0) & (row <= num_nodes)
    first = request * (num_nodes + 1)
    parent = tl.load(parents + first + row, mask=is_inside, other=0).to(tl.int32)
    token = tl.load(draft_ids + request * num_nodes + row - 1, mask=is_inside, other=-1)
    wanted = tl.load(chosen + first + parent, mask=is_inside, other=-1)
    # A matching child comes before all others, and after it the first child.
    key = tl.where(token == wanted, row, row + TILE_M)
    parent = tl.where(token >= 0, parent, -1)  # the parent of no row
    path, current = tl.zeros((TILE_P,), tl.int32), tl.zeros((), tl.int32)
    for step in range(1, NUM_PATH):
        best = tl.min(tl.where(parent == current, key, 2 * TILE_M), 0)
        current = tl.where(best < 2 * TILE_M, best % TILE_M, -2)  # no node has this parent
        path = tl.where(place == step, tl.maximum(current, 0), path)
    tl.store(rows + request * NUM_PATH + place, path.to(tl.int64), mask=place < NUM_PATH)
    path_id = tl.load(draft_ids + request * num_nodes + path - 1, mask=path > 0, other=-1)
    target = path_ids + request * (NUM_PATH - 1) + place - 1
    tl.store(target, path_id, mask=(place > 0) & (place < NUM_PATH))


def follow_tree(tree: Tree, chosen: Tensor, num_rows: int) -> Path:
    """Compute `follow_tree_ref` in one launch, one program per request."""
    check_tensors(tree.draft_ids, tree.rows.parents, chosen)
    num_requests, num_nodes = tree.draft_ids.shape
    require(chosen.shape == (num_requests, num_nodes + 1), "chosen", "one per row of the tree")
    require(num_nodes > 0 and num_rows > 1, "tree, num_rows", "at least one node and two rows")
    given = (item.contiguous() for item in (tree.draft_ids, tree.rows.parents, chosen))
    path = Path(chosen.new_empty((num_requests, num_rows)), chosen.new_empty((num_requests, num_rows - 1)))
    if num_requests:
        _follow_tree_kernel[(num_requests,)](
            *given, *path, num_nodes, NUM_PATH=num_rows, TILE_M=max(power_of_2(num_nodes + 1), LANES),
            TILE_P=power_of_2(num_rows), num_warps=1, **early(chosen.device),
        )  # fmt: skip
    return path


@jit(do_not_specialize=["num_rows"])
def _move_rows_kernel(
    pages, row_slots, path_rows, slots, num_rows, page_stride, part_stride, row_stride, num_bytes,
    NUM_PATH: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_P: tl.constexpr, TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column, place = tl.program_id(2) * TILE + tl.arange(0, TILE), tl.arange(0, TILE_P)
    slot = tl.load(slots + request * NUM_PATH + place, mask=place < NUM_PATH, other=-1)
    row = tl.load(path_rows + request * NUM_PATH + place, mask=place < NUM_PATH, other=0)
    source = tl.load(row_slots + request * num_rows + row, mask=slot != -1, other=-1)
    is_moved = (slot != source)[:, None] & (column < num_bytes)[None, :]
    base = pages + part * part_stride + column[None, :]
    source = (source // PAGE_SIZE * page_stride + source % PAGE_SIZE * row_stride)[:, None]
    target = (slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * row_stride)[:, None]
    moved = tl.load(base + source, mask=is_moved)
    tl.debug_barrier()  # a row may be written where another one is read, so all rows are read first
    tl.store(base + target, moved, mask=is_moved)


MOVE_TILE, MOVE_BYTES = 1024, 16384
"""Most bytes of one KV row or record that a program moves, and of all rows of a path."""


def move_rows(pages: Tensor, row_slots: Tensor, path_rows: Tensor, slots: Tensor) -> None:
    """Compute `move_rows_ref` in one launch. Each program reads one part of every row of a path, then writes it."""
    check_tensors(pages, row_slots, path_rows, slots)
    require(pages.dim() == 5 and pages.is_contiguous(), "pages", "five axes, contiguous")
    require(path_rows.shape == slots.shape and slots.dim() == 2, "path_rows, slots", "one per row of a path")
    require(row_slots.dim() == 2 and len(row_slots) == len(slots), "row_slots", "one per row of each tree")
    raw = pages.view(torch.uint8)
    _, num_layers, _, page_size, num_bytes = raw.shape
    if slots.numel() and raw.numel():
        tiles = _tiles(slots.shape[1], num_bytes)
        _move_rows_kernel[(len(slots), 2 * num_layers, ceil_div(num_bytes, tiles["TILE"]))](
            raw, *(item.contiguous() for item in (row_slots, path_rows, slots)), row_slots.shape[1],
            raw.stride(0), raw.stride(2), raw.stride(3), num_bytes,
            NUM_PATH=slots.shape[1], PAGE_SIZE=page_size, **tiles, num_warps=4, **early(raw.device),
        )  # fmt: skip


@jit
def _move_records_kernel(
    records, texts, lens, rows, slots, num_texts, ring_size, num_bytes,
    NUM_PATH: tl.constexpr, TILE_P: tl.constexpr, TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    request, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column, place = tl.program_id(2) * TILE + tl.arange(0, TILE), tl.arange(0, TILE_P)
    row = tl.load(rows + request * NUM_PATH + place, mask=place < NUM_PATH, other=0)
    slot = tl.load(slots + request * NUM_PATH + place, mask=place < NUM_PATH, other=-1)
    begin = tl.load(lens + request)
    is_moved = ((slot != -1) & (row != place))[:, None] & (column < num_bytes)[None, :]
    base = records + (layer * num_texts + tl.load(texts + request)) * ring_size * num_bytes + column[None, :]
    moved = tl.load(base + ((begin + row) % ring_size * num_bytes)[:, None], mask=is_moved)
    tl.debug_barrier()  # as in `_move_rows_kernel`
    tl.store(base + ((begin + place) % ring_size * num_bytes)[:, None], moved, mask=is_moved)


def move_records(records: Tensor, path: PathRecords) -> None:
    """Compute `move_records_ref` in one launch. Each program reads one part of every record, then writes it."""
    check_tensors(records, *path)
    require(records.dim() > 3 and records.is_contiguous(), "records", "four axes or more, contiguous")
    require(path.rows.shape == path.slots.shape and path.rows.dim() == 2, "rows, slots", "one per row of a path")
    raw = records.flatten(3).view(torch.uint8)
    num_layers, num_texts, size, num_bytes = raw.shape
    if path.rows.numel() and raw.numel():
        texts, lens, rows, slots = (item.contiguous() for item in path)
        tiles = _tiles(rows.shape[1], num_bytes)
        _move_records_kernel[(len(rows), num_layers, ceil_div(num_bytes, tiles["TILE"]))](
            raw, texts, lens, rows, slots, num_texts, size, num_bytes, NUM_PATH=rows.shape[1], **tiles, num_warps=4,
            **early(raw.device),
        )  # fmt: skip


def _tiles(num_path: int, num_bytes: int) -> dict[str, int]:
    """Rows of a path and bytes of each row in one program."""
    rows = power_of_2(num_path)
    return {"TILE_P": rows, "TILE": min(MOVE_TILE, max(MOVE_BYTES // rows, 16), power_of_2(num_bytes))}
