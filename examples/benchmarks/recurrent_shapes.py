"""Compare launch shapes of the kernels of recurrent layers at the heads of Qwen3.5-4B, in bf16.

    python3 examples/benchmarks/recurrent_shapes.py [--seconds 60]

Times are microseconds of one layer's launches in a captured graph. Different states are used in turn, so that they come
from memory and not from the cache.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from dflash_kernels.attention.ragged_attention import Segment
from dflash_kernels.early_launch import early
from dflash_kernels.norms.gated_norm import gated_norm
from dflash_kernels.recurrent import delta_blocks as at_once
from dflash_kernels.recurrent import delta_prompts as prompts
from dflash_kernels.recurrent import delta_rule as rule
from dflash_kernels.recurrent import recent_conv as conv
from dflash_kernels.recurrent.recent_conv import RowRuns, recent_conv
from timing.arguments import open_device
from timing.ceilings import median_us

HEADS, GROUPS, SIZE, TAPS = 32, 16, 128, 4
WIDTH = 2 * GROUPS * SIZE + HEADS * SIZE
KEPT = 5
"""Rows that are replayed."""

CALLS = 12
NUM_SHARES = 6

RULES = ((16, 1, 0), (16, 1, 128), (16, 1, 112))
BLOCKS = (
    (64, 4, 0),
    (64, 4, 128),
    (64, 4, 104),
    (32, 4, 0),
    (32, 4, 96),
    (32, 2, 0),
    (32, 2, 128),
    (128, 8, 128),
    (128, 4, 0),
)
PAIRS = (1, 2, 4)
PIECES = ((4, 0), (2, 0), (2, 168))
SCANS = ((32, 4, 2), (32, 4, 3), (32, 4, 4))
"""Tile of columns, warps, and registers per thread (0: no limit) or pipeline stages."""

CONV_BLOCKS = ((64, 4), (64, 2), (128, 4), (128, 2), (256, 4), (256, 8))
"""Channels and warps."""

CONV_CHUNKS = ((16, 128, 4), (16, 64, 4), (32, 64, 4), (8, 256, 4), (64, 64, 4), (32, 128, 8), (4, 512, 4))
"""Rows, channels and warps."""


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def gates(count: int) -> rule.Gates:
    wide = (normal(HEADS, dtype=torch.float32) for _ in range(2))
    return rule.Gates(normal(count, HEADS), normal(count, HEADS), *wide)


def memories(count: int, block: int) -> list[rule.DeltaMemory]:
    """Memories that do not fit in the cache together."""
    states, size = (HEADS, SIZE // rule.STATE_TILE, SIZE, rule.STATE_TILE), KEPT + 2 * block
    shapes = (states, (size, GROUPS, SIZE), (size, HEADS, SIZE), (size, HEADS))
    num = max(2, -(-200 // (2 * count)))
    return [rule.DeltaMemory(*(normal(count, *shape, dtype=torch.float32) / 8 for shape in shapes)) for _ in range(num)]


@dataclass
class Sheet:
    """The cases of a run. With `share`, only the cases of that share run, once and untimed, which compiles them."""

    share: int | None = None
    num_cases: int = 0

    def time(self, name: str, call: Callable[[], object]) -> None:
        self.num_cases += 1
        if self.share is not None and self.num_cases % NUM_SHARES != self.share:
            return
        try:
            if self.share is not None:
                call()
            else:
                print(f"{name:70s} {median_us(call, CALLS):9.1f} us", flush=True)
        except Exception as error:  # a shape may not compile
            print(f"{name:70s} {type(error).__name__} {str(error)[:100]}", flush=True)


def limited(registers: int) -> dict[str, int]:
    """The option that limits the registers per thread; 0 for no limit."""
    return {"maxnreg": registers} if registers else {}


def time_blocks(sheet: Sheet, batch: int, block: int) -> None:
    rows, own = normal(batch * block, WIDTH), gates(batch * block)
    num_records = KEPT + 2 * block
    stores = cycle(memories(batch, block))
    texts = torch.arange(batch, device="cuda")
    lens = torch.full_like(texts, 100)
    blocks = rule.BlockTexts(texts, lens - KEPT, lens)
    out = rule.room_for(rows, HEADS, SIZE)

    strides = (rows.stride(0), HEADS, HEADS, SIZE**-0.5, 1e-6)
    sizes = {"NUM_HEADS": HEADS, "NUM_KEYS": GROUPS, "KEY": SIZE, "TILE_K": SIZE, "TILE_R": 16}
    print(f"batch {batch}, blocks of {block} rows, {KEPT} replayed", flush=True)
    sheet.time("delta_rule", lambda: rule.delta_rule(rows, own, next(stores), blocks))
    sheet.time("delta_rule, states not stored", lambda: rule.delta_rule(rows, own, next(stores), blocks, KEPT))
    for tile, warps, registers in RULES:

        def by_row(tile: int = tile, warps: int = warps, registers: int = registers) -> None:
            rule._delta_rule_kernel[(batch, HEADS, SIZE // tile)](
                rows, *own, *next(stores), *blocks, out, block, num_records, 0, *strides, **sizes, VALUE=SIZE,
                TILE_V=tile, num_warps=warps, **limited(registers), **early(rows.device),
            )  # fmt: skip

        sheet.time(f"  row by row, tile {tile} warps {warps} registers {registers}", by_row)
    if block > 1:
        squares, marks = (torch.rand(batch, HEADS, 2, *sides, device="cuda") for sides in ((16, 16), (16,)))
        time_at_once(sheet, rows, own, stores, blocks, (squares, marks, out), strides)
    rings = cycle([normal(batch, block + 3, WIDTH) for _ in range(12)])
    taps = normal(TAPS, WIDTH)
    for channels, conv.BLOCK_WARPS in CONV_BLOCKS:
        conv.BLOCK_CHANNELS = conv.SHORT_CHANNELS = channels
        name = f"recent_conv, channels {channels} warps {conv.BLOCK_WARPS}"
        sheet.time(name, lambda: recent_conv(rows, taps, next(rings), RowRuns(texts, lens)))
    time_norm(sheet, batch * block)


def time_at_once(
    sheet: Sheet, rows: Tensor, own: rule.Gates, stores: Iterator[rule.DeltaMemory], blocks: rule.BlockTexts,
    results: tuple[Tensor, Tensor, Tensor], strides: tuple[float, ...],
) -> None:  # fmt: skip
    batch = len(blocks.texts)
    block = len(rows) // batch
    squares, marks, out = results
    counts = (block, KEPT + 2 * block)
    sizes = {"NUM_HEADS": HEADS, "NUM_KEYS": GROUPS, "KEY": SIZE, "TILE_K": SIZE, "TILE_R": 16}
    sheet.time("delta_blocks", lambda: at_once.delta_blocks(rows, own, next(stores), blocks))
    sheet.time("delta_blocks, states not stored", lambda: at_once.delta_blocks(rows, own, next(stores), blocks, KEPT))
    for warps in PAIRS:

        def pairs(warps: int = warps) -> None:
            memory = next(stores)
            at_once._delta_pairs_kernel[(batch, HEADS)](
                rows, *own, memory.keys, memory.decays, blocks.texts, blocks.lens, squares, marks, *counts, *strides,
                **sizes, num_warps=warps, **early(rows.device),
            )  # fmt: skip

        sheet.time(f"  pairs, warps {warps}", pairs)
    for tile, warps, registers in BLOCKS:

        def together(tile: int = tile, warps: int = warps, registers: int = registers) -> None:
            at_once._delta_blocks_kernel[(SIZE // tile, HEADS, batch)](
                rows, *next(stores), *blocks, squares, marks, out, *counts, 0, rows.stride(0), **sizes, VALUE=SIZE,
                TILE_V=tile, IS_SPLIT=True, num_warps=warps, **limited(registers), **early(rows.device),
            )  # fmt: skip

        sheet.time(f"  at once, tile {tile} warps {warps} registers {registers}", together)


def time_norm(sheet: Sheet, count: int) -> None:
    heads, gate, weight = normal(count, HEADS, SIZE), normal(count, HEADS * SIZE), normal(SIZE)
    sheet.time("gated_norm", lambda: gated_norm(heads, gate, weight, 1e-6))


def time_prompt(sheet: Sheet, count: int) -> None:
    rows, own = normal(count, WIDTH), gates(count)
    states = normal(2, HEADS, SIZE // rule.STATE_TILE, SIZE, rule.STATE_TILE, dtype=torch.float32) / 8
    ints = torch.tensor(prompts.chunk_ints([Segment(0, count, 0, 0)], padding_text=1), device="cuda")
    cut = prompts.PromptChunks.cut(ints, 1)
    print(f"a prompt of {count} rows", flush=True)
    sheet.time("delta_prompts", lambda: prompts.delta_prompts(rows, own, states, GROUPS, cut))
    num_pieces = cut.pieces.shape[1]
    squares = torch.empty((2, num_pieces, HEADS, prompts.PIECE, prompts.PIECE), device="cuda")
    marks, out = torch.empty((HEADS, 3, count), device="cuda"), rule.room_for(rows, HEADS, SIZE)
    sizes = {"NUM_HEADS": HEADS, "NUM_KEYS": GROUPS, "KEY": SIZE, "TILE_K": SIZE, "PIECE": prompts.PIECE}
    for warps, registers in PIECES:

        def pieces(warps: int = warps, registers: int = registers) -> None:
            prompts._delta_pieces_kernel[(num_pieces, HEADS)](
                rows, *own, cut.pieces, *squares, marks, num_pieces, count, rows.stride(0), HEADS, HEADS, SIZE**-0.5,
                1e-6, **sizes, PRECISION="tf32", num_warps=warps, **limited(registers),
            )  # fmt: skip

        sheet.time(f"  pieces, warps {warps} registers {registers}", pieces)
    for tile, warps, stages in SCANS:

        def scan(tile: int = tile, warps: int = warps, stages: int = stages) -> None:
            prompts._delta_scan_kernel[(SIZE // tile, HEADS, cut.chunks.shape[1])](
                rows, cut.chunks, *squares, marks, states, out, cut.chunks.shape[1], count, rows.stride(0),
                **sizes, VALUE=SIZE, TILE_V=tile, PRECISION="tf32", IS_SPLIT=True, NUM_STAGES=stages, num_warps=warps,
            )  # fmt: skip

        sheet.time(f"  scan, tile {tile} warps {warps} stages {stages}", scan)
    ring, taps = normal(2, 19, WIDTH), normal(TAPS, WIDTH)
    firsts, counts, starts, texts, _ = cut.chunks
    runs = RowRuns(texts, starts, firsts, counts, torch.zeros(count, dtype=torch.int64, device="cuda"))
    for conv.CHUNK_ROWS, conv.CHUNK_CHANNELS, conv.CHUNK_WARPS in CONV_CHUNKS:
        name = f"recent_conv, rows {conv.CHUNK_ROWS} channels {conv.CHUNK_CHANNELS} warps {conv.CHUNK_WARPS}"
        sheet.time(name, lambda: recent_conv(rows, taps, ring, runs))
    time_norm(sheet, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="begin no further case after this time")
    parser.add_argument("--compile", type=int, help=f"only compile share N of {NUM_SHARES}")
    given = parser.parse_args()
    open_device("cuda:0")
    started, sheet = time.perf_counter(), Sheet(given.compile)
    cases = [partial(time_blocks, sheet, batch, 16) for batch in (32, 8, 1)]
    cases += [partial(time_blocks, sheet, batch, 1) for batch in (32, 8, 1)]
    cases += [partial(time_prompt, sheet, count) for count in (2048, 16384)]
    for case in cases:
        if time.perf_counter() - started < given.seconds:
            case()


if __name__ == "__main__":
    main()
