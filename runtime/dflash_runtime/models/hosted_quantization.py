"""Targets with quantised weights: what transformers needs to load each kind, and that no scale is left out.

Weights are turned into the dtype of the run while they are loaded wherever transformers can: that is right on every
device, and computes with the numbers that the file stands for. Kernels that transformers would fetch from the hub are
code, and are never used.
"""

import sys
from collections.abc import Iterator, Mapping
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
"""The only key that transformers reads; with another it would load packed weights as if they were plain."""

SCALES = ("_scale_inv", "_scale")
"""What names of scales end in, beside the name of their weight; `X.scale` and `X.qscale_weight` go with `X.weight`."""

NUM_COMPARED = 4
"""Loaded weights that are compared with scale times stored weight."""

FLOAT8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Quantization:
    """One way of packing weights: the packages that transformers needs, and whether it unpacks them while loading."""

    method: str
    packages: tuple[str, ...]
    is_unpacked: bool
    num_bits: int | None = None

    @property
    def label(self) -> str:
        """What results are marked with."""
        return f"{self.method}, dequantised" if self.is_unpacked else self.method

    def loaded_bytes(self, infos: Mapping[str, TensorInfo], dtype: torch.dtype) -> int:
        """Bytes of a checkpoint's weights once they are loaded."""
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
"""Method -> the packages it needs, and whether transformers unpacks it while loading."""

FETCHED = ("eetq", "fbgemm_fp8", "metal", "nvfp4", "gguf")
"""Methods for which transformers 5.23 fetches kernels from the hub. Source: its `integrations`."""

FETCHES = "gptqmodel"
"""It fetches a kernel from the hub where the package `kernels` is installed. Source: its gemm_hf_kernel.py."""


def read_quantization(source: TargetSource) -> Quantization | None:
    """How a target's weights are packed, None where they are plain; from files, before anything is loaded.

    Raises:
        UnsupportedError: a method that is not run here, a package that is missing, or weights without their scales.
    """
    checkpoint = source.checkpoint
    evidence = find_quantization(checkpoint)
    if evidence is None:
        return None
    stated = _stated(checkpoint)
    if not stated:
        refuse_packed(checkpoint.path, evidence)
    method = str(stated.get("quant_method") or ("bitsandbytes" if stated.get("load_in_4bit") else "unnamed"))
    if method not in METHODS:
        raise _refused(checkpoint, method, _why_not(method))
    packages, is_unpacked = METHODS[method]
    for package in packages:
        if find_spec(package) is None:
            name = package.replace("_", "-")
            raise _refused(checkpoint, method, f"they need {name}, which is not installed", f"pip install {name}")
    if FETCHES in packages and find_spec("kernels") is not None:
        raise _refused(checkpoint, method, f"{FETCHES} would fetch code with the package kernels, which is installed")
    if method == "fp8":
        _check_scales(checkpoint, stated)
    return Quantization(method, packages, is_unpacked, _num_bits(checkpoint, method, stated))


def dequantised(stated: Mapping[str, Any]) -> dict[str, Any]:
    """A quantisation config that asks for weights to be unpacked while they are loaded."""
    return {**stated, "dequantize": True}


def compare_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Hold some loaded weights to what their files stand for: scale times stored number.

    Raises:
        CheckpointError: one is something else.
    """
    parameters = dict(model.named_parameters())
    pairs = [
        (name, scale) for name, scale in _scaled(checkpoint) if name in parameters and not parameters[name].is_meta
    ]
    for name, scale in pairs[:NUM_COMPARED]:
        loaded = parameters[name].detach().cpu()
        wanted = _multiply(checkpoint.load(name), checkpoint.load(scale)).to(loaded.dtype)
        if not torch.equal(loaded, wanted):
            raise CheckpointError(
                f"{name}: transformers loads it as another weight than {scale} times it", path=checkpoint.path
            )


def leave_weights_in_place(model: nn.Module) -> None:
    """Undo what compressed-tensors does to modules that it has unpacked for some releases of transformers: at each call
    they fetch their weights to the device that these were on, wherever the model has been moved since.
    """
    offload = sys.modules.get("compressed_tensors.offload")
    if offload is not None:  # otherwise nothing of it is in use
        offload.remove_dispatch(model)


def _stated(checkpoint: Checkpoint) -> Mapping[str, Any]:
    text, _ = decoder_config(checkpoint.config, checkpoint.config_path)
    return as_object(checkpoint.config.get(CONFIG_KEY)) or as_object(text.get(CONFIG_KEY)) or {}


def _why_not(method: str) -> str:
    if method in FETCHED:
        return "transformers would fetch kernels for them from the hub, and code that is fetched is never run"
    return f"it is none of {', '.join(METHODS)}"


def _refused(checkpoint: Checkpoint, method: str, why: str, hint: str | None = None) -> UnsupportedError:
    return UnsupportedError(
        f"{checkpoint.path}: quantised weights ({method}), which this runtime does not run: {why}",
        hint=hint or "run it in an engine that it was packed for, or take the weights it was packed from",
    )


def _num_bits(checkpoint: Checkpoint, method: str, stated: Mapping[str, Any]) -> int | None:
    """Bits of a packed number, where that is known.

    Raises:
        UnsupportedError: layers that are packed in several ways, of which transformers takes one for all.
    """
    if method != "compressed-tensors":
        return 4 if method == "mxfp4" else None
    groups = [as_object(group) for group in as_object(stated.get("config_groups")).values()]
    schemes = {
        str(sorted(as_object(group.get("weights")).items())): as_object(group.get("weights")) for group in groups
    }
    if len(schemes) > 1:
        raise _refused(checkpoint, method, "its config_groups pack weights in several ways")
    bits = next(iter(schemes.values()), {}).get("num_bits")
    return bits if is_int(bits) else None


def _is_scale(name: str) -> bool:
    return name.endswith((*SCALES, ".scale", ".qscale_weight", "_scales"))


def _scaled(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Weights of eight bits with their scales."""
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
    """Every weight of eight bits has scales, and they divide it into the blocks that the config says.

    transformers finds the size of blocks from that of the scales, which is another where the last block is cut short.
    """
    scaled = dict(_scaled(checkpoint))
    if not any(info.dtype in FLOAT8 for info in checkpoint.tensors.values()):
        raise _refused(checkpoint, "fp8", "none of its tensors has eight bits")
    block = stated.get("weight_block_size")
    for name, info in checkpoint.tensors.items():
        if info.dtype not in FLOAT8 or len(info.shape) < 2 or _is_scale(name):
            continue
        if name not in scaled:
            raise _refused(checkpoint, "fp8", f"no scale is found for {name}")
        grid = checkpoint.tensors[scaled[name]].shape
        if not _divides(info.shape[-2:], grid, block):
            raise _refused(
                checkpoint, "fp8", f"{scaled[name]} of {list(grid)} is not one scale a block of {block} of {name}, "
                f"{list(info.shape)}, which transformers takes for granted",
            )  # fmt: skip


def _divides(shape: tuple[int, ...], grid: tuple[int, ...], block: Any) -> bool:
    """Whether each axis of a weight has one scale, or one for each whole block."""
    if len(grid) < 2 or block is None:
        return all(count == 1 for count in grid)
    if not isinstance(block, list) or len(block) != 2 or not all(map(is_int, block)):
        return False
    sizes = zip(shape, grid[-2:], block, strict=True)
    return all(size == count * length or (count == 1 and size < length) for size, count, length in sizes)


def _multiply(weight: Tensor, scale: Tensor) -> Tensor:
    """Scale times weight in float32; scales of a block stand for all of its numbers."""
    factors = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    if factors.dim() >= 2:
        for axis in (-2, -1):
            factors = factors.repeat_interleave(weight.shape[axis] // factors.shape[axis], dim=axis)
    return weight.float() * factors
