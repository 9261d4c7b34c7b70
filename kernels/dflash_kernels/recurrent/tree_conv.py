"""The short causal convolution of `recent_conv.py` along the paths of verified trees.

A row is convolved with its ancestors, then with the rows before the anchor, which come from the ring of the text. Row i
of a tree is kept in the ring as position `start + i`. `tree_path.move_records` moves the rows of the accepted path to
their positions.

Axis letters: R trees, M rows of a tree, C channels, S taps, B texts, M' rows of a ring.
"""

import torch
from torch import Tensor

from dflash_kernels.drafts.draft_tree import TreeRows
from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.recurrent.recent_conv import RowRuns

TREE_ROWS, TREE_CHANNELS, TREE_WARPS = 16, 128, 4
"""Rows and channels of a tree in one program, and its warps."""


def tree_conv_ref(rows: Tensor, weight: Tensor, ring: Tensor, runs: RowRuns, tree: TreeRows) -> Tensor:
    """Convolve rows along their paths, apply silu, and keep the rows in the rings.

    rows    [R * M, C]
    weight  [S, C]   the last tap belongs to the row itself
    ring    [B, M', C]   written
    runs    text of each tree, and position of its anchor
    Returns [R * M, C]. A position before the text counts as zero.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    num_taps, size = len(weight), ring.shape[1]
    num_trees, num_rows = tree.depths.shape
    texts, starts = runs.texts[:, None], runs.starts[:, None]
    own = rows.view(num_trees, num_rows, -1)
    request = torch.arange(num_trees, device=rows.device)[:, None]
    row = torch.arange(num_rows, device=rows.device).expand(num_trees, -1)
    total, above = torch.zeros(own.shape, dtype=wide, device=rows.device), row
    for back in range(num_taps):
        before = starts + tree.depths - back
        kept = torch.where((before >= 0)[:, :, None], ring[texts, before % size].to(wide), 0.0)
        value = torch.where((tree.depths >= back)[:, :, None], own[request, above].to(wide), kept)
        total += value * weight[num_taps - 1 - back].to(wide)
        above = tree.parents.gather(1, above)
    ring[texts, (starts + row) % size] = own
    convolved: Tensor = torch.nn.functional.silu(total).to(rows.dtype).view(rows.shape)
    return convolved


@jit(do_not_specialize=["num_rows"])
def _tree_conv_kernel(
    rows, weight, ring, out, texts, starts, depths, parents, num_rows, rows_row, ring_size,
    WIDTH: tl.constexpr, NUM_TAPS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    run, row = tl.program_id(0).to(tl.int64), tl.program_id(2) * TILE_R + tl.arange(0, TILE_R)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    is_row, is_channel = row < num_rows, channel < WIDTH
    is_element = is_row[:, None] & is_channel[None, :]
    text, start = tl.load(texts + run), tl.load(starts + run)
    first = (start % ring_size).to(tl.int32)
    home = ring + text * ring_size * WIDTH + channel[None, :]
    total = tl.zeros((TILE_R, TILE_C), tl.float32)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    depth = tl.load(depths + run * num_rows + row, mask=is_row, other=0).to(tl.int32)
    above = row.to(tl.int64)
    for back in tl.static_range(NUM_TAPS):
        is_own, is_kept = depth >= back, (depth < back) & (start + depth >= back)
        source = rows + (run * num_rows + above)[:, None] * rows_row + channel[None, :]
        own = tl.load(source, mask=is_element & is_own[:, None], other=0.0)
        slot = first + depth - back  # of a row before the anchor, where it is used
        slot = tl.where(slot < 0, slot + ring_size, slot)[:, None]
        kept = tl.load(home + slot * WIDTH, mask=is_element & is_kept[:, None], other=0.0)
        tap = tl.load(weight + (NUM_TAPS - 1 - back) * WIDTH + channel, mask=is_channel, other=0.0)
        total += (own.to(tl.float32) + kept.to(tl.float32)) * tap.to(tl.float32)[None, :]
        if back == 0:
            tl.store(home + ((first + row) % ring_size)[:, None] * WIDTH, own, mask=is_element)
        above = tl.load(parents + run * num_rows + above, mask=is_row, other=0)
    total = total / (1.0 + tl.exp(-total))
    target = out + (run * num_rows + row)[:, None] * WIDTH + channel[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_element)


def tree_conv(rows: Tensor, weight: Tensor, ring: Tensor, runs: RowRuns, tree: TreeRows) -> Tensor:
    """Compute `tree_conv_ref` in one launch. A tree has at most M' - S + 1 rows."""
    check_tensors(rows, weight, ring, runs.texts, runs.starts, *tree)
    check_dtypes(rows, weight, ring)
    count, width = rows.shape
    num_taps, size = len(weight), ring.shape[1]
    num_trees, num_rows = tree.depths.shape
    require(weight.shape == (num_taps, width) and weight.is_contiguous(), "weight", "[taps, channels], contiguous")
    require(ring.shape[2] == width and ring.is_contiguous(), "ring", "[texts, rows, channels], contiguous")
    require(rows.stride(1) == 1, "rows", "contiguous rows")
    require(count == num_trees * num_rows and len(runs.texts) == num_trees, "tree", "one entry per row")
    require(num_rows <= size - num_taps + 1, "ring", f"at least {num_rows + num_taps - 1} rows")
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    if count:
        tile = min(TREE_ROWS, power_of_2(num_rows))
        _tree_conv_kernel[(num_trees, ceil_div(width, TREE_CHANNELS), ceil_div(num_rows, tile))](
            rows, weight, ring, out, runs.texts, runs.starts, tree.depths.contiguous(), tree.parents.contiguous(),
            num_rows, rows.stride(0), size, WIDTH=width, NUM_TAPS=num_taps, TILE_R=tile, TILE_C=TREE_CHANNELS,
            num_warps=TREE_WARPS, **early(rows.device),
        )  # fmt: skip
    return out
