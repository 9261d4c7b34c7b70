"""Compare launch shapes of the kernels of recurrent layers at the heads of Qwen3.5-4B, in bf16.

    python3 examples/benchmarks/recurrent_shapes.py [--seconds 60]

Times are microseconds of one layer's launches in a captured graph. Different states are used in turn, so that they come
from memory and not from the cache.
"""

import argparse
import time
from collections.abc import Callable
from itertools import cycle, product

import torch
from torch import Tensor

from dflash_kernels import delta_blocks as at_once
from dflash_kernels import delta_prompts as prompts
from dflash_kernels import delta_rule as rule
from dflash_kernels.early_launch import early
from dflash_kernels.gated_norm import gated_norm
from dflash_kernels.ragged_attention import Segment
from dflash_kernels.recent_conv import RowRuns, recent_conv
from timing.ceilings import median_us
from timing.pairs import open_device

HEADS, GROUPS, SIZE, TAPS = 32, 16, 128, 4
WIDTH = 2 * GROUPS * SIZE + HEADS * SIZE
KEPT = 5
"""Rows that are replayed."""

CALLS = 12


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def gates(count: int) -> rule.Gates:
    wide = (normal(HEADS, dtype=torch.float32) for _ in range(2))
    return rule.Gates(normal(count, HEADS), normal(count, HEADS), *wide)


def memories(count: int, block: int) -> list[rule.DeltaMemory]:
    """Memories that do not fit in the cache together."""
    shapes = ((HEADS, SIZE, SIZE), (2 * block, GROUPS, SIZE), (2 * block, HEADS, SIZE), (2 * block, HEADS))
    num = max(2, -(-200 // (2 * count)))
    return [rule.DeltaMemory(*(normal(count, *shape, dtype=torch.float32) / 8 for shape in shapes)) for _ in range(num)]


def show(name: str, call: Callable[[], object]) -> None:
    try:
        print(f"{name:70s} {median_us(call, CALLS):9.1f} us", flush=True)
    except Exception as error:  # a shape may not compile
        print(f"{name:70s} {type(error).__name__} {str(error)[:100]}", flush=True)


def time_blocks(batch: int, block: int) -> None:
    rows, own = normal(batch * block, WIDTH), gates(batch * block)
    stores = cycle(memories(batch, max(block, KEPT)))
    texts = torch.arange(batch, device="cuda")
    lens = torch.full_like(texts, 100)
    blocks = rule.BlockTexts(texts, lens - min(KEPT, block), lens)
    show(f"delta_rule batch {batch} block {block}", lambda: rule.delta_rule(rows, own, next(stores), blocks))
    show("delta_blocks", lambda: at_once.delta_blocks(rows, own, next(stores), blocks))
    out = rule.room_for(rows, HEADS, SIZE)
    for tile, warps in ((8, 1), (16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4)):

        def call(tile: int = tile, warps: int = warps) -> None:
            rule._delta_rule_kernel[(batch, HEADS, SIZE // tile)](
                rows, *own, *next(stores), *blocks, out, block, 2 * max(block, KEPT), 0, rows.stride(0), HEADS, HEADS,
                SIZE**-0.5, 1e-6, NUM_HEADS=HEADS, NUM_KEYS=GROUPS, VALUE=SIZE, KEY=SIZE, TILE_V=tile, TILE_K=SIZE,
                num_warps=warps, **early(rows.device),
            )  # fmt: skip

        show(f"  tile {tile} warps {warps}", call)
    for tile, warps in ((32, 4), (64, 4), (64, 8), (128, 8)) if block > 1 else ():

        def blocks_at_once(tile: int = tile, warps: int = warps) -> None:
            at_once._delta_blocks_kernel[(batch, HEADS, SIZE // tile)](
                rows, *own, *next(stores), *blocks, out, block, 2 * max(block, KEPT), 0, rows.stride(0), HEADS, HEADS,
                SIZE**-0.5, 1e-6, NUM_HEADS=HEADS, NUM_KEYS=GROUPS, VALUE=SIZE, KEY=SIZE, TILE_V=tile, TILE_K=SIZE,
                TILE_R=16, TILE_M=16, IS_SPLIT=True, num_warps=warps, **early(rows.device),
            )  # fmt: skip

        show(f"  at once, tile {tile} warps {warps}", blocks_at_once)
    ring, taps = normal(batch, block + 3, WIDTH), normal(WIDTH, TAPS)
    show("recent_conv", lambda: recent_conv(rows, taps, ring, RowRuns(texts, lens), is_short=True))
    heads, gate, weight = normal(batch * block, HEADS, SIZE), normal(batch * block, HEADS * SIZE), normal(SIZE)
    show("gated_norm", lambda: gated_norm(heads, gate, weight, 1e-6))


def time_prompt(count: int) -> None:
    rows, own = normal(count, WIDTH), gates(count)
    states = normal(2, HEADS, SIZE, SIZE, dtype=torch.float32) / 8
    ints = torch.tensor(prompts.chunk_ints([Segment(0, count, 0, 0)], padding_text=1), device="cuda")
    cut = prompts.PromptChunks.cut(ints, 1)
    show(f"delta_prompts of {count} rows", lambda: prompts.delta_prompts(rows, own, states, GROUPS, cut))
    num_pieces = cut.pieces.shape[1]
    squares = torch.empty((2, num_pieces, HEADS, prompts.PIECE, prompts.PIECE), device="cuda")
    marks, out = torch.empty((HEADS, 3, count), device="cuda"), rule.room_for(rows, HEADS, SIZE)
    for warps in (4, 8):

        def pieces(warps: int = warps) -> None:
            prompts._delta_pieces_kernel[(num_pieces, HEADS)](
                rows, *own, cut.pieces, *squares, marks, num_pieces, count, rows.stride(0), HEADS, HEADS, SIZE**-0.5,
                1e-6, NUM_HEADS=HEADS, NUM_KEYS=GROUPS, KEY=SIZE, TILE_K=SIZE, PIECE=prompts.PIECE, PRECISION="tf32",
                num_warps=warps,
            )  # fmt: skip

        show(f"  pieces, warps {warps}", pieces)
    for tile, warps, stages in product((16, 32, 64), (4, 8), (1, 2)):

        def scan(tile: int = tile, warps: int = warps, stages: int = stages) -> None:
            prompts._delta_scan_kernel[(SIZE // tile, HEADS, cut.chunks.shape[1])](
                rows, cut.chunks, *squares, marks, states, out, cut.chunks.shape[1], count, rows.stride(0),
                NUM_HEADS=HEADS, NUM_KEYS=GROUPS, VALUE=SIZE, KEY=SIZE, TILE_V=tile, TILE_K=SIZE, PIECE=prompts.PIECE,
                PRECISION="tf32", IS_SPLIT=True, NUM_STAGES=stages, num_warps=warps,
            )  # fmt: skip

        show(f"  scan, tile {tile} warps {warps} stages {stages}", scan)
    ring, taps = normal(2, 19, WIDTH), normal(WIDTH, TAPS)
    firsts, counts, starts, texts, _ = cut.chunks
    runs = RowRuns(texts, starts, firsts, counts, torch.zeros(count, dtype=torch.int64, device="cuda"))
    show("recent_conv", lambda: recent_conv(rows, taps, ring, runs))
    heads, gate, weight = normal(count, HEADS, SIZE), normal(count, HEADS * SIZE), normal(SIZE)
    show("gated_norm", lambda: gated_norm(heads, gate, weight, 1e-6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="begin no further case after this time")
    given = parser.parse_args()
    open_device("cuda:0")
    started = time.perf_counter()
    cases: list[Callable[[], None]] = [
        lambda: time_blocks(1, 16),
        lambda: time_prompt(2048),
        lambda: time_blocks(32, 16),
    ]
    cases += [
        lambda: time_blocks(32, 1),
        lambda: time_prompt(16384),
        lambda: time_blocks(1, 1),
        lambda: time_blocks(8, 16),
    ]
    for case in cases:
        if time.perf_counter() - started < given.seconds:
            case()


if __name__ == "__main__":
    main()
