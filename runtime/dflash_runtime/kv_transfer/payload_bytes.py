"""Payload tensors as bytes: views to send, empty tensors to receive into, and checksums."""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from dflash_runtime.errors import MISSING, InvalidHandoff
from dflash_runtime.kv_transfer.handoff import Handoff, HandoffHeader, TensorSpec


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, [bytes] uint8, on its device."""
    return tensor.reshape(-1).view(torch.uint8)


def empty_like_spec(spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    return torch.empty(spec.shape, dtype=spec.torch_dtype, device=device)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes. It detects damage and mixed-up files, but not deliberate changes."""
    data: numpy.ndarray[Any, Any] = as_bytes(tensor.cpu().contiguous()).numpy()
    return zlib.crc32(data.data)


def header_with_checksums(handoff: Handoff) -> HandoffHeader:
    """The header of a hand-off, with the checksum of each tensor."""
    header = handoff.header
    specs = {name: replace(spec, crc32=checksum(handoff.tensors[name])) for name, spec in header.tensors.items()}
    return replace(header, tensors=specs)


def assemble(header: HandoffHeader, tensors: Mapping[str, Tensor]) -> Handoff:
    """The hand-off of a header and its received tensors.

    Raises:
        InvalidHandoff: a tensor is missing, has another shape or dtype, or is damaged.
    """
    for name, spec in header.tensors.items():
        field, found = f"tensors.{name}", tensors.get(name)
        if found is None:
            raise InvalidHandoff(
                f"{field}: missing, although the header has it", id="missing-tensor", field=field, found=MISSING
            )
        if found.dtype != spec.torch_dtype or tuple(found.shape) != spec.shape:
            raise InvalidHandoff(
                id="misshapen-tensor", field=field, found=f"{found.dtype} {list(found.shape)}",
                expected=f"{spec.torch_dtype} {list(spec.shape)}",
            )  # fmt: skip
        if spec.crc32 is not None and checksum(found) != spec.crc32:  # without one no tensor is copied to the host
            raise InvalidHandoff(f"{field}: damaged, its checksum differs from the header", id="damaged", field=field)
    return header.handoff.with_tensors(tensors)
