"""Payload tensors as bytes: views to send, empty tensors to receive into, and checksums."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from dflash_runtime.errors import MISSING, InvalidHandoff
from dflash_runtime.kv_transfer.handoff import Handoff, TensorSpec, tensor_specs


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, [bytes] uint8, on its device."""
    return tensor.reshape(-1).view(torch.uint8)


def empty_like_spec(spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes. It detects damage and mixed-up files, but not deliberate changes."""
    data: numpy.ndarray[Any, Any] = as_bytes(tensor.cpu().contiguous()).numpy()
    return zlib.crc32(data.data)


def header_with_checksums(handoff: Handoff) -> dict[str, Any]:
    """The header of a hand-off, with the `crc32` of each tensor."""
    header = handoff.to_header()
    for name, tensor in handoff.tensors.items():
        header["tensors"][name]["crc32"] = checksum(tensor)
    return header


def check_tensors(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check received tensors against their header.

    Raises:
        InvalidHandoff: a tensor is missing, has another shape or dtype, or is damaged.
    """
    for name, spec in tensor_specs(header).items():
        field, found = f"tensors.{name}", tensors.get(name)
        if found is None:
            raise InvalidHandoff(
                f"{field}: missing, although the header has it", id="missing-tensor", field=field, found=MISSING
            )
        if found.dtype != spec.dtype or tuple(found.shape) != spec.shape:
            raise InvalidHandoff(
                id="misshapen-tensor", field=field, found=f"{found.dtype} {list(found.shape)}",
                expected=f"{spec.dtype} {list(spec.shape)}",
            )  # fmt: skip
        expected = header["tensors"][name].get("crc32")
        if expected is not None and checksum(found) != expected:  # without a checksum no tensor is copied to the host
            raise InvalidHandoff(f"{field}: damaged, its checksum differs from the header", id="damaged", field=field)
