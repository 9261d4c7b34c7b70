"""Descriptors of rows, by which a unit of the GPU's own loads tiles of them into shared memory (TMA)."""

from typing import Any

from torch import Tensor

from dflash_kernels.launch_config import TensorDescriptor

DESCRIPTOR_BYTES = 16
"""Of which the address and the rows of what a descriptor is made of are multiples."""


def can_describe(rows: Tensor) -> bool:
    """Whether a descriptor can be made of these rows: as far as their address and their distance go."""
    return (rows.data_ptr() | rows.stride(0) * rows.element_size()) % DESCRIPTOR_BYTES == 0


def describe(rows: Tensor, tile_rows: int, tile_columns: int) -> Any:
    """A descriptor of rows [T, K], from which tiles are loaded; what lies outside is zero."""
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [tile_rows, tile_columns])
