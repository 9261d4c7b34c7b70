"""A short causal convolution along each text, with the latest rows of every text kept in a ring.

A recurrent layer convolves each channel over a few positions. The rows before a block or a prompt chunk come from the
ring of the text: position p is at p modulo the size of the ring. So the rows of rejected drafts need no undoing: the
next block starts at an earlier position and writes over them. Sums are in float32 (float64 for float64 models), silu is
applied, and the result is rounded once.
Source: huggingface/transformers models/qwen3_5/modeling_qwen3_5.py, causal_conv1d_update.

Axis letters: T flat rows, G segments, C channels, S taps, B texts, M rows of a ring.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.early_launch import early, let_next_launch_begin, wait_for_launches_before
from dflash_kernels.launch import ceil_div, check_dtypes, check_tensors, jit, power_of_2, require, tl
from dflash_kernels.launch_config import ELEMENT_TILE

BLOCK_CHANNELS, BLOCK_WARPS = 128, 4
"""Channels of a block in one program, and its warps."""

SHORT_ROWS, SHORT_CHANNELS = 4, 256
"""Blocks of at most SHORT_ROWS rows have SHORT_CHANNELS channels in one program."""

CHUNK_ROWS, CHUNK_CHANNELS, CHUNK_WARPS = 16, 128, 4
"""Rows and channels of a chunk in one program, and its warps."""


class RowRuns(NamedTuple):
    """How flat rows are divided into runs, and which text each run continues: a block, or a chunk of a prompt.

    Without `firsts`, `counts` and `of_rows`, all runs have equally many rows. Rows after the rows of their run are
    padding.
    """

    texts: Tensor
    """[G] int64, the text of each run"""
    starts: Tensor
    """[G] int64, the position of its first row"""
    firsts: Tensor | None = None
    """[G] int64, its first flat row"""
    counts: Tensor | None = None
    """[G] int64, its number of rows"""
    of_rows: Tensor | None = None
    """[T] int64, the run of each row"""


def recent_conv_ref(rows: Tensor, weight: Tensor, ring: Tensor, runs: RowRuns) -> Tensor:
    """Convolve rows over positions, apply silu, and keep the last rows of each run in the rings.

    rows    [T, C]
    weight  [S, C]   the last tap belongs to the row itself
    ring    [B, M, C]   written
    Returns [T, C]. A position before the text counts as zero.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    num_taps, size = len(weight), ring.shape[1]
    index = torch.arange(len(rows), device=rows.device)
    count = len(rows) // max(len(runs.texts), 1)
    run = index // max(count, 1) if runs.of_rows is None else runs.of_rows
    inside = index - (run * count if runs.firsts is None else runs.firsts[run])
    texts, starts = runs.texts[run], runs.starts[run]
    counts = torch.full_like(run, count) if runs.counts is None else runs.counts[run]
    positions = starts + inside
    total = torch.zeros(rows.shape, dtype=wide, device=rows.device)
    for back in range(num_taps):
        before = positions - back
        own = rows[(index - back).clamp(min=0)].to(wide)
        kept = ring[texts, before % size].to(wide)
        value = torch.where((inside >= back)[:, None], own, torch.where((before >= 0)[:, None], kept, 0.0))
        total += value * weight[num_taps - 1 - back].to(wide)
    is_kept = (inside < counts) & (inside >= counts - size)
    ring[texts[is_kept], positions[is_kept] % size] = rows[is_kept]
    convolved: Tensor = torch.nn.functional.silu(total).to(rows.dtype)
    return convolved


@jit
def _recent_conv_chunks_kernel(
    rows, weight, ring, out, texts, starts, firsts, of_rows, num_rows, rows_row, ring_size,
    WIDTH: tl.constexpr, NUM_TAPS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    channel = (tl.program_id(1) * TILE_C + tl.arange(0, TILE_C))[None, :]
    is_row = row < num_rows
    run = tl.load(of_rows + row, mask=is_row, other=0)
    inside = (row - tl.load(firsts + run, mask=is_row, other=0)).to(tl.int32)
    text, start = tl.load(texts + run, mask=is_row, other=0), tl.load(starts + run, mask=is_row, other=0)
    place = (start % ring_size).to(tl.int32) + inside
    is_element = is_row[:, None] & (channel < WIDTH)
    total = tl.zeros((TILE_R, TILE_C), tl.float32)
    has_kept = tl.min(inside, 0) < NUM_TAPS - 1
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    for back in tl.static_range(NUM_TAPS):
        is_own = is_element & (inside >= back)[:, None]
        value = tl.load(rows + (row - back)[:, None] * rows_row + channel, mask=is_own, other=0.0)
        if has_kept:
            slot = place - back
            slot = text * ring_size + tl.where(slot < 0, slot + ring_size, slot)
            is_kept = is_element & ((inside < back) & (start + inside >= back))[:, None]
            value += tl.load(ring + slot[:, None] * WIDTH + channel, mask=is_kept, other=0.0)
        tap = tl.load(weight + (NUM_TAPS - 1 - back) * WIDTH + channel, mask=channel < WIDTH, other=0.0)
        total += value.to(tl.float32) * tap.to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + row[:, None] * WIDTH + channel, total.to(out.dtype.element_ty), mask=is_element)


@jit
def _keep_rows_kernel(
    rows, ring, texts, starts, firsts, counts, rows_row, ring_size, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    run, back = tl.program_id(0), tl.program_id(1)
    inside = tl.load(counts + run) - 1 - back
    if inside >= 0:
        channel = tl.program_id(2) * TILE + tl.arange(0, TILE)
        is_channel = channel < WIDTH
        slot = tl.load(texts + run) * ring_size + (tl.load(starts + run) + inside) % ring_size
        value = tl.load(rows + (tl.load(firsts + run) + inside) * rows_row + channel, mask=is_channel, other=0.0)
        tl.store(ring + slot * WIDTH + channel, value, mask=is_channel)


@jit
def _recent_conv_blocks_kernel(
    rows, weight, ring, out, texts, starts, num_rows, rows_row, ring_size,
    WIDTH: tl.constexpr, NUM_TAPS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    run, inside = tl.program_id(0).to(tl.int64), tl.arange(0, TILE_R)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    is_channel = channel < WIDTH
    is_element = (inside < num_rows)[:, None] & is_channel[None, :]
    text, start = tl.load(texts + run), tl.load(starts + run)
    place = (start % ring_size).to(tl.int32) + inside  # slots of the block's rows, before they wrap around
    source = rows + (run * num_rows + inside)[:, None] * rows_row + channel[None, :]
    home = ring + text * ring_size * WIDTH + channel[None, :]
    total = tl.zeros((TILE_R, TILE_C), tl.float32)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    for back in tl.static_range(NUM_TAPS):
        is_own, is_kept = inside >= back, (inside < back) & (start + inside >= back)
        own = tl.load(source - back * rows_row, mask=is_element & is_own[:, None], other=0.0)
        slot = place - back
        slot = tl.where(slot < 0, slot + ring_size, tl.where(slot >= ring_size, slot - ring_size, slot))[:, None]
        kept = tl.load(home + slot * WIDTH, mask=is_element & is_kept[:, None], other=0.0)
        tap = tl.load(weight + (NUM_TAPS - 1 - back) * WIDTH + channel, mask=is_channel, other=0.0)
        total += (own.to(tl.float32) + kept.to(tl.float32)) * tap.to(tl.float32)[None, :]
        if back == 0:
            tl.store(home + slot * WIDTH, own, mask=is_element)
    total = total / (1.0 + tl.exp(-total))
    target = out + (run * num_rows + inside)[:, None] * WIDTH + channel[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_element)


def recent_conv(rows: Tensor, weight: Tensor, ring: Tensor, runs: RowRuns) -> Tensor:
    """Compute `recent_conv_ref`, for blocks in one launch.

    A block has at most M - S + 1 rows. A longer run could write a row over another that is still to be read, so a
    second launch keeps the rows of chunks.
    """
    places = [item for item in runs if item is not None]
    check_tensors(rows, weight, ring, *places)
    check_dtypes(rows, weight, ring)
    count, width = rows.shape
    num_taps, size = len(weight), ring.shape[1]
    require(weight.shape == (num_taps, width) and weight.is_contiguous(), "weight", "[taps, channels], contiguous")
    require(ring.shape[2] == width and ring.is_contiguous(), "ring", "[texts, rows, channels], contiguous")
    require(size >= num_taps, "ring", f"at least {num_taps} rows")
    require(rows.stride(1) == 1, "rows", "contiguous rows")
    require(len(places) in (2, 5), "runs", "texts and starts, or all fields")
    require(all(item.is_contiguous() for item in places), "runs", "contiguous tensors")
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    if not count:
        return out
    num_runs, options = len(runs.texts), {"WIDTH": width, "NUM_TAPS": num_taps, **early(rows.device)}
    if runs.firsts is None:
        num_rows = count // num_runs
        require(num_rows * num_runs == count, "runs", "equally many rows each")
        require(num_rows <= size - num_taps + 1, "ring", f"at least {num_rows + num_taps - 1} rows")
        channels = SHORT_CHANNELS if num_rows <= SHORT_ROWS else BLOCK_CHANNELS
        _recent_conv_blocks_kernel[(num_runs, ceil_div(width, channels))](
            rows, weight, ring, out, runs.texts, runs.starts, num_rows, rows.stride(0), size,
            TILE_R=power_of_2(num_rows), TILE_C=channels, num_warps=BLOCK_WARPS, **options,
        )  # fmt: skip
        return out
    _recent_conv_chunks_kernel[(ceil_div(count, CHUNK_ROWS), ceil_div(width, CHUNK_CHANNELS))](
        rows, weight, ring, out, runs.texts, runs.starts, runs.firsts, runs.of_rows, count, rows.stride(0), size,
        TILE_R=CHUNK_ROWS, TILE_C=CHUNK_CHANNELS, num_warps=CHUNK_WARPS, **options,
    )  # fmt: skip
    _keep_rows_kernel[(num_runs, size, ceil_div(width, ELEMENT_TILE))](
        rows, ring, *runs[:4], rows.stride(0), size, WIDTH=width, TILE=ELEMENT_TILE
    )
    return out
