"""How a checkpoint stores matrices in FP8 that this runtime multiplies as they are. Needs no torch.

The formats are DeepSeek's and Qwen's `fp8`, the forms of compressed-tensors with eight-bit floats, and
Model-Optimizer's FP8. The dtype of a tensor decides which matrices are in FP8: layers that the config ignores are
stored as plain weights.
Sources: transformers 5.23 quantizers/quantizer_finegrained_fp8.py, compressed-tensors 0.12
quantization/quant_scheme.py, vLLM 0.33.0 model_executor/layers/quantization/{fp8,modelopt}.py.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.layout import FUSED
from dflash_runtime.checkpoint.quantised.scaled_weights import (
    E4M3,
    INPUT_ENDS,
    KV_SCALES,
    SCALE_ENDS,
    check_scaled,
    is_scale,
    malformed,
    scales_of,
)
from dflash_runtime.checkpoint.quantised.stated_quantization import (
    CONFIG_KEY,
    block_structure,
    check_statements,
    is_block,
    stated_quantization,
)
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.json_values import as_object

Activations = Literal["dynamic", "static", "none"]

MULTIPLIED = re.compile(r"(.*\.)?(\w+_proj|in_proj_\w+|fc|lm_head)(\.weight)?")
"""Matrices that the runtime multiplies in FP8. It needs plain weights for embeddings, routers and convolutions."""

EXPERT_PART = re.compile(r"(.*\.)(?:experts\.(?:\d+\.)?|shared_expert\.)(?:gate_up|gate|up|down)_proj(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """How matrices in FP8 are scaled.

    block        rows and columns with one scale; None: one scale per matrix or per row
    activations  dynamic: each row has scales of its own, one per block of columns; static: one stored scale; none:
                 activations are not rounded
    """

    method: str
    block: tuple[int, int] | None
    activations: Activations


@dataclass(frozen=True, slots=True)
class Fp8Names:
    """The names of the scales of a matrix in FP8, and of its input if they are stored."""

    scales: str
    input_scale: str | None = None


def read_fp8_format(checkpoint: Checkpoint) -> Fp8Format | None:
    """Return the FP8 format that a config states, or None if it states another quantization or no quantization."""
    stated = stated_quantization(checkpoint)
    reader = READERS.get(str(stated.get("quant_method")))
    found = None if reader is None else reader(stated)
    return found if found is None or found.block is None or all(map(_is_power_of_2, found.block)) else None


def refuse_unless_fp8(checkpoint: Checkpoint, *, has_headers: bool = True) -> Fp8Format | None:
    """Return the FP8 format of a checkpoint, or None if its config states no FP8 format.

    Raises:
        UnsupportedError: parts of a joined projection differ, or a matrix is in FP8 that must be plain.
        CheckpointError: the config contradicts itself, or scales are missing, or have another element type or another
            shape than the config says.
    """
    check_statements(checkpoint)
    found = read_fp8_format(checkpoint)
    if found is not None and has_headers:
        check_scaled(checkpoint, E4M3)
        names = fp8_matrices(checkpoint, checkpoint.tensors)
        if not names:
            text = f"its config states FP8 weights ({found.method}), but no matrix is in FP8"
            raise UnsupportedError(
                text, id="quantization-without-weights", path=checkpoint.path, field=CONFIG_KEY,
                hint=f"remove {CONFIG_KEY} if the weights are plain",
            )  # fmt: skip
        _check_joined(checkpoint, names)
    return found


def refuse_packed_unless_fp8(checkpoint: Checkpoint, *, has_headers: bool = True) -> None:
    """Refuse quantised weights other than FP8. Raises the errors of `refuse_unless_fp8` and `refuse_packed`."""
    if refuse_unless_fp8(checkpoint, has_headers=has_headers) is None:
        refuse_packed(checkpoint.path, find_quantization(checkpoint, has_headers=has_headers))


def fp8_matrices(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, Fp8Names]:
    """Return the names of the scales of every named matrix in FP8. Raises the errors of `refuse_unless_fp8`."""
    stored, form = checkpoint.tensors, read_fp8_format(checkpoint)
    if form is None:
        return {}
    found: dict[str, Fp8Names] = {}
    for name in names:
        info = stored[name]
        if info.dtype != E4M3 or len(info.shape) < 2 or is_scale(name):
            continue
        if not MULTIPLIED.fullmatch(name):
            text = f"{name} is in FP8, and this runtime needs it as plain weights"
            raise UnsupportedError(text, id="fp8-not-multiplied", path=checkpoint.path, field=name, found=info.dtype)
        found[name] = Fp8Names(*_scale_names(checkpoint, form, info))
    return found


def scale_tensors(checkpoint: Checkpoint) -> set[str]:
    """Return the names of all tensors that hold scales of matrices in FP8, or of a KV cache."""
    if read_fp8_format(checkpoint) is None:
        return set()
    names = fp8_matrices(checkpoint, checkpoint.tensors).values()
    scales = {name for item in names for name in (item.scales, item.input_scale) if name is not None}
    return scales | {name for name in checkpoint.tensors if KV_SCALES.fullmatch(name)}


def _scale_names(checkpoint: Checkpoint, form: Fp8Format, info: TensorInfo) -> tuple[str, str | None]:
    """Return the names of a matrix's scales and of its input's scale, after checking their shapes."""
    stored, name = checkpoint.tensors, info.name
    scales = next((name + end for end in SCALE_ENDS if name + end in stored), None)
    if scales is None:
        raise malformed(checkpoint, "scale-missing", name, f"the scale of {name} is missing", " or ".join(SCALE_ENDS))
    _check_grid(checkpoint, form, info, stored[scales])
    if form.activations != "static":
        return scales, None
    owner = name[: -len("weight")] if name.endswith(".weight") else f"{name}_"
    fixed = next((owner + end for end in INPUT_ENDS if owner + end in stored), None)
    if fixed is None:
        text = f"the scale of the activations of {name} is missing"
        raise malformed(checkpoint, "scale-missing", name, text, " or ".join(INPUT_ENDS))
    if stored[fixed].num_elements not in (1, math.prod(info.shape[:-2])):
        text = f"{fixed} has shape {list(stored[fixed].shape)}, expected one scale for {name}"
        raise malformed(checkpoint, "scale-blocks-differ", fixed, text, "one scale")
    return scales, fixed


def check_grids(checkpoint: Checkpoint) -> None:
    """Check the shapes of the scales of all weights. Raises CheckpointError."""
    form = read_fp8_format(checkpoint)
    for name, scale in scales_of(checkpoint):
        if form is not None and scale.endswith(SCALE_ENDS) and not scale.endswith(INPUT_ENDS):
            _check_grid(checkpoint, form, checkpoint.tensors[name], checkpoint.tensors[scale])


def _check_grid(checkpoint: Checkpoint, form: Fp8Format, info: TensorInfo, scales: TensorInfo) -> None:
    """Require the number of scales that the format says."""
    if not _fits(info.shape, scales.shape, form.block):
        expected = "one scale per matrix or row" if form.block is None else f"one scale per block of {form.block}"
        text = f"{scales.name} has shape {list(scales.shape)}, expected {expected} of {info.name}, {list(info.shape)}"
        raise malformed(checkpoint, "scale-blocks-differ", scales.name, text, expected, list(scales.shape))


def _fits(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    """Whether scales are one per matrix, row or block of a matrix, or of each matrix of a stack."""
    if len(shape) == 3:
        return len(scales) > 0 and scales[0] == shape[0] and _fits(shape[1:], scales[1:], block)
    if block is not None:
        return scales == tuple(-(-size // length) for size, length in zip(shape, block, strict=True))
    return all(size == 1 for size in scales) or scales in ((shape[0],), (shape[0], 1))


def _check_joined(checkpoint: Checkpoint, names: Mapping[str, Fp8Names]) -> None:
    """Require that all parts of a joined projection, and all experts of a layer, are in FP8 or none of them."""
    kinds: dict[str, set[bool]] = {}
    for name in checkpoint.tensors:
        if (group := _joined_into(name)) is not None and not is_scale(name) and not name.endswith(".bias"):
            kinds.setdefault(group, set()).add(name in names)
    mixed = next((group for group, found in kinds.items() if len(found) > 1), None)
    if mixed is not None:
        text = f"{mixed}: some parts are in FP8 and some are plain, and this runtime multiplies them together"
        hint = "store all of these parts in FP8, or all as plain weights"
        raise UnsupportedError(text, id="fp8-parts-differ", path=checkpoint.path, field=mixed, hint=hint)


def _joined_into(name: str) -> str | None:
    if match := EXPERT_PART.fullmatch(name):
        return f"{match[1]}experts"
    for stack, parts in FUSED.items():
        for part in parts:
            if part in name:
                return name.replace(part, stack)
    return None


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _read_fp8(stated: Mapping[str, Any]) -> Fp8Format | None:
    """Read the method `fp8`. A format with scales that are powers of two (`scale_fmt`) is not read."""
    block, scheme = stated.get("weight_block_size"), stated.get("activation_scheme", "dynamic")
    is_known = (
        stated.get("fmt") in (None, "e4m3") and stated.get("scale_fmt") is None and scheme in ("dynamic", "static")
    )
    if not is_known or (block is not None and (not is_block(block) or scheme == "static")):
        return None
    return Fp8Format("fp8", None if block is None else (block[0], block[1]), scheme)


def _read_compressed(stated: Mapping[str, Any]) -> Fp8Format | None:
    """Read compressed-tensors with eight-bit floats. Groups of layers must have the same scheme."""
    groups = [as_object(group) for group in as_object(stated.get("config_groups")).values()]
    found = {_read_scheme(group) for group in groups}
    is_sparse = as_object(stated.get("sparsity_config")).get("format", "dense") != "dense"
    return next(iter(found)) if len(found) == 1 and not is_sparse else None


def _read_scheme(group: Mapping[str, Any]) -> Fp8Format | None:
    weights, inputs = as_object(group.get("weights")), as_object(group.get("input_activations"))
    if as_object(group.get("output_activations")) or not _is_eight_bits(weights) or weights.get("dynamic"):
        return None
    block = block_structure(weights) if weights.get("strategy") == "block" else None
    if weights.get("strategy") not in ("tensor", "channel", "block") or (weights["strategy"] == "block") != is_block(
        block
    ):
        return None
    shape = None if block is None else (block[0], block[1])
    if not inputs:
        return Fp8Format("compressed-tensors", shape, "none")
    wanted = ["token", "tensor"] if shape is None else ["group"]
    if not _is_eight_bits(inputs) or inputs.get("strategy") not in wanted:
        return None
    if shape is not None and (inputs.get("group_size") != shape[1] or not inputs.get("dynamic")):
        return None
    is_static = not inputs.get("dynamic")
    if is_static and inputs.get("strategy") != "tensor":
        return None
    return Fp8Format("compressed-tensors", shape, "static" if is_static else "dynamic")


def _is_eight_bits(scheme: Mapping[str, Any]) -> bool:
    return scheme.get("num_bits") == 8 and scheme.get("type") == "float" and scheme.get("symmetric", True) is True


def _read_modelopt(stated: Mapping[str, Any]) -> Fp8Format | None:
    return Fp8Format("modelopt", None, "static") if stated.get("quant_algo") == "FP8" else None


READERS: Mapping[str, Callable[[Mapping[str, Any]], Fp8Format | None]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
}
"""Method -> the reader of its form."""
