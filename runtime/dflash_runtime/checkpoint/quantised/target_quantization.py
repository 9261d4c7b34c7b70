"""How a target's weights are quantised, and whether transformers dequantises them here. Needs no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.quantised.fp8_format import check_grids, read_fp8_format
from dflash_runtime.checkpoint.quantised.scaled_weights import E4M3, OTHER_SCALES, check_scaled, malformed, scales_of
from dflash_runtime.checkpoint.quantised.stated_quantization import (
    CONFIG_KEY,
    block_structure,
    check_statements,
    is_block,
    stated_quantization,
)
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.targets.target_facts import MLX
from dflash_runtime.errors import InvalidConfig, UnsupportedError
from dflash_runtime.json_values import as_object, is_int

READ = ("_scale_inv", *OTHER_SCALES)
"""Ends of the names of scales that transformers reads for the method `fp8`."""

MXFP4_ENDS = ("_blocks", "_scales")
"""Ends of the names of MXFP4's numbers and scales."""

EXPONENT = "U8"
"""The element type of MXFP4's numbers, and of its scales, which are exponents."""


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
        UnsupportedError: an unsupported method, a missing package, or names of scales that transformers does not read.
        CheckpointError: the config contradicts itself or the weights, or a weight lacks its scales.
    """
    checkpoint = source.checkpoint
    check_statements(checkpoint)
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
    if has_headers:
        _check_weights(checkpoint, method, stated)
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
    schemes = {str(sorted(weights.items())): weights for weights in _weight_schemes(stated)}
    if len(schemes) > 1:
        raise _refused(checkpoint, method, "quantization-mixed", "its config_groups quantise weights in several ways")
    bits = next(iter(schemes.values()), {}).get("num_bits")
    return bits if is_int(bits) else None


def _check_weights(checkpoint: Checkpoint, method: str, stated: Mapping[str, Any]) -> None:
    """Check the element types of weights, and their scales.

    Raises:
        UnsupportedError: no weight is quantised, or transformers does not read the names of the scales.
        CheckpointError: weights contradict the config, lack scales, or have scales of another type or shape.
    """
    if method == "mxfp4":
        if not any(name.endswith(MXFP4_ENDS) for name in checkpoint.tensors):
            raise _refused(checkpoint, "mxfp4", "quantization-without-weights", "no tensor has numbers of four bits")
        check_mxfp4(checkpoint)
    elif method == "fp8":
        expected = "F8_E5M2" if stated.get("fmt") == "e5m2" else E4M3
        check_scaled(checkpoint, expected)
        _check_blocks(checkpoint, expected, stated.get("weight_block_size"))
    elif method == "compressed-tensors":
        groups, types = as_object(stated.get("config_groups")), _compressed_types(stated)
        if any(info.dtype in types for info in checkpoint.tensors.values()):
            check_scaled(checkpoint, types[0])
            check_grids(checkpoint)
        if not groups and any(scales_of(checkpoint)):
            field, path = f"{CONFIG_KEY}.config_groups", checkpoint.config_path
            raise InvalidConfig(field, groups, "how the weights with scales are quantised", path=path)


def _compressed_types(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the element type of weights of eight bits, before one that contradicts it. Empty for other weights."""
    kinds = {f"{weights.get('type')} {weights.get('num_bits')}" for weights in _weight_schemes(stated)}
    return {"float 8": (E4M3, "I8"), "int 8": ("I8", E4M3)}.get(" ".join(kinds), ())


def _weight_schemes(stated: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemes of weights of compressed-tensors' groups."""
    groups = as_object(stated.get("config_groups")).values()
    return [as_object(as_object(group).get("weights")) for group in groups]


def stated_block(stated: Mapping[str, Any]) -> Any:
    """Return the rows and columns of blocks that a config states, None without blocks."""
    schemes = _weight_schemes(stated)
    return stated.get("weight_block_size") or (block_structure(schemes[0]) if schemes else None)


def check_mxfp4(checkpoint: Checkpoint) -> None:
    """Require that numbers and scales of MXFP4 are bytes, with one scale for each block of numbers.

    Raises:
        CheckpointError: another element type or shape, or numbers or scales are missing.
    """
    stored = checkpoint.tensors
    for name, info in stored.items():
        end = next((end for end in MXFP4_ENDS if name.endswith(end)), None)
        if end is None:
            continue
        owner = name.removesuffix(end)
        both = [stored.get(f"{owner}{item}") for item in MXFP4_ENDS]
        if info.dtype != EXPONENT:
            text = f"{name} is {info.dtype}, expected {EXPONENT}"
            raise malformed(checkpoint, "weight-type", name, text, EXPONENT, info.dtype)
        if both[0] is None or both[1] is None:
            missing = f"{owner}{MXFP4_ENDS[both[0] is not None]}"
            raise malformed(checkpoint, "scale-missing", missing, f"{missing} is missing beside {name}", missing)
        if both[0].shape[:-1] != both[1].shape:
            wanted = f"{list(both[1].shape)} and the bytes of a block"
            text = f"{both[0].name} has shape {list(both[0].shape)}, expected {wanted}, as {both[1].name} has it"
            raise malformed(checkpoint, "scale-blocks-differ", both[0].name, text, wanted, list(both[0].shape))


def scaled_weights(checkpoint: Checkpoint, method: str = "fp8") -> Iterator[tuple[str, str]]:
    """Yield each weight with the scales that transformers reads for a method."""
    ends = READ if method == "fp8" else (".weight_scale",)
    for name, scale in scales_of(checkpoint):
        if scale.endswith(ends) and len(checkpoint.tensors[name].shape) > 1:
            yield name, scale


def _check_blocks(checkpoint: Checkpoint, expected: str, block: Any) -> None:
    """Check that transformers reads scales for every weight, and that they divide it into the blocks of the config.

    Raises:
        UnsupportedError: no weight has eight bits, or transformers does not read the names of the scales.
        CheckpointError: scales of other blocks.
    """
    scaled, stored = dict(scaled_weights(checkpoint)), checkpoint.tensors
    weights = {name: scale for name, scale in scales_of(checkpoint) if stored[name].dtype == expected}
    if not weights:
        raise _refused(checkpoint, "fp8", "quantization-without-weights", "its tensors have no eight-bit weights")
    for name, scale in weights.items():
        if name not in scaled:
            why = f"transformers reads no scales with the name {scale}, only {name}_scale_inv"
            raise _refused(checkpoint, "fp8", "scale-name", why)
    for name, scale in scaled.items():
        info, grid = stored[name], stored[scale].shape
        if not _divides(info.shape[-2:], grid, block):
            wanted = f"one scale per block of {block}"
            text = f"{scale} has shape {list(grid)}, expected {wanted} of {name}, {list(info.shape)}"
            raise malformed(checkpoint, "scale-blocks-differ", scale, text, wanted, list(grid))


def _divides(shape: tuple[int, ...], grid: tuple[int, ...], block: Any) -> bool:
    """Whether each axis of a weight has one scale, or one scale per block. The last block may be cut."""
    if len(grid) < 2 or block is None:
        return all(count == 1 for count in grid)
    if not is_block(block):
        return False
    return all(count == -(-size // length) for size, count, length in zip(shape, grid[-2:], block, strict=True))


def has_cut_blocks(shape: tuple[int, ...], grid: tuple[int, ...], block: Any) -> bool:
    """Whether a weight has one scale per block of the config, and a last block that is cut after another one."""
    if len(grid) < 2 or not is_block(block) or not _divides(shape, grid, block):
        return False
    return any(count > 1 and size % length for size, count, length in zip(shape, grid, block, strict=True))
