"""Targets with quantised weights: the packages that transformers needs for each method, and checks of the scales.

Where transformers can, it dequantises weights to the dtype of the run while it loads them. This is right on every
device, and computes with exactly the numbers in the file. Kernels that transformers would fetch from the hub are code,
so this module refuses methods that need them.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dflash_runtime.checkpoint.quantised.scaled_weights import is_scale
from dflash_runtime.checkpoint.quantised.stated_quantization import stated_quantization
from dflash_runtime.checkpoint.quantised.target_quantization import (
    Quantization,
    has_cut_blocks,
    scaled_weights,
    stated_block,
)
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import CheckpointError
from dflash_runtime.models.weights import loaded_bytes

NUM_COMPARED = 4
"""Number of loaded weights that are compared with scale times stored weight."""


def quantised_bytes(quantization: Quantization, infos: Mapping[str, TensorInfo], dtype: torch.dtype) -> int:
    """Return the bytes of a checkpoint's weights after loading."""
    if not quantization.is_unpacked:
        return loaded_bytes(infos.values(), dtype)
    packed = [
        info for name, info in infos.items()
        if info.dtype in ("U8", "I8", "I32") and not is_scale(name) and not name.endswith("_scales")
    ]  # fmt: skip
    plain = [info for info in infos.values() if info not in packed]
    numbers = sum(info.num_bytes * 8 // (quantization.num_bits or 4) for info in packed)
    return loaded_bytes(plain, dtype) + numbers * dtype.itemsize


def dequantised(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization config that asks transformers to dequantise while it loads."""
    return {**stated, "dequantize": True}


NEAR = 2**-6
"""The relative difference that compressed-tensors may make by multiplying in a narrow dtype."""


def compare_weights(model: nn.Module, checkpoint: Checkpoint, method: str) -> None:
    """Compare some loaded weights with scale times stored weight.

    Raises:
        CheckpointError: a loaded weight differs.
    """
    parameters, block = dict(model.named_parameters()), stated_block(stated_quantization(checkpoint))
    pairs = [
        (name, scale)
        for name, scale in scaled_weights(checkpoint, method)
        if name in parameters and not parameters[name].is_meta
    ]
    shapes = {name: info.shape[-2:] for name, info in checkpoint.tensors.items()}
    pairs.sort(key=lambda pair: not has_cut_blocks(shapes[pair[0]], shapes[pair[1]], block))
    for name, scale in pairs[:NUM_COMPARED]:
        loaded = parameters[name].detach().cpu()
        wanted = _multiply(checkpoint.load(name), checkpoint.load(scale), block).to(loaded.dtype)
        is_same = torch.equal(loaded, wanted) if method == "fp8" else torch.allclose(loaded, wanted, rtol=NEAR)
        if not is_same:
            raise CheckpointError(
                f"{name}: transformers loads other values than {scale} times the stored values",
                id="weights-loaded-without-scale",
                path=checkpoint.path,
                field=name,
                found=scale,
            )


@contextmanager
def unpacking_blocks(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[None]:
    """Let transformers dequantise fp8 weights by the block size of the config, into the dtype of the run.

    transformers finds the block size by dividing a weight's size by its number of scales, which is wrong if the last
    block is cut. It takes the dtype of the scales for some weights. A release that cannot be asked for a dtype stays
    as it is, and `compare_weights` then refuses weights with cut blocks.
    """
    from transformers.integrations import finegrained_fp8

    dequantizer: Any = finegrained_fp8.Fp8Dequantize
    block, theirs = stated_quantization(checkpoint).get("weight_block_size"), dequantizer._dequantize_one
    if "output_dtype" not in inspect.signature(theirs).parameters:
        yield
        return

    def unpack(self: Any, packed: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        is_wider = output_dtype is not None and output_dtype.itemsize > dtype.itemsize
        wanted = output_dtype if is_wider else dtype
        if has_cut_blocks(tuple(packed.shape[-2:]), tuple(scales.shape[-2:]), block):
            return _multiply(packed, scales, block).to(wanted)
        unpacked: Tensor = theirs(self, packed, scales, output_dtype=wanted)
        return unpacked

    dequantizer._dequantize_one = unpack
    try:
        yield
    finally:
        dequantizer._dequantize_one = theirs


def widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert narrower weights to the dtype of the run.

    Beside quantised weights, transformers keeps plain weights in their stored dtype.
    """
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.is_floating_point() and parameter.dtype.itemsize < dtype.itemsize:
            parameter.data = parameter.data.to(dtype)


def leave_weights_in_place(model: nn.Module) -> None:
    """Remove the hooks that compressed-tensors leaves on modules after dequantising them.

    With some releases of transformers, the hooks move a module's weights back to their first device at each call, even
    if the model has been moved since.
    """
    offload = sys.modules.get("compressed_tensors.offload")
    if offload is not None:  # otherwise no module has hooks
        offload.remove_dispatch(model)


def _multiply(weight: Tensor, scale: Tensor, block: Any = None) -> Tensor:
    """Return scale times weight in float32. The scale of a block applies to all its numbers."""
    factors = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if factors.dim() >= 2:
        is_cut = has_cut_blocks(tuple(weight.shape[-2:]), tuple(scale.shape[-2:]), block)
        for axis in (-2, -1):
            size = weight.shape[axis]
            length = block[axis] if is_cut else size // factors.shape[axis]
            factors = factors.repeat_interleave(length, dim=axis).narrow(axis, 0, size)
    return weight.float() * factors
