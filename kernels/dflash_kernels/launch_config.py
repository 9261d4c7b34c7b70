"""Launch parameters that kernels of several folders share, and the limits of a device that they depend on.

Launch parameters are plain tables. `@triton.autotune` is not used: it needs a driver, differs from run to run, and
measures inside captured graphs. `examples/benchmarks/kernel_times.py` measured the numbers.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from dflash_kernels.launch import IS_INTERPRETED

MIN_DOT = 16
"""Smallest side of a tile in `tl.dot`, except for the columns of a product."""

LEAST_ROWS = 8
"""Fewest columns of a product in `tl.dot`. Here rows are columns of the product, because weights come first."""


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors. It is small for the interpreter, so that tests cut work into parts."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program can use, or 0 if unknown."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", 0))  # torch's type stubs lack it


@lru_cache
def has_tile_loads(device: torch.device) -> bool:
    """Return whether the GPU has a unit that loads tiles into shared memory (TMA). The interpreter emulates it."""
    if device.type != "cuda":
        return IS_INTERPRETED
    return torch.cuda.get_device_capability(device) >= (9, 0)


def fitting_stages(wanted: int, stage_bytes: int, kept_bytes: int, device: torch.device) -> int:
    """Return the number of pipeline stages: `wanted`, or fewer if shared memory is too small.

    Each stage takes `stage_bytes`, and the program keeps `kept_bytes` besides.
    """
    num_bytes = shared_memory(device)
    return max(1, min(wanted, (num_bytes - kept_bytes) // stage_bytes)) if num_bytes else wanted


ELEMENT_TILE = 1024
"""Elements per program of pointwise kernels."""

HEAD_TILE = 8
"""Heads of one token per program of norm-and-rope kernels."""

VOCAB_TILE = 4096
"""Tokens per program in a pass over logits."""

VOCAB_GROUP = 64
"""Tokens per group of the vocabulary. A filter knows each group's highest logit, and reads or skips whole groups."""

NUM_DEPTHS = 256
"""Number of lower bounds that a top-p filter tries, in steps of DEPTH_STEP below the highest logit."""

DEPTH_STEP = 3 / 32
"""Distance between two bounds, in units of the temperature. Few tokens lie between them, and tokens below the last
bound have little weight."""

LISTED_TOKENS = 4
"""Capacity of the list of tokens, in tokens per group of the vocabulary."""

LISTED_TILE = 2048
"""Tokens of listed groups that a filter reads at once."""

MAX_GRID = 65_535
"""Most programs along the second and third axis of a launch. The first axis, for rows, has a higher limit."""


@dataclass(frozen=True, slots=True)
class VocabShape:
    """Tiling of a row of logits: tokens and warps per program."""

    tile: int
    num_warps: int


def argmax_shape(num_rows: int) -> VocabShape:
    """Return the tiling for greedy rows: many small programs for few rows, few large programs for many rows."""
    return VocabShape(4096, 4) if num_rows <= 64 else VocabShape(8192, 8)


def sampling_shape() -> VocabShape:
    return VocabShape(VOCAB_TILE, 4)
