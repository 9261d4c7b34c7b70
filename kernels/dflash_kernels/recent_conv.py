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
from dflash_kernels.launch_config import ELEMENT_TILE, ceil_div, check_dtypes, check_tensors, jit, require, tl

MANY_ROWS = 256
"""Fewest rows for which a program convolves several rows, so that it reads most rows once instead of S times."""


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


def recent_conv_ref(rows: Tensor, weight: Tensor, ring: Tensor, runs: RowRuns, *, is_short: bool = False) -> Tensor:
    """Convolve rows over positions, apply silu, and keep the last rows of each run in the rings.

    rows    [T, C]
    weight  [C, S]   the last tap belongs to the row itself
    ring    [B, M, C]   written
    Returns [T, C]. A position before the text counts as zero.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    num_taps, size = weight.shape[1], ring.shape[1]
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
        total += value * weight[:, num_taps - 1 - back].to(wide)
    is_kept = (inside < counts) & (inside >= counts - size)
    ring[texts[is_kept], positions[is_kept] % size] = rows[is_kept]
    convolved: Tensor = torch.nn.functional.silu(total).to(rows.dtype)
    return convolved


@jit
def _find_run(row, is_row, starts, firsts, counts, of_rows, texts, BLOCK: tl.constexpr):
    """Return text, first position, place in its run, and rows of its run of each flat row."""
    if BLOCK > 0:
        run = row // BLOCK
        inside, count = row - run * BLOCK, row * 0 + BLOCK
    else:
        run = tl.load(of_rows + row, mask=is_row, other=0)
        inside = row - tl.load(firsts + run, mask=is_row, other=0)
        count = tl.load(counts + run, mask=is_row, other=0)
    return tl.load(texts + run, mask=is_row, other=0), tl.load(starts + run, mask=is_row, other=0), inside, count


@jit
def _recent_conv_kernel(
    rows, weight, ring, out, texts, starts, firsts, counts, of_rows, num_rows, rows_row, ring_size,
    WIDTH: tl.constexpr, NUM_TAPS: tl.constexpr, BLOCK: tl.constexpr, IS_STORED: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    channel = (tl.program_id(1) * TILE_C + tl.arange(0, TILE_C))[None, :]
    is_row = row < num_rows
    text, start, inside, _ = _find_run(row, is_row, starts, firsts, counts, of_rows, texts, BLOCK)
    is_element = is_row[:, None] & (channel < WIDTH)
    total = tl.zeros((TILE_R, TILE_C), tl.float32)
    wait_for_launches_before(IS_EARLY)
    let_next_launch_begin(IS_EARLY)
    for back in tl.static_range(NUM_TAPS):
        before = start + inside - back
        is_own, is_kept = inside >= back, (inside < back) & (before >= 0)
        own = tl.load(rows + (row - back)[:, None] * rows_row + channel, mask=is_element & is_own[:, None], other=0.0)
        slot = (text * ring_size + before % ring_size)[:, None]
        kept = tl.load(ring + slot * WIDTH + channel, mask=is_element & is_kept[:, None], other=0.0)
        tap = tl.load(weight + channel * NUM_TAPS + NUM_TAPS - 1 - back, mask=channel < WIDTH, other=0.0)
        total += (own.to(tl.float32) + kept.to(tl.float32)) * tap.to(tl.float32)
        if IS_STORED and back == 0:
            tl.store(ring + slot * WIDTH + channel, own, mask=is_element)
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + row[:, None] * WIDTH + channel, total.to(out.dtype.element_ty), mask=is_element)


@jit
def _keep_rows_kernel(
    rows, ring, texts, starts, firsts, counts, of_rows, rows_row, ring_size,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    text, start, inside, count = _find_run(row, row >= 0, starts, firsts, counts, of_rows, texts, BLOCK)
    if (inside < count) & (inside >= count - ring_size):
        channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_channel = channel < WIDTH
        slot = text * ring_size + (start + inside) % ring_size
        value = tl.load(rows + row * rows_row + channel, mask=is_channel, other=0.0)
        tl.store(ring + slot * WIDTH + channel, value, mask=is_channel)


def recent_conv(rows: Tensor, weight: Tensor, ring: Tensor, runs: RowRuns, *, is_short: bool = False) -> Tensor:
    """Compute `recent_conv_ref`.

    With `is_short` no run has more than M - S + 1 rows, and one launch does everything. Otherwise a row could be
    written over another that is still to be read, so that a second launch keeps the rows.
    """
    places = [item for item in runs if item is not None]
    check_tensors(rows, weight, ring, *places)
    check_dtypes(rows, weight, ring)
    count, width = rows.shape
    num_taps, size = weight.shape[1], ring.shape[1]
    require(weight.shape == (width, num_taps) and weight.is_contiguous(), "weight", "[channels, taps], contiguous")
    require(ring.shape[2] == width and ring.is_contiguous(), "ring", "[texts, rows, channels], contiguous")
    require(size >= num_taps, "ring", f"at least {num_taps} rows")
    require(rows.stride(1) == 1, "rows", "contiguous rows")
    require(len(places) in (2, 5), "runs", "texts and starts, or all fields")
    require(len(places) == 5 or count % max(len(runs.texts), 1) == 0, "runs", "equally many rows each")
    require(all(item.is_contiguous() for item in places), "runs", "contiguous tensors")
    block = count // max(len(runs.texts), 1) if len(places) == 2 else 0
    given = (*places, *[runs.texts] * (5 - len(places)))
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    if count:
        tile_r, tile_c = (1, ELEMENT_TILE) if count < MANY_ROWS else (8, ELEMENT_TILE // 2)
        _recent_conv_kernel[(ceil_div(count, tile_r), ceil_div(width, tile_c))](
            rows, weight, ring, out, *given, count, rows.stride(0), size,
            WIDTH=width, NUM_TAPS=num_taps, BLOCK=block, IS_STORED=is_short, TILE_R=tile_r, TILE_C=tile_c,
            num_warps=4, **early(rows.device),
        )  # fmt: skip
        if not is_short:
            _keep_rows_kernel[(count, ceil_div(width, ELEMENT_TILE))](
                rows, ring, *given, rows.stride(0), size,
                WIDTH=width, BLOCK=block, TILE=ELEMENT_TILE,
            )  # fmt: skip
    return out
