"""Tiling of attention of prompts and of chunks of rows."""

from dataclasses import dataclass, replace

import torch

from dflash_kernels.launch import power_of_2
from dflash_kernels.launch_config import MIN_DOT, fitting_stages, has_tile_loads, shared_memory


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
