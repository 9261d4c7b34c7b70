"""The launch parameters of all kernels, and the limits of a device that they depend on.

Launch parameters are plain tables. `@triton.autotune` is not used: it needs a driver, differs from run to run, and
measures inside captured graphs. `examples/benchmarks/kernel_times.py` measured the numbers.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from dflash_kernels.launch import IS_INTERPRETED, ceil_div, constexpr, power_of_2

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


COMBINE_TILE = 4
"""Rows per program that adds up parts, one warp per row."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Tiling of attention: packed rows (query heads x block rows) and keys per tile, and number of parts of keys."""

    rows: int
    keys: int
    num_splits: int
    num_stages: int
    num_warps: int = 4


MAX_SPLITS = 16
"""Most parts of the keys: adding up more parts takes longer than they save."""

FEW_KEYS = constexpr(256)
"""If parts have fewer keys, half as many parts are faster: one program per multiprocessor instead of two."""


def attention_shape(
    num_groups: int, num_packed: int, head_dim: int, itemsize: int, device: torch.device, kv_itemsize: int = 2
) -> AttentionShape:
    """Return the tiling for `num_groups` KV heads of all requests with `num_packed` rows each.

    A cache in FP8 has a `kv_itemsize` of 1, and few rows read it in larger tiles.

    The tiling depends on shapes only, not on lengths, so a captured graph serves every context. On the device, the
    parts share the key tiles of the true length evenly. Tiles fit in shared memory. If few programs must fill the
    device, small tiles let four programs with few rows share a multiprocessor.
    """
    row_bytes = power_of_2(head_dim) * itemsize
    rows = _packed_rows(num_packed, row_bytes, itemsize, device)
    num_programs = num_groups * ceil_div(num_packed, rows)
    is_light = rows == MIN_DOT and row_bytes <= 256
    num_splits = _num_splits(num_programs, 4 if is_light else 2, device)
    num_warps = 8 if row_bytes > 512 and rows == 64 else 4
    if row_bytes > 256 and itemsize == 4:
        keys, num_stages = 16 if row_bytes > 512 else 32, 2
    elif row_bytes > 256:
        # With three stages, a tile of 64 rows has a multiprocessor for itself.
        is_alone = num_programs * num_splits <= num_multiprocessors(device) and row_bytes <= 512
        keys, num_stages = 32, 3 if rows < 64 or is_alone else 2
    elif is_light and kv_itemsize == 1:
        keys, num_stages = 128, 3
    else:
        keys, num_stages = 32 if is_light and num_splits > 1 else 64, 3
    num_stages = fitting_stages(num_stages, 2 * keys * row_bytes, rows * row_bytes, device)
    return AttentionShape(rows, keys, num_splits, num_stages, num_warps)


def _packed_rows(num_packed: int, row_bytes: int, itemsize: int, device: torch.device) -> int:
    """Return the packed rows per tile. On Hopper, 64 rows are faster than 32 even if half of them are empty."""
    if (row_bytes > 512 and itemsize == 4) or num_packed <= MIN_DOT:
        return MIN_DOT
    if itemsize == 2 and row_bytes <= 256 and has_tile_loads(device):
        return 64
    return min(power_of_2(num_packed), 64)


def _num_splits(num_programs: int, most_together: int, device: torch.device) -> int:
    """Return the number of parts that fills the device with `most_together` programs per multiprocessor.

    If that gives fewer than four parts, count two programs per multiprocessor: the kernel never halves so few parts.
    """
    num_splits = most_together * num_multiprocessors(device) // num_programs
    if num_splits < 4:
        num_splits = 2 * num_multiprocessors(device) // num_programs
    return min(max(num_splits, 1), MAX_SPLITS)


@dataclass(frozen=True, slots=True)
class BalancedShape:
    """Tiling of attention of many requests: as `AttentionShape`, with the number of programs per KV head and row tile.

    combined_rows  rows per program that adds up parts
    num_whole      whole requests per program if lengths are similar; 0 if this would leave the device idle
    """

    rows: int
    keys: int
    num_programs: int
    num_stages: int
    combined_rows: int = 16
    num_whole: int = 0
    num_warps: int = 4


LEAST_SHARE = constexpr(4)
"""Fewest tiles of keys in a share: adding up smaller parts takes longer than they save."""


def balanced_shape(
    num_requests: int,
    num_kv: int,
    num_packed: int,
    head_dim: int,
    itemsize: int,
    device: torch.device,
    kv_itemsize: int = 2,
) -> BalancedShape | None:
    """Return the tiling for requests with `num_packed` rows per KV head, or None if they do not fill the device.

    Measured on an H200 against one program per request and KV head (`docs/measurements/attention.md`).
    """
    shape = attention_shape(num_requests * num_kv, num_packed, head_dim, itemsize, device, kv_itemsize)
    num_row_tiles, num_places = ceil_div(num_packed, shape.rows), num_multiprocessors(device)
    is_light = shape.rows == MIN_DOT and power_of_2(head_dim) * itemsize <= 256
    num_programs = (3 if is_light else 2) * num_places // (num_kv * num_row_tiles)
    if num_programs < 2 or num_requests * num_kv * num_row_tiles <= num_places:
        return None
    num_whole = ceil_div(num_requests, num_programs)
    fills_device = 10 * ceil_div(num_requests, num_whole) * num_kv * num_row_tiles >= 9 * 2 * num_places
    return BalancedShape(
        shape.rows, shape.keys, num_programs, shape.num_stages, num_whole=num_whole if fills_device else 0,
        num_warps=shape.num_warps,
    )  # fmt: skip


ROUTED_ROWS = 4
"""Rows per program that chooses experts, one warp per row."""

MAX_EXPERT_ROWS = 256
"""Most rows for which our expert kernels run. With more rows, torch's grouped products are as fast."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Tiling of the expert products: rows, columns and inner width of a tile.

    sought_rows   number of rows in which a program searches for its expert, padded
    is_by_route   one program per route (row and chosen expert) instead of one per expert
    num_programs  most programs that share the rows of an expert, per tile of columns
    max_registers  limit per thread; None for no limit
    """

    rows: int
    columns: int
    depth: int
    num_stages: int
    sought_rows: int
    is_by_route: bool
    num_warps: int = 4
    num_programs: int = 1
    max_registers: int | None = None


def experts_shape(
    num_rows: int, num_chosen: int, num_experts: int, itemsize: int, device: torch.device
) -> ExpertsShape:
    """Return the tiling for rows with `num_chosen` experts each. It changes only at powers of two of the rows.

    Two programs fit on a multiprocessor: while one searches for its rows, the other one reads weights.
    """
    sought_rows = 1 if num_rows == 1 else max(power_of_2(num_rows), MIN_DOT)
    is_by_route = power_of_2(num_rows) * num_chosen <= num_experts
    rows = MIN_DOT if sought_rows <= 64 else 32
    columns, depth = 64 if num_rows == 1 else 128, 64
    num_stages = fitting_stages(5, (columns + rows) * depth * itemsize, 0, device)
    return ExpertsShape(rows, columns, depth, num_stages, sought_rows, is_by_route)


PACKED_TILES = (
    (16, LEAST_ROWS, 64, 2),
    (64, 16, 128, 4),
    (256, 32, 128, 4),
)
"""Most rows, and rows, columns and warps of a tile of packed experts.

Up to 16 rows, 8 usually hold all rows of an expert. If an expert has more, a program reads its weights again. From 65
rows on, another program reads them.
"""

THREE_TOGETHER = 168
"""Registers per thread with which three programs of four warps fit on a multiprocessor."""


JOINT_ROWS = range(5, 33)
"""Numbers of rows for which one launch computes both products of packed experts (`joint_experts.py`)."""


def packed_experts_shape(
    num_rows: int, num_chosen: int, num_experts: int, itemsize: int, device: torch.device
) -> ExpertsShape:
    """As `experts_shape`, for packed weights, in tiles of 128 numbers of each row."""
    if num_rows > MAX_EXPERT_ROWS:
        num_stages = fitting_stages(3, (128 * 2 + 64 * 4 * itemsize) * 32, 0, device)
        return ExpertsShape(64, 128, 128, num_stages, MIN_DOT, is_by_route=False)
    plain = experts_shape(num_rows, num_chosen, num_experts, itemsize, device)
    rows, columns, num_warps = next(tile for most, *tile in PACKED_TILES if num_rows <= most)
    num_stages = fitting_stages(4, (columns * 2 + rows * 4 * itemsize) * 32, 0, device)
    return replace(
        plain, rows=rows, columns=columns, depth=128, num_stages=num_stages, num_warps=num_warps,
        num_programs=2 if num_rows > 64 else 1, max_registers=THREE_TOGETHER if num_warps == 4 else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RaggedShape:
    """Tiles of prefill attention, one choice per model: packed rows (query heads x rows), keys, and launch options.

    num_together     assumed number of programs per multiprocessor when the keys of long contexts are cut into parts
    has_descriptors  whether unmasked tiles of the rows' own keys are loaded by descriptors (TMA) instead of pointers
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    num_together: int = 2
    has_descriptors: bool = False


RAGGED_SHAPES = (
    (2, 128, RaggedShape(rows=128, keys=64, num_warps=8, num_stages=3)),
    (2, 256, RaggedShape(rows=64, keys=32, num_warps=8, num_stages=2)),
    (2, 512, RaggedShape(rows=32, keys=32, num_warps=8, num_stages=2)),
    (4, 64, RaggedShape(rows=32, keys=32, num_warps=4, num_stages=2)),
    (4, 128, RaggedShape(rows=MIN_DOT, keys=32, num_warps=4, num_stages=2)),
    (4, 256, RaggedShape(rows=MIN_DOT, keys=16, num_warps=4, num_stages=2)),
)
"""Bytes per element, largest head size, and the tiles that fit in shared memory and nearly fit in registers.

`examples/benchmarks/ragged_shapes.py` compares other tiles. Heads above 256 were not measured.
"""

DESCRIBED_SHAPES = {
    128: RaggedShape(rows=64, keys=64, num_warps=4, num_stages=3, num_together=1, has_descriptors=True),
    256: RaggedShape(rows=64, keys=32, num_warps=4, num_stages=3, num_together=1, has_descriptors=True),
}
"""For 16-bit heads of these sizes: faster than the entries of RAGGED_SHAPES.

Measured in `docs/measurements/prefill.md` (128) and `docs/measurements/recurrent-layers.md` (256).
"""

LONG_CONTEXT = 2048
"""Shortest context, in tokens, that uses LONG_SHAPES."""

LONG_SHAPES = {
    128: RaggedShape(rows=128, keys=128, num_warps=8, num_stages=3),
    256: RaggedShape(rows=128, keys=64, num_warps=8, num_stages=2),
}
"""Tiles for long contexts of 16-bit heads. With heads of 128 they are 12% faster than others for 2,048 rows after
14,336 tokens, and as fast after 2,048."""

LONG_SHAPE_BYTES = 227 * 1024
"""Shared memory that LONG_SHAPES need. Not every GPU has it."""

FEW_ROWS_SHAPE = RaggedShape(rows=64, keys=64, num_warps=4, num_stages=2, num_together=1)
"""The fastest of seven shapes for 192 prefill rows with 62 decoding requests (docs/measurements/mixed-load.md)."""


def few_rows_shape(head_dim: int, itemsize: int, device: torch.device, kv_itemsize: int = 2) -> RaggedShape:
    """Return the tiles for few prefill rows in a decode step. All keys are read from pages."""
    if (itemsize, power_of_2(head_dim)) == (2, 128):
        return FEW_ROWS_SHAPE
    return ragged_shape(head_dim, itemsize, 0, device, kv_itemsize)


def ragged_shape(
    head_dim: int, itemsize: int, longest_context: int, device: torch.device, kv_itemsize: int = 2
) -> RaggedShape:
    """Return the tiles for heads of this size. A size beyond RAGGED_SHAPES gets the smallest tiles.

    A cache in FP8 has a `kv_itemsize` of 1. Its converted keys and values take shared memory too.
    """
    size = power_of_2(head_dim)

    def fitted(shape: RaggedShape) -> RaggedShape:
        stage_bytes = 2 * shape.keys * size * itemsize
        kept_bytes = shape.rows * size * itemsize + (stage_bytes if kv_itemsize == 1 else 0)
        return replace(shape, num_stages=fitting_stages(shape.num_stages, stage_bytes, kept_bytes, device))

    long_shape = LONG_SHAPES.get(size) if itemsize == 2 and longest_context >= LONG_CONTEXT else None
    if long_shape is not None and shared_memory(device) >= LONG_SHAPE_BYTES and fitted(long_shape).num_stages > 1:
        return fitted(long_shape)
    fitting = (shape for width, limit, shape in RAGGED_SHAPES if width == itemsize and head_dim <= limit)
    shape = next(fitting, RAGGED_SHAPES[-1][-1])
    if itemsize == 2 and has_tile_loads(device):
        shape = DESCRIBED_SHAPES.get(head_dim, shape)
    return fitted(shape)
