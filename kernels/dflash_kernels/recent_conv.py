"""A short causal convolution along each text, with the latest rows of every text kept in a ring.

A recurrent layer convolves each channel over a few positions. The rows before a block or a prompt chunk come from the
ring of the text: position p is at p modulo the size of the ring. So the rows of rejected drafts need no undoing: the
next block starts at an earlier position and writes over them. Sums are in float32 (float64 for float64 models), silu is
applied, and the result is rounded once.
Source: huggingface/transformers models/qwen3_5/modeling_qwen3_5.py, causal_conv1d_update.

Axis letters: T flat rows, C channels, S taps, B texts, M rows of a ring.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch_config import ELEMENT_TILE, ceil_div, check_dtypes, check_tensors, jit, require, tl


class TextRows(NamedTuple):
    """Where flat rows belong. Rows of one segment are adjacent: a block, or a chunk of a prompt."""

    texts: Tensor
    """[T] int64, the text of each row"""
    positions: Tensor
    """[T] int64"""
    starts: Tensor
    """[T] int64, the position of the first row of the segment"""
    ends: Tensor
    """[T] int64, the position after the last row of the segment"""


def recent_conv_ref(rows: Tensor, weight: Tensor, ring: Tensor, places: TextRows, *, is_short: bool = False) -> Tensor:
    """Convolve rows over positions, apply silu, and keep the last rows of each segment in the rings.

    rows    [T, C]
    weight  [C, S]   the last tap belongs to the row itself
    ring    [B, M, C]   written
    Returns [T, C]. A position before the text counts as zero.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    num_taps, size = weight.shape[1], ring.shape[1]
    texts, positions, starts, ends = places
    index = torch.arange(len(rows), device=rows.device)
    total = torch.zeros(rows.shape, dtype=wide, device=rows.device)
    for back in range(num_taps):
        before = positions - back
        own = rows[(index - back).clamp(min=0)].to(wide)
        kept = ring[texts, before % size].to(wide)
        value = torch.where((before >= starts)[:, None], own, torch.where((before >= 0)[:, None], kept, 0.0))
        total += value * weight[:, num_taps - 1 - back].to(wide)
    is_kept = positions >= ends - size
    ring[texts[is_kept], positions[is_kept] % size] = rows[is_kept]
    convolved: Tensor = torch.nn.functional.silu(total).to(rows.dtype)
    return convolved


@jit
def _recent_conv_kernel(
    rows, weight, ring, out, texts, positions, starts, ends, rows_row, ring_size,
    WIDTH: tl.constexpr, NUM_TAPS: tl.constexpr, IS_STORED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_channel = channel < WIDTH
    text, position, start = tl.load(texts + row), tl.load(positions + row), tl.load(starts + row)
    total = tl.zeros((TILE,), tl.float32)
    for back in tl.static_range(NUM_TAPS):
        before = position - back
        is_own = before >= start
        own = tl.load(rows + (row - back) * rows_row + channel, mask=is_channel & is_own, other=0.0)
        slot = text * ring_size + before % ring_size
        kept = tl.load(ring + slot * WIDTH + channel, mask=is_channel & (before >= 0) & (before < start), other=0.0)
        tap = tl.load(weight + channel * NUM_TAPS + NUM_TAPS - 1 - back, mask=is_channel, other=0.0)
        total += (own.to(tl.float32) + kept.to(tl.float32)) * tap.to(tl.float32)
        if IS_STORED and back == 0:
            tl.store(ring + slot * WIDTH + channel, own, mask=is_channel)
    total = total / (1.0 + tl.exp(-total))
    tl.store(out + row * WIDTH + channel, total.to(out.dtype.element_ty), mask=is_channel)


@jit
def _keep_rows_kernel(
    rows, ring, texts, positions, ends, rows_row, ring_size, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position >= tl.load(ends + row) - ring_size:
        channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_channel = channel < WIDTH
        slot = tl.load(texts + row) * ring_size + position % ring_size
        value = tl.load(rows + row * rows_row + channel, mask=is_channel, other=0.0)
        tl.store(ring + slot * WIDTH + channel, value, mask=is_channel)


def recent_conv(rows: Tensor, weight: Tensor, ring: Tensor, places: TextRows, *, is_short: bool = False) -> Tensor:
    """Compute `recent_conv_ref`.

    With `is_short` no segment has more than M - S + 1 rows, and one launch does everything. Otherwise a row could be
    written over another that is still to be read, so that a second launch keeps the rows.
    """
    check_tensors(rows, weight, ring, *places)
    check_dtypes(rows, weight, ring)
    count, width = rows.shape
    num_taps = weight.shape[1]
    require(weight.shape == (width, num_taps) and weight.is_contiguous(), "weight", "[channels, taps], contiguous")
    require(ring.shape[2] == width and ring.is_contiguous(), "ring", "[texts, rows, channels], contiguous")
    require(ring.shape[1] >= num_taps, "ring", f"at least {num_taps} rows")
    require(rows.stride(1) == 1, "rows", "contiguous rows")
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    if count:
        grid, size = (count, ceil_div(width, ELEMENT_TILE)), ring.shape[1]
        _recent_conv_kernel[grid](
            rows, weight, ring, out, *places, rows.stride(0), size,
            WIDTH=width, NUM_TAPS=num_taps, IS_STORED=is_short, TILE=ELEMENT_TILE,
        )  # fmt: skip
        if not is_short:
            texts, positions, _, ends = places
            _keep_rows_kernel[grid](
                rows, ring, texts, positions, ends, rows.stride(0), size,
                WIDTH=width, TILE=ELEMENT_TILE,
            )  # fmt: skip
    return out
