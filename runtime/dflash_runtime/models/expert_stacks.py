"""Join the experts of a layer into two tensors [E, ...] while they are loaded.

A checkpoint has a tensor for each part of each expert, or one fused tensor for all experts: `experts.gate_up_proj` and
`experts.down_proj`. A shared expert becomes further experts at the end of the stack, each as wide as the others. Zeros
fill up the last one. They change no result, because silu(0) * 0 is 0.

Experts in FP8 become two stacks of matrices and two stacks of their scales, which are joined in the same way.

Axis letters: E experts, S experts that hold the shared one, F inner width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.fp8.fp8_weight import FP8, Fp8Weight
from dflash_runtime.checkpoint.layout import Shapes
from dflash_runtime.models.expert_shapes import EXPERT_TENSOR, ExpertSizes, expert_sizes

Matrix = Tensor | Fp8Weight
M = TypeVar("M", Tensor, Matrix)


Block = tuple[int, int] | None
"""Rows and columns of a matrix in FP8 with one scale; None: each row has one."""


def stack_experts(tensors: Iterable[tuple[str, M]], shapes: Shapes, block: Block = None) -> Iterator[tuple[str, M]]:
    """Yield stacked experts, and other tensors unchanged. `shapes` has all tensors that will come, in any order.

    `block` says how matrices in FP8 are scaled. Each tensor is copied into its stack at once: memory may not hold all
    experts twice.
    """
    layers = expert_sizes(shapes)
    stacks: dict[str, _Stack | _Fp8Stack] = {}
    for name, matrix in tensors:
        match = EXPERT_TENSOR.fullmatch(name)
        if match is None or match[1] not in layers:
            yield name, matrix
            continue
        owner, expert, is_shared, part = match.groups()
        layer, stacked = layers[owner], f"{owner}.experts.{'down' if part == 'down' else 'gate_up'}_proj.weight"
        if len(matrix.shape) == 3 and not layer.num_shared:
            yield stacked, matrix
            continue
        if stacked not in stacks:
            stacks[stacked] = _Fp8Stack(layer, block) if isinstance(matrix, Fp8Weight) else _Stack(layer)
        stacks[stacked].put(matrix, part, "shared" if is_shared else None if expert is None else int(expert))
    for name, stack in stacks.items():
        yield name, cast(Any, stack.joined)


class _Stack:
    """The stack of one part of a layer's experts, filled matrix by matrix."""

    def __init__(self, layer: ExpertSizes) -> None:
        self._layer = layer
        self._stack: Tensor | None = None

    @property
    def joined(self) -> Matrix:
        assert self._stack is not None
        return self._stack

    def put(self, matrix: Matrix, part: str, expert: "int | str | None") -> None:
        """Copy a part of one expert, of the shared one, or of all."""
        assert isinstance(matrix, Tensor)
        layer = self._layer
        if self._stack is None:
            self._stack = matrix.new_empty(layer.stack_shape(part))
        is_shared = expert == "shared"
        whose = self._stack[layer.num_experts :] if is_shared else self._stack[: layer.num_experts]
        whose = whose[expert] if isinstance(expert, int) else whose
        if part in ("gate", "up"):
            whose = whose.narrow(-2, layer.inner if part == "up" else 0, layer.inner)
        whose.copy_(_cut(layer, matrix, part) if is_shared else matrix)


class _Fp8Stack:
    """The stacks of the numbers and of the scales of one part of a layer's experts."""

    def __init__(self, layer: ExpertSizes, block: Block) -> None:
        self._layer, self._block = layer, block
        self._values, self._scales = _Stack(layer), _Stack(layer)
        self._input_scale: Tensor | None = None

    @property
    def joined(self) -> Matrix:
        values, scales = self._values.joined, self._scales.joined
        assert isinstance(values, Tensor)
        assert isinstance(scales, Tensor)
        return Fp8Weight(values.view(FP8), scales, self._input_scale)

    def put(self, matrix: Matrix, part: str, expert: "int | str | None") -> None:
        """Copy a part of one expert, of the shared one, or of all. Fixed scales of inputs become the largest one.

        Blocks of a shared expert that becomes several ones end with each of them; see `runs_here.refuse_quantised`.
        """
        assert isinstance(matrix, Fp8Weight)
        layer, fixed = self._layer, matrix.input_scale
        if expert == "shared":
            matrix = _filled(layer, matrix, part, self._block)
        if self._block is not None and layer.inner % self._block[0] and part != "down":
            matrix = matrix.with_row_scales()
        height, width = matrix.block
        scales = matrix.scales
        if part == "down":
            self._scales._layer = replace(layer, inner=-(-layer.inner // width), hidden=scales.shape[-2])
            if expert == "shared" and scales.shape[-1] == 1 < layer.num_shared:
                scales = scales.expand(-1, layer.num_shared).contiguous()
        else:
            self._scales._layer = replace(layer, inner=layer.inner // height, hidden=scales.shape[-1])
        self._values.put(matrix.values.view(torch.uint8), part, expert)
        self._scales.put(scales, part, expert)
        both = [item for item in (fixed, self._input_scale) if item is not None]
        self._input_scale = torch.stack(both).amax(0) if both and both[0].numel() else next(iter(both), None)


def _filled(sizes: ExpertSizes, matrix: Fp8Weight, part: str, block: Block) -> Fp8Weight:
    """Pad a part of the shared expert to whole experts, with zeros. Their scales are 1."""
    is_down = part == "down"
    missing = sizes.num_shared * sizes.inner - matrix.shape[1 if is_down else 0]
    place = (0, missing) if is_down else (0, 0, 0, missing)
    values = functional.pad(matrix.values.view(torch.uint8), place).view(FP8)
    lengths = block or (1, values.shape[1])
    counts = [-(-size // length) for size, length in zip(values.shape, lengths, strict=True)]
    place = (0, counts[1] - matrix.scales.shape[1], 0, counts[0] - matrix.scales.shape[0])
    return Fp8Weight(values, functional.pad(matrix.scales, place, value=1.0), matrix.input_scale)


def _cut(sizes: ExpertSizes, tensor: Tensor, part: str) -> Tensor:
    """Cut a part of the shared expert into experts: [S, F, hidden], or [S, hidden, F] for `down`."""
    is_down = part == "down"
    missing = sizes.num_shared * sizes.inner - tensor.shape[1 if is_down else 0]
    filled = functional.pad(tensor, (0, missing) if is_down else (0, 0, 0, missing))
    if is_down:
        return filled.view(sizes.hidden, sizes.num_shared, sizes.inner).transpose(0, 1)
    return filled.view(sizes.num_shared, sizes.inner, sizes.hidden)
