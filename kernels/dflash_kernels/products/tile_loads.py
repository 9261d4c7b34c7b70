"""Tensor descriptors, with which the GPU's tensor memory accelerator (TMA) loads tiles into shared memory."""

from typing import Any

from torch import Tensor

from dflash_kernels.launch import TensorDescriptor

DESCRIPTOR_BYTES = 16
"""Alignment in bytes of the address and the row stride of a tensor with a descriptor."""


def can_describe(rows: Tensor) -> bool:
    """Return whether the alignment of these rows allows a descriptor."""
    return (rows.data_ptr() | rows.stride(0) * rows.element_size()) % DESCRIPTOR_BYTES == 0


def describe(rows: Tensor, tile_rows: int, tile_columns: int) -> Any:
    """Return a descriptor of rows [T, K] for loading tiles. Elements outside the rows are loaded as zero."""
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [tile_rows, tile_columns])
