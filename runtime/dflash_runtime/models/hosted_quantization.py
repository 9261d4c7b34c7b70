"""Targets with quantised weights: the packages that transformers needs for each method, and checks of the scales.

Where transformers can, it dequantises weights to the dtype of the run while it loads them. This is right on every
device, and computes with exactly the numbers in the file. Kernels that transformers would fetch from the hub are code,
so this module refuses methods that need them.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.files import Checkpoint, TensorInfo
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.target_facts import decoder_config
from dflash_runtime.errors import CheckpointError, UnsupportedError
from dflash_runtime.json_values import as_object, is_int
from dflash_runtime.models.weights import loaded_bytes

CONFIG_KEY = "quantization_config"
"""The only key that transformers reads. With another key it would load quantised weights as if they were plain."""

SCALES = ("_scale_inv", "_scale")
"""Suffixes that turn a weight's name into its scale's. `X.scale` and `X.qscale_weight` also belong to `X.weight`."""

NUM_COMPARED = 4
"""Number of loaded weights that are compared with scale times stored weight."""

FLOAT8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantization method: the packages that transformers needs, and whether it dequantises while it loads.

    num_bits   bits of a packed number, or None if they are not known
    """

    method: str
    packages: tuple[str, ...]
    is_unpacked: bool
    num_bits: int | None = None

    @property
    def label(self) -> str:
        """The method as results name it."""
        return f"{self.method}, dequantised" if self.is_unpacked else self.method

    def loaded_bytes(self, infos: Mapping[str, TensorInfo], dtype: torch.dtype) -> int:
        """Return the bytes of a checkpoint's weights after loading."""
        if not self.is_unpacked:
            return loaded_bytes(infos.values(), dtype)
        packed = [info for info in infos.values() if info.dtype in ("U8", "I8", "I32") and not _is_scale(info.name)]
        plain = [info for info in infos.values() if info not in packed]
        numbers = sum(info.num_bytes * 8 // (self.num_bits or 4) for info in packed)
        return loaded_bytes(plain, dtype) + numbers * dtype.itemsize


METHODS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "fp8": (("accelerate",), True),
    "mxfp4": ((), True),
    "compressed-tensors": (("compressed_tensors",), True),
    "gptq": (("optimum", "gptqmodel"), False),
    "awq": (("gptqmodel", "accelerate"), False),
    "bitsandbytes": (("bitsandbytes", "accelerate"), False),
}
"""Method -> the packages that it needs, and whether transformers dequantises while it loads."""

FETCHED = ("eetq", "fbgemm_fp8", "metal", "nvfp4", "gguf")
"""Methods for which transformers 5.23 fetches kernels from the hub. Source: its `integrations`."""

FETCHES = "gptqmodel"
"""This package fetches a kernel from the hub if the package `kernels` is installed. Source: its gemm_hf_kernel.py."""


def read_quantization(source: TargetSource) -> Quantization | None:
    """Return a target's quantization from its config and headers, or None if its weights are plain.

    Raises:
        UnsupportedError: an unsupported method, a missing package, or weights without their scales.
    """
    checkpoint = source.checkpoint
    evidence = find_quantization(checkpoint)
    if evidence is None:
        return None
    stated = _stated(checkpoint)
    if not stated:
        refuse_packed(checkpoint.path, evidence)
    method = str(stated.get("quant_method") or ("bitsandbytes" if stated.get("load_in_4bit") else "unnamed"))
    if method in FETCHED:
        why = "transformers would fetch kernels for them from the hub, and dflash never runs code that it fetches"
        raise _refused(checkpoint, method, "quantization-fetches-code", why)
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise _refused(checkpoint, method, "quantization-unknown", f"this method is not one of {known}")
    packages, is_unpacked = METHODS[method]
    for package in packages:
        if find_spec(package) is None:
            name = package.replace("_", "-")
            why = f"they need {name}, which is not installed"
            raise _refused(checkpoint, method, "quantization-needs-package", why, hint=f"pip install {name}")
    if FETCHES in packages and find_spec("kernels") is not None:
        why = f"{FETCHES} would fetch code with the package kernels, which is installed"
        raise _refused(checkpoint, method, "quantization-fetches-code", why, hint="pip uninstall kernels")
    if method == "fp8":
        _check_scales(checkpoint, stated)
    return Quantization(method, packages, is_unpacked, _num_bits(checkpoint, method, stated))


def dequantised(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization config that asks transformers to dequantise while it loads."""
    return {**stated, "dequantize": True}


def compare_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Compare some loaded weights with scale times stored weight.

    Raises:
        CheckpointError: a loaded weight differs.
    """
    parameters, block = dict(model.named_parameters()), _stated(checkpoint).get("weight_block_size")
    pairs = [
        (name, scale) for name, scale in _scaled(checkpoint) if name in parameters and not parameters[name].is_meta
    ]
    shapes = {name: info.shape[-2:] for name, info in checkpoint.tensors.items()}
    pairs.sort(key=lambda pair: not _has_cut_blocks(shapes[pair[0]], shapes[pair[1]], block))
    for name, scale in pairs[:NUM_COMPARED]:
        loaded = parameters[name].detach().cpu()
        wanted = _multiply(checkpoint.load(name), checkpoint.load(scale), block).to(loaded.dtype)
        if not torch.equal(loaded, wanted):
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
    block is cut. It takes the dtype of the scales for some weights.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    block, theirs = _stated(checkpoint).get("weight_block_size"), Fp8Dequantize._dequantize_one

    def unpack(self: Any, packed: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        if _has_cut_blocks(tuple(packed.shape[-2:]), tuple(scales.shape[-2:]), block):
            return _multiply(packed, scales, block).to(dtype)
        return theirs(self, packed, scales, output_dtype=dtype)

    Fp8Dequantize._dequantize_one = unpack
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = theirs


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


def _stated(checkpoint: Checkpoint) -> Mapping[str, Any]:
    text, _ = decoder_config(checkpoint.config, checkpoint.config_path)
    return as_object(checkpoint.config.get(CONFIG_KEY)) or as_object(text.get(CONFIG_KEY)) or {}


def _refused(checkpoint: Checkpoint, method: str, id: str, why: str, hint: str | None = None) -> UnsupportedError:
    return UnsupportedError(
        f"quantised weights ({method}), which this runtime does not run: {why}",
        id=id,
        path=checkpoint.path,
        field="quant_method",
        found=method,
        hint=hint or "run it in an engine that reads this quantization, or pass the weights it was made from",
    )


def _num_bits(checkpoint: Checkpoint, method: str, stated: Mapping[str, Any]) -> int | None:
    """Return the bits of a packed number, or None if they are not known.

    Raises:
        UnsupportedError: layers are quantised in several ways. transformers would read all of them in one way.
    """
    if method != "compressed-tensors":
        return 4 if method == "mxfp4" else None
    groups = [as_object(group) for group in as_object(stated.get("config_groups")).values()]
    schemes = {
        str(sorted(as_object(group.get("weights")).items())): as_object(group.get("weights")) for group in groups
    }
    if len(schemes) > 1:
        raise _refused(checkpoint, method, "quantization-mixed", "its config_groups quantise weights in several ways")
    bits = next(iter(schemes.values()), {}).get("num_bits")
    return bits if is_int(bits) else None


def _is_scale(name: str) -> bool:
    return name.endswith((*SCALES, ".scale", ".qscale_weight", "_scales"))


def _scaled(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield each weight of eight bits with its scale."""
    for name, info in checkpoint.tensors.items():
        if info.dtype in FLOAT8 and len(info.shape) > 1 and not _is_scale(name):
            scale = _scale_of(name, checkpoint)
            if scale is not None:
                yield name, scale


def _scale_of(name: str, checkpoint: Checkpoint) -> str | None:
    owner = name.removesuffix(".weight")
    names = [name + end for end in SCALES[:1]]
    if owner != name:
        names += [f"{owner}.scale", f"{owner}.qscale_weight"]
    return next((item for item in names if item in checkpoint.tensors), None)


def _check_scales(checkpoint: Checkpoint, stated: Mapping[str, Any]) -> None:
    """Check that every weight of eight bits has scales that divide it into the blocks of the config.

    Raises:
        UnsupportedError: a weight without a scale, or with scales for other blocks.
    """
    scaled = dict(_scaled(checkpoint))
    if not any(info.dtype in FLOAT8 for info in checkpoint.tensors.values()):
        raise _refused(checkpoint, "fp8", "quantization-without-weights", "its tensors have no eight-bit weights")
    block = stated.get("weight_block_size")
    for name, info in checkpoint.tensors.items():
        if info.dtype not in FLOAT8 or len(info.shape) < 2 or _is_scale(name):
            continue
        if name not in scaled:
            raise _refused(checkpoint, "fp8", "scale-missing", f"the scale of {name} is missing")
        grid = checkpoint.tensors[scaled[name]].shape
        if not _divides(info.shape[-2:], grid, block):
            why = (
                f"{scaled[name]} has shape {list(grid)}, expected one scale per block of {block} of {name}, "
                f"{list(info.shape)}"
            )
            raise _refused(checkpoint, "fp8", "scale-blocks-differ", why)


def _divides(shape: tuple[int, ...], grid: tuple[int, ...], block: Any) -> bool:
    """Whether each axis of a weight has one scale, or one scale per block. The last block may be cut."""
    if len(grid) < 2 or block is None:
        return all(count == 1 for count in grid)
    if not _is_block(block):
        return False
    return all(count == -(-size // length) for size, count, length in zip(shape, grid[-2:], block, strict=True))


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(is_int(length) and length > 0 for length in block)


def _has_cut_blocks(shape: tuple[int, ...], grid: tuple[int, ...], block: Any) -> bool:
    """Whether a weight has one scale per block of the config, and a last block that is cut after another one."""
    if len(grid) < 2 or not _is_block(block) or not _divides(shape, grid, block):
        return False
    return any(count > 1 and size % length for size, count, length in zip(shape, grid, block, strict=True))


def _multiply(weight: Tensor, scale: Tensor, block: Any = None) -> Tensor:
    """Return scale times weight in float32. The scale of a block applies to all its numbers."""
    factors = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if factors.dim() >= 2:
        is_cut = _has_cut_blocks(tuple(weight.shape[-2:]), tuple(scale.shape[-2:]), block)
        for axis in (-2, -1):
            size = weight.shape[axis]
            length = block[axis] if is_cut else size // factors.shape[axis]
            factors = factors.repeat_interleave(length, dim=axis).narrow(axis, 0, size)
    return weight.float() * factors
