"""Tensors of payloads as bytes: views to send, tensors to receive into, and checksums."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from dflash_runtime.errors import InvalidHandoff
from dflash_runtime.kv_transfer.handoff import Handoff, TensorSpec, tensor_specs


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, [bytes] uint8, on its device."""
    return tensor.reshape(-1).view(torch.uint8)


def empty_like_spec(spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes. It tells damage and mixed-up files, not intent."""
    data: numpy.ndarray[Any, Any] = as_bytes(tensor.cpu().contiguous()).numpy()
    return zlib.crc32(data.data)


def header_with_checksums(handoff: Handoff) -> dict[str, Any]:
    """The header, in which each tensor has its `crc32`."""
    header = handoff.to_header()
    for name, tensor in handoff.tensors.items():
        header["tensors"][name]["crc32"] = checksum(tensor)
    return header


def check_tensors(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Hold tensors that came against what their header announced.

    Raises:
        InvalidHandoff: one is missing, of another shape or dtype, or damaged.
    """
    for name, spec in tensor_specs(header).items():
        found = tensors.get(name)
        if found is None:
            raise InvalidHandoff(f"tensors.{name}: announced, and not there")
        if found.dtype != spec.dtype or tuple(found.shape) != spec.shape:
            raise InvalidHandoff(
                f"tensors.{name}: found {found.dtype} {list(found.shape)}, expected {spec.dtype} {list(spec.shape)}"
            )
        expected = header["tensors"][name].get("crc32")
        if expected is not None and checksum(found) != expected:  # without one nothing is copied to the host
            raise InvalidHandoff(f"tensors.{name}: damaged, its checksum is not that of the header")
