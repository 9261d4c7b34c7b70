"""Load weights onto a device, and stack projections that read the same rows.

A checkpoint has `q_proj`, `k_proj`, `v_proj` and `gate_proj`, `up_proj`. A model gets `qkv_proj` and `gate_up_proj`, so
that each needs one product. Stacking happens while tensors are loaded, and needs extra memory for one layer's parts
only. A layer's experts become two tensors; see `expert_stacks.py`.

Matrices in FP8 stay in FP8. After loading, a module `X` has the tensors `X.weight` and `X.weight_scale`. It also has
`X.input_scale` unless each row of activations has scales of its own (`Fp8Weight`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dflash_kernels.fp8.fp8_weight import SCALES, WEIGHT, Fp8Weight, join_rows
from dflash_runtime.checkpoint.layout import FUSED
from dflash_runtime.checkpoint.quantised.fp8_format import Fp8Format, Fp8Names, fp8_matrices, read_fp8_format
from dflash_runtime.checkpoint.quantised.scaled_weights import E4M3
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.models.expert_stacks import stack_experts
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.scale_values import check_exponents, read_scales
from dflash_runtime.models.target_shares import Cut, cut_info, cut_scales

Weights = Mapping[str, Tensor]
Arrange = Callable[[str, Tensor], Tensor]
"""Returns a tensor, by its name, in the layout that a model reads."""

Matrix = Tensor | Fp8Weight
"""A weight of a product."""

_STACK_OF = {part: stack for stack, parts in FUSED.items() for part in parts}


def loaded_bytes(infos: Iterable[TensorInfo], dtype: torch.dtype) -> int:
    """Return the bytes of tensors after loading, with floating point tensors in the dtype of the run."""
    return sum(info.num_elements * dtype.itemsize if info.is_floating else info.num_bytes for info in infos)


def native_bytes(infos: Iterable[TensorInfo], dtype: torch.dtype, form: Fp8Format | None) -> int:
    """Return the bytes of tensors after loading into a native model, in which matrices in FP8 stay as they are.

    Scales count too: one of 4 bytes per block of the format, or per row.
    """
    return sum(
        info.num_bytes + _num_scales(info.shape, form) * torch.float32.itemsize
        if info.dtype == E4M3 and form is not None and len(info.shape) > 1
        else loaded_bytes([info], dtype)
        for info in infos
    )


def _num_scales(shape: Sequence[int], form: Fp8Format) -> int:
    """Return the number of scales of a matrix [N, K] in FP8, or of a stack of them."""
    height, width = form.block or (1, shape[-1])
    return math.prod(shape[:-2]) * -(-shape[-2] // height) * -(-shape[-1] // width)


def load_weights(
    checkpoint: Checkpoint,
    names: Iterable[str],
    placement: Placement,
    as_stored: str | None = None,
    arrange: Arrange | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> Weights:
    """Read tensors onto the device, convert floating point tensors to the dtype of the run, and stack projections.

    The device converts, which costs the host neither time nor memory. Tensors with the prefix `as_stored` keep their
    dtype, and matrices in FP8 keep theirs and get their scales. With `arrange` each tensor is arranged before the next
    one is read: memory may not hold all of them twice. Of tensors in `cuts` only these parts are read.

    Raises:
        UnsupportedError: a part of a matrix in FP8 ends inside a block with one scale.
        CheckpointError: a scale is not a positive number.
    """
    wanted, parts = list(names), cuts or {}
    scaled, form = fp8_matrices(checkpoint, wanted), read_fp8_format(checkpoint)
    listed = [name for item in scaled.values() for name in (item.scales, item.input_scale) if name is not None]
    scales = read_scales(checkpoint, listed, str(placement.device))
    for name, names_of_scales in scaled.items():
        if name in parts and form is not None:
            whole, own = checkpoint.tensors[name], names_of_scales.scales
            scales[own] = cut_scales(scales[own], parts[name], whole, form)

    def loaded() -> Iterator[tuple[str, Matrix]]:
        for name, tensor in check_exponents(checkpoint, checkpoint.load_many(wanted, str(placement.device), parts)):
            if form is not None and name in scaled:
                yield name, _fp8_weight(tensor, scaled[name], scales, form)
                continue
            is_stored = not tensor.is_floating_point() or _begins(name, as_stored)
            read = tensor if is_stored else tensor.to(placement.dtype)
            yield name, read if arrange is None else arrange(name, read)

    shapes = {name: cut_info(checkpoint.tensors[name], parts.get(name)).shape for name in wanted}
    return stack_projections(stack_experts(loaded(), shapes, None if form is None else form.block))


def _fp8_weight(values: Tensor, names: Fp8Names, scales: Mapping[str, Tensor], form: Fp8Format) -> Fp8Weight:
    """Return a matrix in FP8, or a stack of them. One scale per matrix becomes one per row."""
    found, *stack = scales[names.scales], *values.shape[:-2]
    if form.block is None:
        height = values.shape[-2]
        found = found.reshape(*stack, -1, 1).expand(*stack, height, 1).contiguous()
    fixed = None if form.activations == "dynamic" else found.new_zeros(0)
    if names.input_scale is not None:
        fixed = scales[names.input_scale].amax().view(1)
    return Fp8Weight(values, found, fixed)


def load_plain(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read one matrix to the CPU, dequantised to float32 if it is in FP8. Raises the errors of `load_weights`."""
    form, tensor = read_fp8_format(checkpoint), checkpoint.load(name)
    names = fp8_matrices(checkpoint, [name]).get(name)
    if form is None or names is None:
        return tensor
    return _fp8_weight(tensor, Fp8Names(names.scales), read_scales(checkpoint, [names.scales]), form).dequantised()


def with_wide_norms(weights: Weights) -> Weights:
    """Return the weights of norms in float32 at least, in which transformers multiplies the norms of some families."""
    return {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if _is_norm(name) else tensor
        for name, tensor in weights.items()
    }


def _is_norm(name: str) -> bool:
    return "norm" in name.removesuffix(".weight").rpartition(".")[2]


def _begins(name: str, prefix: str | None) -> bool:
    return prefix is not None and name.startswith(prefix)


def stack_projections(tensors: Iterable[tuple[str, Matrix]]) -> Weights:
    """Names and tensors in any order -> weights in which the parts of each stack in `FUSED` are one tensor.

    `qkv_proj` has the rows of queries, then keys, then values; `gate_up_proj` has the rows of gate, then up. The parts
    of an incomplete stack keep their own names.
    """
    weights: dict[str, Matrix] = {}
    waiting: dict[str, dict[str, tuple[str, Matrix]]] = {}  # stacked name -> part -> its own name and matrix
    for name, tensor in tensors:
        part = next((part for part in _STACK_OF if part in name), None)
        if part is None:
            weights[name] = tensor
            continue
        stack = _STACK_OF[part]
        stacked = name.replace(part, stack)
        waiting.setdefault(stacked, {})[part] = (name, tensor)
        if len(waiting[stacked]) == len(FUSED[stack]):
            parts = waiting.pop(stacked)
            weights[stacked] = join_matrices([parts[item][1] for item in FUSED[stack]])
    for parts in waiting.values():
        weights.update(parts.values())
    return {key: tensor for name, matrix in weights.items() for key, tensor in named_tensors(name, matrix).items()}


def named_tensors(name: str, matrix: Matrix) -> dict[str, Tensor]:
    """Return the tensors of a matrix by name. `name` is the name of the weight, such as `X.weight`."""
    return matrix.tensors(name.removesuffix(WEIGHT)) if isinstance(matrix, Fp8Weight) else {name: matrix}


def find_matrix(weights: Weights, name: str) -> Matrix:
    """Return the weight of the module `name`."""
    return Fp8Weight.find(weights, name) or weights[f"{name}{WEIGHT}"]


def plain_weights(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return the weights with every matrix in FP8 as plain numbers in a dtype, without its scales."""
    names = [name.removesuffix(SCALES) for name in weights if name.endswith(SCALES)]
    packed = {name: found for name in names if (found := Fp8Weight.find(weights, name)) is not None}
    parts = {part for name, found in packed.items() for part in found.tensors(name)}
    kept = {name: tensor for name, tensor in weights.items() if name not in parts}
    return {**kept, **{f"{name}{WEIGHT}": found.dequantised(dtype) for name, found in packed.items()}}


def join_matrices(parts: Sequence[Matrix]) -> Matrix:
    """Return one matrix with the rows of all parts, which are all in FP8 or all plain."""
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    if fp8:
        assert len(fp8) == len(parts), "joined parts are all in FP8, or none"
        return join_rows(fp8)
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def take_rows(matrix: Matrix, order: Tensor) -> Matrix:
    """Return rows of a matrix in another order [M] int64."""
    return matrix.take(order) if isinstance(matrix, Fp8Weight) else matrix[order.to(matrix.device)]


def rows_between(matrix: Matrix, begin: int, end: int) -> Matrix:
    """Return rows [begin, end) of a matrix."""
    return matrix.rows(begin, end) if isinstance(matrix, Fp8Weight) else matrix[begin:end]
