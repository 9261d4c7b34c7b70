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


def checksum(tensor: Tensor, start: int = 0) -> int:
    """CRC-32 of a tensor's bytes. It detects damage and mixed-up files, but not deliberate changes."""
    data: numpy.ndarray[Any, Any] = as_bytes(tensor.cpu().contiguous()).numpy()
    return zlib.crc32(data.data, start)


def _text_checksum(handoff: Handoff) -> int:
    """CRC-32 of the token ids, the start of every tensor's checksum, so that rows of another text do not fit."""
    return zlib.crc32(repr((handoff.prompt_token_ids, handoff.output_token_ids)).encode())


def header_with_checksums(handoff: Handoff) -> HandoffHeader:
    """The header of a hand-off, with its digest and the checksum of each tensor."""
    header, start = handoff.header, _text_checksum(handoff)
    specs = {name: replace(spec, crc32=checksum(handoff.tensors[name], start)) for name, spec in header.tensors.items()}
    return replace(header, tensors=specs).sealed


def assemble(header: HandoffHeader, tensors: Mapping[str, Tensor], *, has_checksums: bool = False) -> Handoff:
    """The hand-off of a header and its received tensors.

    Raises:
        InvalidHandoff: a tensor is missing, has another shape or dtype, is damaged, or belongs to another text. With
            `has_checksums`, also if a checksum is missing.
    """
    start = _text_checksum(header.handoff)
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
        if spec.crc32 is None and has_checksums:
            raise InvalidHandoff(id="no-checksum", field=f"{field}.crc32", found=MISSING, expected="a checksum")
        # A tensor without a checksum stays on its device.
        if spec.crc32 is not None and checksum(found, start) != spec.crc32:
            raise InvalidHandoff(f"{field}: damaged, its checksum differs from the header", id="damaged", field=field)
    return header.handoff.with_tensors(tensors)
