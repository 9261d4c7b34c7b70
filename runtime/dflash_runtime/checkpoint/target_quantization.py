"""How a target's weights are quantised, and whether transformers dequantises them here. Needs no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.fp8_format import read_fp8_format, stated_quantization
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.target_facts import MLX
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.json_values import as_object, is_int

SCALES = ("_scale_inv", "_scale")
"""Suffixes that turn a weight's name into its scale's. `X.scale` and `X.qscale_weight` also belong to `X.weight`."""

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


def native_quantization(checkpoint: Checkpoint) -> Quantization | None:
    """Return the quantization of a target that native code runs, or None if its weights are plain."""
    found = read_fp8_format(checkpoint)
    return None if found is None else Quantization(found.method, (), False, 8)


def read_quantization(source: TargetSource, *, has_headers: bool = True) -> Quantization | None:
    """Return a target's quantization from its config and headers, or None if its weights are plain.

    Without `has_headers` only the config is read.

    Raises:
        UnsupportedError: an unsupported method, a missing package, or weights without their scales.
    """
    checkpoint = source.checkpoint
    evidence = find_quantization(checkpoint, has_headers=has_headers)
    if evidence is None:
        return None
    stated = stated_quantization(checkpoint)
    if not stated or evidence.startswith(MLX):
        refuse_packed(checkpoint.path, evidence)
    method = str(stated.get("quant_method") or ("bitsandbytes" if stated.get("load_in_4bit") else _producer(stated)))
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
    if method == "fp8" and has_headers:
        _check_scales(checkpoint, stated)
    return Quantization(method, packages, is_unpacked, _num_bits(checkpoint, method, stated))


def _producer(stated: Mapping[str, Any]) -> str:
    """Return the exporter that a quantization config names, such as modelopt."""
    return str(as_object(stated.get("producer")).get("name") or "unnamed")


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


def is_scale(name: str) -> bool:
    return name.endswith((*SCALES, ".scale", ".qscale_weight", "_scales"))


def scaled_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield each weight of eight bits with its scale."""
    for name, info in checkpoint.tensors.items():
        if info.dtype in FLOAT8 and len(info.shape) > 1 and not is_scale(name):
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
    scaled = dict(scaled_weights(checkpoint))
    if not any(info.dtype in FLOAT8 for info in checkpoint.tensors.values()):
        raise _refused(checkpoint, "fp8", "quantization-without-weights", "its tensors have no eight-bit weights")
    block = stated.get("weight_block_size")
    for name, info in checkpoint.tensors.items():
        if info.dtype not in FLOAT8 or len(info.shape) < 2 or is_scale(name):
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


def has_cut_blocks(shape: tuple[int, ...], grid: tuple[int, ...], block: Any) -> bool:
    """Whether a weight has one scale per block of the config, and a last block that is cut after another one."""
    if len(grid) < 2 or not _is_block(block) or not _divides(shape, grid, block):
        return False
    return any(count > 1 and size % length for size, count, length in zip(shape, grid, block, strict=True))
